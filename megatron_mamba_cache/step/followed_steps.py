"""Send a step with drafts before the host has read the outcome of the step before; the device completes it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..policy.requests import RunningRequest
from ..recurrences.batches import PAD_SLOT
from .buffers import StepBuffers
from .decode_steps import DecodeStep
from .logits import Draws, write_followed_uniforms


def can_follow(
    step: DecodeStep,
    requests: Sequence[RunningRequest],
    buffers: StepBuffers,
    block_size: int,
    longest: int,
    *,
    is_planned: bool,
) -> bool:
    """Return whether `send_followed` can derive the next step of these requests, whatever `step` accepts.

    Args:
        longest: Maximum number of tokens per request.
        is_planned: True if the host plans attention, and so must know each request's number of KV blocks.
    """
    most = max(step.widths, default=1)
    if most == 1 or block_size < 2 * most or not step.is_sent_last(requests, buffers):
        return False
    if any([request.computed + 2 >= request.spec.max_len for request in requests]):
        return False
    computed = np.array([request.computed for request in requests])
    ends = computed + 2 * buffers.host("scheduled")[: len(requests)]  # of the next step if this one accepts all drafts
    if ends.max() > longest:
        return False
    return not is_planned or bool(((computed + 1) // block_size == (ends - 1) // block_size).all())


def send_followed(last: DecodeStep, buffers: StepBuffers, block_size: int, num_table_rows: int) -> DecodeStep:
    """Send and return the next step, with as many drafts, before the host has read the last step's outcome.

    The caller must complete it on the device with `follow_step`. Until then, it has the inputs of the last step, and
    its KV lengths are upper bounds.

    Args:
        num_table_rows: Number of block-table rows that the step uses, padding included.
    """
    requests, num_requests, fold_len = last.requests, len(last.requests), buffers.limits.fold_len
    buffers.begin()
    computed = buffers.host("computed")[:num_requests]
    computed[:] = [request.computed for request in requests]
    ends = computed + 2 * buffers.host("scheduled")[:num_requests]
    kv_lengths = buffers.host("kv_lengths")[:num_requests]
    has_new_blocks = bool(((kv_lengths - 1) // block_size != (ends - 1) // block_size).any())
    kv_lengths[:] = ends
    buffers.host("last_block_lens")[:num_requests] = (ends - 1) % block_size + 1
    if fold_len:  # the last step may have folded up to a later position
        folded = buffers.host("folded")[:num_requests]
        np.maximum(folded, computed // fold_len * fold_len, out=folded)
    buffers.host("align_slots")[:num_requests] = [
        request.reserved[0].slot if request.reserved else PAD_SLOT for request in requests
    ]
    has_new_blocks |= _write_blocks_near(requests, ends, buffers, block_size)
    if last.draws is not Draws.BEST:
        write_followed_uniforms(requests, buffers)
    buffers.send(num_table_rows)
    return DecodeStep(requests, buffers.num_begun, last.widths, None, last.draws, has_new_blocks)


def _write_blocks_near(
    requests: Sequence[RunningRequest], ends: npt.NDArray[np.int32], buffers: StepBuffers, block_size: int
) -> bool:
    """Update the block ids of requests near the start or the end of a block; return whether any changed.

    Blocks before the current one change only if publication replaces the one that was completed last.
    """
    scheduled, table, is_new = buffers.host("scheduled")[: len(requests)], buffers.host_block_table(), False
    starts = buffers.host("computed")[: len(requests)] - 2 * scheduled  # at or before the start of the step before last
    first, last = np.maximum(starts, 0) // block_size, (ends - 1) // block_size
    for row in np.flatnonzero(first != last).tolist():
        for index in range(first[row], last[row] + 1):
            if table[row, index] != (block := requests[row].block_ids[index]):
                table[row, index], is_new = block, True
    return is_new
