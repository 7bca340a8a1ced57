"""Divide prefill requests into chunks at absolute positions, and assign slots to the states at block boundaries."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_mamba_cache.errors import CacheIntegrityError

from ..policy.requests import RunningRequest
from ..recurrences.batches import PAD_SLOT
from .buffers import StepBuffers


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Division of a packed prefill batch into chunks for the scan, in packed order.

    Args:
        cu_chunks: [num_chunks + 1] packed start position of each chunk, and the end of the last chunk.
        chunk_requests: [num_chunks] index of each chunk's request.
        cu_request_chunks: [num_requests + 1] index of each request's first chunk, and the number of chunks.
    """

    cu_chunks: tuple[int, ...]
    chunk_requests: tuple[int, ...]
    cu_request_chunks: tuple[int, ...]

    @property
    def last_chunk_indices(self) -> tuple[int, ...]:
        """Index of each request's last chunk; -1 for a request without new tokens."""
        return tuple(last - 1 if first < last else -1 for first, last in pairwise(self.cu_request_chunks))

    def chunk_at_end(self, packed_end: int) -> int:
        """Return the index of the chunk that ends at a packed position; raise `CacheIntegrityError` if none does."""
        index = bisect_left(self.cu_chunks, packed_end)
        if index == 0 or index == len(self.cu_chunks) or self.cu_chunks[index] != packed_end:
            raise CacheIntegrityError(
                f"no chunk ends at packed position {packed_end}; chunks end at {self.cu_chunks[1:]}; "
                "the block size must be a multiple of the grain"
            )
        return index - 1


def plan_chunks(num_computed: Sequence[int], query_starts: Sequence[int], grain: int) -> ChunkPlan:
    """Cut each packed request into chunks at absolute token positions that are multiples of `grain`.

    Args:
        num_computed: [num_requests] number of each request's tokens computed before this batch.
        query_starts: [num_requests + 1] packed start position of each request's new tokens, and the total; starts with
            0.

    Raises:
        ValueError: If the lengths disagree, `grain` is below 1, a number is negative, or `query_starts` decreases or
            does not start with 0.
    """
    _check_demands(num_computed, query_starts, grain)
    cu_chunks = [0]
    chunk_requests: list[int] = []
    cu_request_chunks = [0]
    for request, (computed, (begin, end)) in enumerate(zip(num_computed, pairwise(query_starts), strict=True)):
        if begin < end:
            first_cut = begin + grain - computed % grain
            ends = [*range(first_cut, end, grain), end]
            cu_chunks.extend(ends)
            chunk_requests.extend([request] * len(ends))
        cu_request_chunks.append(len(chunk_requests))
    return ChunkPlan(tuple(cu_chunks), tuple(chunk_requests), tuple(cu_request_chunks))


def _check_demands(num_computed: Sequence[int], query_starts: Sequence[int], grain: int) -> None:
    if grain < 1:
        raise ValueError(f"grain must be at least 1 token, found {grain}")
    if len(query_starts) != len(num_computed) + 1:
        raise ValueError(
            f"query_starts must have {len(num_computed) + 1} entries for {len(num_computed)} requests, found "
            f"{len(query_starts)}"
        )
    if min(num_computed, default=0) < 0:
        raise ValueError(f"num_computed must not be negative, found {min(num_computed)}")
    if query_starts[0] != 0 or any(begin > end for begin, end in pairwise(query_starts)):
        raise ValueError(f"query_starts must start with 0 and not decrease, found {tuple(query_starts)}")


def write_prefill_batch(requests: Sequence[RunningRequest], buffers: StepBuffers, grain: int) -> int:
    """Write the `PrefillBatch` sections of the buffers; return the number of chunks.

    A request that starts at a cached boundary reads the cached slot and writes its live slot, so no state is copied. A
    request in mid-prefill, or with a dequantized state, reads and writes its live slot.
    """
    starts = [0]
    for request in requests:
        starts.append(starts[-1] + request.scheduled)
    computed = [request.computed for request in requests]
    plan = plan_chunks(computed, starts, grain)
    num_chunks, num_requests = len(plan.chunk_requests), len(requests)
    chunk_slots = [PAD_SLOT] * num_chunks
    for request, start in zip(requests, starts, strict=False):
        for state in request.reserved:
            chunk_slots[plan.chunk_at_end(start + state.position - request.computed)] = state.slot
    buffers.host("cu_seqlens")[: num_requests + 1] = starts
    buffers.host("prefill_computed")[:num_requests] = computed
    live_slots = [request.cursor.live_slot for request in requests]
    sources = [PAD_SLOT if request.source_slot is None else request.source_slot for request in requests]
    initial_slots = [slot if request.computed else PAD_SLOT for request, slot in zip(requests, live_slots, strict=True)]
    if buffers.limits.restores_states:
        buffers.host("source_slots")[:num_requests] = sources
    else:
        initial_slots = [
            slot if source == PAD_SLOT else source for slot, source in zip(initial_slots, sources, strict=True)
        ]
    buffers.host("initial_slots")[:num_requests] = initial_slots
    buffers.host("final_slots")[:num_requests] = live_slots
    buffers.host("cu_chunks")[: num_chunks + 1] = plan.cu_chunks
    buffers.host("chunk_requests")[:num_chunks] = plan.chunk_requests
    buffers.host("chunk_slots")[:num_chunks] = chunk_slots
    buffers.host("cu_request_chunks")[: num_requests + 1] = plan.cu_request_chunks
    buffers.host("longest_first")[:num_requests] = sorted(
        range(num_requests), key=lambda request: -requests[request].scheduled
    )
    return num_chunks
