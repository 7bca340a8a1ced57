"""Running requests get KV blocks after a step, pause, resume or are evicted."""

import pytest

from megatron_mamba_cache.errors import CacheCapacityError
from megatron_mamba_cache.policy.block_growth import GrowthOutcome, grow_requests
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.recurrences.slab_shape import SlabShape
from tests.policy.small_cache import (
    BLOCK,
    admit,
    cached_states,
    decode,
    frozen,
    new_spec,
    prefill,
    run_step,
    small_cache,
    verify,
)

PLENTY = 100


def full_requests(cache: PrefixCache, *num_blocks: int) -> list[RunningRequest]:
    """Return requests, oldest first, that each fill blocks of their own and need one more block."""
    return [prefill(cache, new_spec(index, [10 + index] * (BLOCK * count))) for index, count in enumerate(num_blocks)]


def full_twins(cache: PrefixCache, num_requests: int, first_id: int) -> list[RunningRequest]:
    """Return requests that share their only block and need one more block."""
    return [prefill(cache, new_spec(first_id + index, [1] * BLOCK)) for index in range(num_requests)]


def test_request_with_room_in_its_last_block_gets_no_new_block() -> None:
    cache = small_cache()
    request = prefill(cache, new_spec(0, [1] * 5))
    assert grow_requests([request], cache, PLENTY) == GrowthOutcome()
    assert len(request.block_ids) == 2


def test_request_whose_blocks_are_full_gets_one_new_block() -> None:
    cache = small_cache()
    requests = full_requests(cache, 1, 2)
    assert grow_requests(requests, cache, PLENTY) == GrowthOutcome()
    assert [len(request.block_ids) for request in requests] == [2, 3]
    assert grow_requests(requests, cache, PLENTY) == GrowthOutcome()
    assert [len(request.block_ids) for request in requests] == [2, 3]
    cache.check_integrity(requests)


def test_prefilling_request_gets_no_new_block() -> None:
    cache = small_cache()
    request = admit(cache, new_spec(0, [1] * 8), budget=4)
    run_step(cache, [request])
    assert request.is_prefilling and request.computed == BLOCK
    assert grow_requests([request], cache, PLENTY) == GrowthOutcome()
    assert len(request.block_ids) == 2


def test_cached_blocks_are_evicted_before_any_request_pauses() -> None:
    cache = small_cache(num_blocks=3)
    cache.release(prefill(cache, new_spec(9, [9] * 8)))
    (request,) = full_requests(cache, 1)
    assert cache.kv.num_free == 0
    assert grow_requests([request], cache, PLENTY) == GrowthOutcome()
    assert len(request.block_ids) == 2


def test_younger_request_pauses_if_one_block_is_left() -> None:
    cache = small_cache(num_blocks=3)
    old, young = full_requests(cache, 1, 1)
    assert grow_requests([young, old], cache, PLENTY) == GrowthOutcome(paused=(young,))
    assert (len(old.block_ids), old.is_paused, len(young.block_ids), young.is_paused) == (2, False, 1, True)
    cache.check_integrity([old, young])


def test_paused_request_is_reported_once_and_resumes_when_there_is_room() -> None:
    cache = small_cache(num_blocks=3)
    old, young = full_requests(cache, 1, 1)
    grow_requests([old, young], cache, PLENTY)
    assert grow_requests([old, young], cache, PLENTY) == GrowthOutcome()
    assert young.is_paused
    cache.release(old)
    assert grow_requests([young], cache, PLENTY) == GrowthOutcome()
    assert (young.is_paused, len(young.block_ids)) == (False, 2)


def test_older_paused_request_resumes_before_a_younger_request_grows() -> None:
    cache = small_cache(num_blocks=4)
    busy = prefill(cache, new_spec(9, [9]))
    old, young = full_requests(cache, 1, 1)
    taken = cache.kv.allocate(1)
    assert grow_requests([busy, old], cache, PLENTY) == GrowthOutcome(paused=(old,))
    cache.kv.release(taken)
    assert grow_requests([busy, young, old], cache, PLENTY) == GrowthOutcome(paused=(young,))
    assert (len(old.block_ids), old.is_paused) == (2, False)
    cache.check_integrity([busy, old, young])


def test_youngest_request_is_evicted_if_no_request_could_continue() -> None:
    cache = small_cache(num_blocks=3)
    requests = full_requests(cache, 1, 1, 1)
    outcome = grow_requests(requests, cache, PLENTY)
    assert outcome == GrowthOutcome(paused=(requests[1],), evicted=(requests[2],))
    assert (len(requests[0].block_ids), requests[2].block_ids) == (2, [])
    cache.check_integrity(requests[:2])


def test_requests_that_may_not_stay_paused_are_evicted_youngest_first() -> None:
    cache = small_cache(num_blocks=7, num_slots=9)
    busy = prefill(cache, new_spec(9, [9]))
    requests = full_requests(cache, 2, 2, 2)
    outcome = grow_requests([busy, *requests], cache, 0)
    assert outcome.evicted == (requests[2],)
    assert outcome.paused == () and [len(request.block_ids) for request in requests] == [3, 3, 0]
    cache.check_integrity([busy, *requests[:2]])


def test_evicting_one_of_two_requests_that_share_a_block_frees_nothing() -> None:
    cache = small_cache(num_blocks=2)
    busy = prefill(cache, new_spec(9, [9]))
    twins = full_twins(cache, 2, first_id=0)
    outcome = grow_requests([busy, *twins], cache, 1)
    assert outcome == GrowthOutcome(paused=tuple(twins))
    outcome = grow_requests([busy, *twins], cache, 0)
    assert outcome == GrowthOutcome(evicted=(twins[1], twins[0]))
    cache.check_integrity([busy])


def test_evicted_request_frees_its_memory_but_its_prefix_stays_cached() -> None:
    cache = small_cache(num_blocks=4)
    old, young = full_requests(cache, 2, 2)
    assert grow_requests([old, young], cache, 0).evicted == (young,)
    assert cache.slots.count_by_owner()["live"] == 1
    assert cache.kv.find(young.chain.keys[0]) is not None
    assert len(cached_states(cache)) >= 1
    cache.check_integrity([old])


def test_cached_state_is_evicted_for_a_block_before_any_request_pauses() -> None:
    cache = small_cache(slabs=(5, 1, 1))
    cache.release(prefill(cache, new_spec(9, [9] * BLOCK)))
    (request,) = full_requests(cache, 2)
    while request.scheduled or len(request.block_ids) < 4:
        assert grow_requests([request], cache, PLENTY) == GrowthOutcome()
        decode(cache, request, [7] * BLOCK)
    assert cached_states(cache) == []
    cache.check_integrity([request])


def test_younger_request_is_evicted_to_use_its_state_memory_for_blocks() -> None:
    cache = small_cache(slabs=(3, 1, 1))
    old, young = full_twins(cache, 2, first_id=0)
    assert grow_requests([old, young], cache, 0) == GrowthOutcome(evicted=(young,))
    assert len(old.block_ids) == 2


@pytest.mark.parametrize("shape", [SlabShape(3, 2), SlabShape(1, 2), SlabShape(2, 1)])
def test_lone_request_gets_a_block_by_evicting_the_states_of_a_slab(shape: SlabShape) -> None:
    max_blocks, num_drafts = 6, BLOCK - 1
    num_slabs = shape.slabs_of_request(max_blocks, 2 + num_drafts)
    cache = small_cache(slabs=(num_slabs, shape.blocks_per_slab, shape.slots_per_slab), checkpoints="none")
    request = prefill(cache, new_spec(0, [1] * (BLOCK * 2)), first_token=1)
    cache.grow(request)
    others = cache.slots.reserve(cache.slots.num_available)  # states of other requests, in every slab with room
    elsewhere = {slot // shape.slots_per_slab: slot for slot in others}
    elsewhere.pop(request.cursor.live_slot // shape.slots_per_slab, None)
    for slot in list(elsewhere.values())[:num_drafts]:
        others.remove(slot)
        cache.slots.cancel(slot)
    verify(cache, request, [1] * num_drafts, [1] * BLOCK)
    assert (
        len({slot // shape.slots_per_slab for slot in (request.cursor.live_slot, *request.cursor.draft_slots)}) == BLOCK
    )
    for slot in others:  # the other requests release their slots
        cache.slots.cancel(slot)
    while len(request.block_ids) < max_blocks:
        assert grow_requests([request], cache, PLENTY) == GrowthOutcome()
        verify(cache, request, [1] * num_drafts, [1] * BLOCK)
    cache.check_integrity([request])


def test_lone_request_that_fills_the_pool_raises_and_changes_nothing() -> None:
    cache = small_cache(num_blocks=2)
    (request,) = full_requests(cache, 2)
    before = frozen(cache)
    with pytest.raises(CacheCapacityError, match="--inference-dynamic-batching-buffer-size-gb"):
        grow_requests([request], cache, PLENTY)
    assert frozen(cache) == before
    assert (len(request.block_ids), request.is_paused) == (2, False)
