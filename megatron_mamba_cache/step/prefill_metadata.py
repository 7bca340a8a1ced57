"""The metadata of a step's prefill rows: chunks by absolute position, and the slot each boundary is written to."""

from collections.abc import Sequence

from ..policy.chunks import plan_chunks
from ..policy.requests import RunningRequest
from ..recurrences.batches import PAD_SLOT
from .buffers import StepBuffers


def write_prefill_batch(rows: Sequence[RunningRequest], buffers: StepBuffers, grain: int) -> int:
    """Write the `PrefillBatch` sections of the buffers; return the number of chunks.

    A row that starts at a cached boundary reads its initial state straight from the cached slot and writes its final
    state to its live slot, so that a restore costs no copy; a row in mid-prefill reads and writes its live slot, and so
    does one whose cached state is restored before.
    """
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + row.scheduled)
    plan = plan_chunks([row.computed for row in rows], starts, grain)
    num_chunks, num_rows = len(plan.chunk_requests), len(rows)
    chunk_slots = [PAD_SLOT] * num_chunks
    for row, start in zip(rows, starts, strict=False):
        for state in row.reserved:
            chunk_slots[plan.chunk_at_end(start + state.position - row.computed)] = state.slot
    buffers.host("cu_seqlens")[: num_rows + 1] = starts
    initial_slots = [_initial_slot(row) for row in rows]
    if buffers.limits.restores_states:
        buffers.host("source_slots")[:num_rows] = [_restored_slot(row) for row in rows]
        initial_slots = [
            slot if row.source_block is None else row.cursor.live_slot
            for row, slot in zip(rows, initial_slots, strict=True)
        ]
    buffers.host("initial_slots")[:num_rows] = initial_slots
    buffers.host("final_slots")[:num_rows] = [row.cursor.live_slot for row in rows]
    buffers.host("cu_chunks")[: num_chunks + 1] = plan.cu_chunks
    buffers.host("chunk_requests")[:num_chunks] = plan.chunk_requests
    buffers.host("chunk_slots")[:num_chunks] = chunk_slots
    buffers.host("cu_request_chunks")[: num_rows + 1] = plan.cu_request_chunks
    buffers.host("longest_first")[:num_rows] = sorted(range(num_rows), key=lambda row: -rows[row].scheduled)
    return num_chunks


def _initial_slot(row: RunningRequest) -> int:
    if row.source_slot is not None:
        return row.source_slot
    return row.cursor.live_slot if row.computed else PAD_SLOT


def _restored_slot(row: RunningRequest) -> int:
    return PAD_SLOT if row.source_block is None or row.source_slot is None else row.source_slot
