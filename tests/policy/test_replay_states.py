"""Requests with draft buffers: one buffer each, no slots for drafts, and the position of the live slot's state."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.errors import CacheIntegrityError
from megatron_mamba_cache.policy.draft_states import num_folded
from megatron_mamba_cache.policy.requests import RunningRequest
from tests.policy.small_cache import new_spec, prefill, small_cache, verify

MOST = 4


@given(st.lists(st.integers(0, 2 * MOST - 1), max_size=60))
def test_each_running_request_has_its_own_draft_buffer(choices: list[int]) -> None:
    cache = small_cache(num_blocks=64, num_slots=16, max_requests=MOST, replays=True)
    running: list[RunningRequest] = []
    for number, choice in enumerate(choices):
        if choice < MOST and len(running) < MOST:
            running.append(prefill(cache, new_spec(number, [number, choice])))
        elif running:
            cache.release(running.pop(choice % len(running)))
        cache.check_integrity(running)
        buffers = [request.cursor.draft_buffer for request in running]
        assert len(set(buffers)) == len(buffers) and set(buffers) <= set(range(MOST))


def test_more_requests_than_draft_buffers_raise_and_change_nothing() -> None:
    cache = small_cache(num_blocks=64, num_slots=16, max_requests=1, replays=True)
    request = prefill(cache, new_spec(0, [1, 2]))
    with pytest.raises(CacheIntegrityError, match="all 1 draft buffers are in use"):
        prefill(cache, new_spec(1, [3, 4]))
    cache.check_integrity([request])


def test_check_integrity_detects_a_draft_buffer_held_by_two_requests() -> None:
    cache = small_cache(num_blocks=64, num_slots=16, max_requests=2, replays=True)
    requests = [prefill(cache, new_spec(number, [number])) for number in range(2)]
    requests[1].cursor.draft_buffer = requests[0].cursor.draft_buffer
    with pytest.raises(CacheIntegrityError, match="draft buffers"):
        cache.check_integrity(requests)


@pytest.mark.parametrize("num_slots", [3, 8])
def test_drafts_use_no_state_slots_with_draft_buffers(num_slots: int) -> None:
    cache = small_cache(num_slots=num_slots, block_size=16, max_requests=2, replays=True)
    request = prefill(cache, new_spec(0, [1, 2]), first_token=3)
    before = cache.slots.count_by_owner()
    for kept in ([5], [5, 6, 7], [5, 6, 7, 8, 9]):
        cache.schedule_decode(request, [5, 6, 7, 8])
        assert len(request.drafts) == 4 and request.cursor.draft_slots == []
        assert cache.slots.count_by_owner() == before
        cache.abort(request)
        verify(cache, request, [5, 6, 7, 8], kept)
    assert request.computed == 2 + 1 + 3 + 5


@given(prompt_len=st.integers(1, 40), fold_len=st.sampled_from((4, 8, 16, 32)), seed=st.integers(0, 999))
def test_stored_state_position_advances_in_steps_of_the_ring_length(prompt_len: int, fold_len: int, seed: int) -> None:
    rng = random.Random(seed)
    cache = small_cache(num_blocks=64, num_slots=16, block_size=32, max_requests=1, replays=True)
    request = prefill(cache, new_spec(0, range(prompt_len), max_len=1000), first_token=1)
    folded = prompt_len
    for _ in range(40):
        assert num_folded(request, fold_len) == folded
        drafts = [2] * rng.randrange(9)
        start = request.computed
        verify(cache, request, drafts, [3] * rng.randrange(1, 2 + len(drafts)))
        folded = max(folded, start // fold_len * fold_len)
        if rng.random() < 0.1:
            cache.draft_states.close(request.cursor, request.computed)
            folded = request.computed
    assert request.computed - num_folded(request, fold_len) <= fold_len + 8
