"""What follows a step's forward on the device: sampling, verification of drafts, and copies of boundary states."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ..kernels.align_copy import align_copy
from ..kernels.sampling import greedy_tokens, sample_tokens
from ..kernels.verification import accept_matching
from ..state.step_batch import StepBatch
from ..state.step_logits import StepLogits
from .cache_memory import CacheMemory


def verify_step(rows: StepLogits, logits: Tensor, distributions: Sequence[Tensor | None]) -> Tensor:
    """Sample every logits row and accept the drafts that hold.

    Args:
        logits: [logits, vocab].
        distributions: Of the decode rows, in order: what their drafts were drawn from; None where they are certain.

    Returns:
        [rows, 2 + max drafts] int64: how many tokens each row accepts, and those tokens.
    """
    if rows.all_greedy:
        tokens = greedy_tokens(logits)
    else:
        tokens = sample_tokens(logits, rows.temperature, rows.top_k, rows.top_p, rows.uniforms)
    return accept_matching(tokens, rows.verify)


def copy_reached_boundaries(step: StepBatch, outcome: Tensor, memory: CacheMemory) -> None:
    """Copy the state of each decode row at the boundary it reached, if it did, into the slot reserved for it."""
    if step.align is not None:
        accepted = outcome[: step.num_decode_rows, 0]
        pool, geometry = memory.state_pool, memory.geometry
        rows = replace(step.align, accepted=accepted)
        align_copy(pool.conv, pool.ssm, rows, geometry.block_size, geometry.window_len)
