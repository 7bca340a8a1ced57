"""Aborted steps, released requests, evictions, and inconsistencies that the integrity check detects."""

import pytest

from megatron_mamba_cache.errors import CacheCapacityError, CacheIntegrityError
from megatron_mamba_cache.policy.admission import Refusal
from megatron_mamba_cache.policy.identifiers import BlockId
from megatron_mamba_cache.policy.requests import Candidate
from megatron_mamba_cache.policy.slabs import SlabSpace
from megatron_mamba_cache.policy.slot_owners import SlotOwner
from tests.policy.small_cache import (
    BLOCK,
    NewCache,
    admit,
    cached_states,
    new_spec,
    outcome,
    planned,
    prefill,
    run_step,
    serve,
    small_cache,
)

A, B, C, D = ([token] * BLOCK for token in (1, 2, 3, 4))


# Abort, release, eviction.


@pytest.mark.parametrize(
    ("part", "method"),
    [("slots", "unpin"), ("slots", "cancel"), ("slots", "touch_path"), ("slots", "release_live"), ("kv", "release")],
)
def test_release_interrupted_by_an_error_can_be_repeated(
    new_cache: NewCache, part: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new_cache()
    serve(cache, new_spec(0, [*A, *B, 9]))
    request = admit(cache, new_spec(1, [*A, *B, *C, 9]))
    assert request.reserved and request.source_block is not None
    held = (list(request.block_ids), request.cursor.live_slot)

    def fail(*_: object) -> None:
        raise RuntimeError(method)

    with monkeypatch.context() as patch:
        patch.setattr(getattr(cache, part), method, fail)
        with pytest.raises(RuntimeError, match=method):
            cache.release(request)
    cache.check_integrity([request])
    assert request.cursor.live_slot == held[1] and request.block_ids == ([] if method == "release_live" else held[0])
    assert cache.slots.owner_of(request.cursor.live_slot) is SlotOwner.LIVE
    cache.release(request)
    cache.check_integrity([])
    assert (cache.kv.num_referenced, cache.slots.num_available) == (0, cache.slots.num_slots)


def test_aborted_request_releases_slots_and_pins_and_caches_nothing(new_cache: NewCache) -> None:
    cache = new_cache(stride=1)
    serve(cache, new_spec(0, [*A, 9]))
    request = admit(cache, new_spec(1, [*A, *B, *C, 9]))
    assert len(request.reserved) == 2 and cache.slots.is_pinned(request.block_ids[0])
    cache.abort(request)
    assert (request.reserved, request.scheduled, request.source_block) == ([], 0, None)
    assert cache.slots.num_reserved == 0 and not cache.slots.is_pinned(request.block_ids[0])
    assert [cache.kv.key_of(block) is None for block in request.block_ids] == [False, True, True, True]
    cache.check_integrity([request])


def test_request_released_within_a_step_frees_all_its_memory(new_cache: NewCache) -> None:
    cache = new_cache(stride=1)
    serve(cache, new_spec(0, [*A, 9]))
    request = admit(cache, new_spec(1, [*A, *B, *C, 9]))
    cache.release(request)
    cache.check_integrity([])
    owners = cache.slots.count_by_owner()
    assert owners == {"free": cache.slots.num_free, "live": 0, "reserved": 0, "cached": 1, "draft": 0}
    assert cache.slots.num_available == cache.slots.num_slots
    assert (cache.kv.num_cached, cache.kv.num_available) == (1, cache.kv.num_blocks)


def test_cached_blocks_of_a_finished_request_stay_until_evicted() -> None:
    cache = small_cache(num_blocks=4)
    serve(cache, new_spec(0, [*A, *B, 9]))
    serve(cache, new_spec(1, [*C, 9]))
    assert planned(cache, new_spec(2, [*A, *B, 9])).match.skip_tokens == 2 * BLOCK
    serve(cache, new_spec(3, [*D, *D, *D, 9]))
    assert planned(cache, new_spec(4, [*A, *B, 9])).match.blocks == ()


def test_evicting_a_block_also_drops_its_state() -> None:
    cache = small_cache(num_blocks=3)
    serve(cache, new_spec(0, [*A, *B, 9]))
    (block,) = cached_states(cache)
    taken = cache.kv.allocate(2)
    assert block in taken and cached_states(cache) == []
    assert cache.slots.count_by_owner()["free"] == 8


def test_matched_prefix_is_not_evicted_by_its_own_admission() -> None:
    cache = small_cache(num_blocks=4)
    serve(cache, new_spec(0, [*A, *B, 9]))
    serve(cache, new_spec(1, [*D, 9]))
    request = admit(cache, new_spec(2, [*A, *B, *C, 9]))
    assert request.computed == 2 * BLOCK
    assert [cache.kv.find(key) for key in request.chain.keys[:2]] == request.block_ids[:2]
    assert outcome(cache, [*D, 9]) is Refusal.NO_BLOCKS
    cache.check_integrity([request])


def test_states_of_a_just_finished_request_are_evicted_last() -> None:
    cache = small_cache(num_slots=4)
    first = prefill(cache, new_spec(0, [*A, 9]))
    cache.release(prefill(cache, new_spec(1, [*B, 9])))
    cache.release(first)
    cache.slots.reserve(3)
    assert cached_states(cache) == [cache.kv.find(first.chain.keys[0])]


def test_matched_state_is_pinned_until_its_step_ends() -> None:
    cache = small_cache(num_slots=3)
    serve(cache, new_spec(0, [*A, *B, 9]))
    request = admit(cache, new_spec(1, [*A, *B, 8]))
    source = request.source_block
    assert source is not None and cache.slots.is_pinned(source)
    with pytest.raises(CacheCapacityError):
        cache.slots.reserve(2)
    run_step(cache, [request])
    assert not cache.slots.is_pinned(source) and request.source_slot is None


def test_request_keeps_its_age_when_admitted_again(new_cache: NewCache) -> None:
    cache = new_cache()
    requests = [prefill(cache, new_spec(index, [index])) for index in range(3)]
    assert [request.age for request in requests] == [0, 1, 2]
    cache.release(requests[0])
    again = Candidate(new_spec(0, [0, 0]), age=requests[0].age)
    plan = planned(cache, again.spec)
    assert cache.admit(again, plan).age == 0


def test_counters_report_matched_skipped_and_computed_tokens(new_cache: NewCache) -> None:
    cache = new_cache()
    serve(cache, new_spec(0, [*A, *B, 9]))
    serve(cache, new_spec(1, [*A, *B, 9]), [1, 2])
    serve(cache, new_spec(2, [*A, *C, 9]))
    counters = cache.counters
    assert (counters.requests_admitted, counters.prompt_tokens_matched, counters.prompt_tokens_skipped) == (3, 12, 8)
    assert (counters.prefill_tokens_computed, counters.decode_tokens_computed) == (9 + 1 + 9, 2)
    assert (counters.states_reserved, counters.states_published, counters.states_restored) == (3, 3, 1)


# Memory that KV blocks and states share.


def test_states_and_blocks_evict_each_other_in_shared_memory() -> None:
    cache = small_cache(slabs=(4, 2, 1))
    space = cache.pools.space
    assert isinstance(space, SlabSpace)
    serve(cache, new_spec(0, [*A, *B, 9]))
    assert space.count_slabs() == {"unused": 2, "kv_blocks": 1, "states": 1}
    request = prefill(cache, new_spec(1, [*C, *C, *C, *C, *C]))
    assert space.count_slabs() == {"unused": 0, "kv_blocks": 3, "states": 1}
    assert cached_states(cache) == []
    cache.release(request)
    assert space.count_slabs() == {"unused": 4, "kv_blocks": 0, "states": 0}
    requests = [admit(cache, new_spec(number, [number])) for number in (2, 3)]
    assert space.count_slabs() == {"unused": 1, "kv_blocks": 1, "states": 2}
    cache.check_integrity(requests)


def test_memory_slab_with_a_running_requests_block_is_not_used_for_states() -> None:
    cache = small_cache(slabs=(3, 2, 1))
    request = prefill(cache, new_spec(0, [*A, *B, *C]))
    assert outcome(cache, [9]) is Refusal.NO_SLOT
    cache.release(request)
    assert planned(cache, new_spec(1, [9])).num_new_blocks == 1


def test_failed_release_keeps_the_requests_state_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = small_cache(slabs=(20, 4, 2))
    first, second, third = [prefill(cache, new_spec(number, [number])) for number in range(3)]
    cache.release(first)  # its slab has room, and a lower number than the third's

    def fail(*_: object) -> None:
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(cache.kv, "release", fail)
        with pytest.raises(RuntimeError):
            cache.release(third)
    cache.check_integrity([second, third])


# Integrity checks.


def lose_a_request(requests: list[object]) -> None:
    requests.pop()


def lose_a_block(requests: list[object]) -> None:
    requests[0].block_ids.pop()  # type: ignore[attr-defined]


def hold_a_strange_block(requests: list[object]) -> None:
    requests[0].block_ids.append(BlockId(15))  # type: ignore[attr-defined]


def lose_a_column(requests: list[object]) -> None:
    requests[0].cursor.draft_slots.pop()  # type: ignore[attr-defined]


def claim_a_strange_column(requests: list[object]) -> None:
    requests[0].cursor.draft_slots[0] = requests[0].cursor.live_slot  # type: ignore[attr-defined]


def swap_live_slot_and_column(requests: list[object]) -> None:
    request = requests[0]
    request.cursor.draft_slots[0], request.cursor.live_slot = request.cursor.live_slot, request.cursor.draft_slots[0]  # type: ignore[attr-defined]


def lose_a_reservation(requests: list[object]) -> None:
    requests[1].reserved.clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "corrupt",
    [
        lose_a_request,
        lose_a_block,
        hold_a_strange_block,
        lose_a_reservation,
        lose_a_column,
        claim_a_strange_column,
        swap_live_slot_and_column,
    ],
)
def test_check_integrity_detects_requests_inconsistent_with_the_pools(new_cache: NewCache, corrupt: object) -> None:
    cache = new_cache()
    requests = [prefill(cache, new_spec(0, [*A, 9])), admit(cache, new_spec(1, [*B, 9]))]
    cache.schedule_decode(requests[0], [8])
    cache.check_integrity(requests)
    corrupt(requests)  # type: ignore[operator]
    with pytest.raises(CacheIntegrityError):
        cache.check_integrity(requests)
