"""What follows a step's forward on the device: sampling, verification of drafts, and copies of boundary states."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.align_copy import align_copy
from ..kernels.sampling import greedy_tokens, sample_tokens, token_probabilities
from ..kernels.verification import DraftDistributions, RatioUniforms, accept_by_ratio, accept_matching
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
    drawn = _drawn_from(rows, distributions)
    if drawn is None and rows.all_greedy:
        return accept_matching(greedy_tokens(logits), rows.verify)
    settings = (rows.temperature, rows.top_k, rows.top_p)
    tokens = sample_tokens(logits, *settings, rows.uniforms)
    if drawn is None:
        return accept_matching(tokens, rows.verify)
    uniforms = RatioUniforms(rows.accept_uniforms, rows.residual_uniforms)
    return accept_by_ratio(tokens, token_probabilities(logits, *settings), rows.verify, drawn, uniforms)


def _drawn_from(rows: StepLogits, distributions: Sequence[Tensor | None]) -> DraftDistributions | None:
    """Return the distributions of all rows that have any, and which logits row each belongs to."""
    if all(drawn is None for drawn in distributions):
        return None
    index = torch.full(rows.tokens.shape, -1, dtype=torch.int32)
    found: list[Tensor] = []
    num_found = 0
    for start, drawn in zip(rows.starts, distributions, strict=False):
        if drawn is not None:
            index[start : start + len(drawn)] = torch.arange(num_found, num_found + len(drawn), dtype=torch.int32)
            num_found += len(drawn)
            found.append(drawn)
    return DraftDistributions(torch.cat(found), index.to(found[0].device))


def copy_reached_boundaries(step: StepBatch, outcome: Tensor, memory: CacheMemory) -> None:
    """Copy the state of each decode row at the boundary it reached, if it did, into the slot reserved for it."""
    if step.align is not None:
        accepted = outcome[: step.align.targets.shape[0], 0]
        pool, geometry = memory.state_pool, memory.geometry
        rows = replace(step.align, accepted=accepted)
        align_copy(pool.conv, pool.ssm, rows, geometry.block_size, geometry.window_len)
