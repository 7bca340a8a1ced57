"""Properties of the plan of scan chunks."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.errors import CacheIntegrityError
from megatron_mamba_cache.step.prefill_metadata import ChunkPlan, plan_chunks

ROWS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=5)


def plan_demands(requests: list[tuple[int, int]], chunk_size: int) -> ChunkPlan:
    starts = list(accumulate((num_new for _, num_new in requests), initial=0))
    return plan_chunks([computed for computed, _ in requests], starts, chunk_size)


def test_resumed_request_is_chunked_at_absolute_positions() -> None:
    plan = plan_chunks([0, 300], [0, 700, 1000], 256)
    assert plan.cu_chunks == (0, 256, 512, 700, 912, 1000)
    assert plan.chunk_requests == (0, 0, 0, 1, 1)
    assert plan.last_chunk_indices == (2, 4)


def test_request_shorter_than_one_chunk_is_one_scan_chunk() -> None:
    assert plan_chunks([300], [0, 10], 256).cu_chunks == (0, 10)


def test_request_that_ends_at_a_chunk_end_has_no_empty_chunk() -> None:
    assert plan_chunks([300], [0, 212], 256) == ChunkPlan((0, 212), (0,), (0, 1))


def test_request_without_tokens_has_no_scan_chunk() -> None:
    plan = plan_chunks([0, 7, 0], [0, 4, 4, 8], 4)
    assert plan == ChunkPlan((0, 4, 8), (0, 2), (0, 1, 1, 2))
    assert plan.last_chunk_indices == (0, -1, 1)


def test_empty_batch_has_no_scan_chunk() -> None:
    assert plan_chunks([], [0], 4) == ChunkPlan((0,), (), (0,))


@given(ROWS, st.integers(1, 12))
def test_chunk_plan_matches_a_token_by_token_reference(requests: list[tuple[int, int]], chunk_size: int) -> None:
    ends: list[int] = []
    owners: list[int] = []
    packed = 0
    for request, (computed, num_new) in enumerate(requests):
        for token in range(1, num_new + 1):
            packed += 1
            if (computed + token) % chunk_size == 0 or token == num_new:
                ends.append(packed)
                owners.append(request)
    last = [
        max((i for i, owner in enumerate(owners) if owner == request), default=-1) for request in range(len(requests))
    ]
    firsts = [sum(owner < request for owner in owners) for request in range(len(requests) + 1)]
    plan = plan_demands(requests, chunk_size)
    assert plan == ChunkPlan((0, *ends), tuple(owners), tuple(firsts))
    assert plan.last_chunk_indices == tuple(last)


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 12), st.data())
def test_request_resumed_at_a_chunk_end_has_the_same_chunks(
    computed: int, num_new: int, chunk_size: int, data: st.DataObject
) -> None:
    whole = [computed + end for end in plan_demands([(computed, num_new)], chunk_size).cu_chunks]
    cut = data.draw(st.sampled_from(whole))
    head = [computed + end for end in plan_demands([(computed, cut - computed)], chunk_size).cu_chunks]
    tail = [cut + end for end in plan_demands([(cut, computed + num_new - cut)], chunk_size).cu_chunks]
    assert head + tail[1:] == whole


@given(ROWS, st.integers(1, 12))
def test_chunk_is_found_by_its_end_position_and_other_positions_raise(
    requests: list[tuple[int, int]], chunk_size: int
) -> None:
    plan = plan_demands(requests, chunk_size)
    found = {end: index for index, end in enumerate(plan.cu_chunks[1:])}
    for position in range(-1, plan.cu_chunks[-1] + 2):
        if position in found:
            assert plan.chunk_at_end(position) == found[position]
        else:
            with pytest.raises(CacheIntegrityError, match="ends at packed position"):
                plan.chunk_at_end(position)


@pytest.mark.parametrize(
    ("num_computed", "query_starts", "chunk_size"),
    [([0], [0, 4], 0), ([0], [0], 4), ([0], [0, 4, 8], 4), ([-1], [0, 4], 4), ([0], [1, 4], 4), ([0, 0], [0, 4, 3], 4)],
)
def test_chunk_plan_refuses_invalid_requests(num_computed: list[int], query_starts: list[int], chunk_size: int) -> None:
    with pytest.raises(ValueError, match=r"need|must"):
        plan_chunks(num_computed, query_starts, chunk_size)
