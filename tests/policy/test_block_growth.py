"""Properties of growing rows after a step."""

import pytest

from megatron_mamba_cache.errors import CacheCapacityError
from megatron_mamba_cache.policy.block_growth import GrowthOutcome, grow_rows
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.recurrences.slab_shape import SlabShape
from tests.policy.small_cache import (
    BLOCK,
    admit,
    cached_states,
    decode,
    frozen,
    prefill,
    request,
    run_step,
    small_cache,
    verify,
)

PLENTY = 100


def full_rows(cache: PrefixCache, *num_blocks: int) -> list[RunningRequest]:
    """Return rows, oldest first, that fill so many blocks of their own and need one more."""
    return [prefill(cache, request(index, [10 + index] * (BLOCK * count))) for index, count in enumerate(num_blocks)]


def full_twins(cache: PrefixCache, num_rows: int, first_id: int) -> list[RunningRequest]:
    """Return rows that share their only block and need one more."""
    return [prefill(cache, request(first_id + index, [1] * BLOCK)) for index in range(num_rows)]


def test_row_with_room_in_its_last_block_does_not_grow() -> None:
    cache = small_cache()
    row = prefill(cache, request(0, [1] * 5))
    assert grow_rows([row], cache, PLENTY) == GrowthOutcome()
    assert len(row.block_ids) == 2


def test_full_row_grows_by_one_block() -> None:
    cache = small_cache()
    rows = full_rows(cache, 1, 2)
    assert grow_rows(rows, cache, PLENTY) == GrowthOutcome()
    assert [len(row.block_ids) for row in rows] == [2, 3]
    assert grow_rows(rows, cache, PLENTY) == GrowthOutcome()
    assert [len(row.block_ids) for row in rows] == [2, 3]
    cache.check_integrity(rows)


def test_row_in_mid_prefill_holds_its_blocks_already() -> None:
    cache = small_cache()
    row = admit(cache, request(0, [1] * 8), budget=4)
    run_step(cache, [row])
    assert row.is_prefilling and row.computed == BLOCK
    assert grow_rows([row], cache, PLENTY) == GrowthOutcome()
    assert len(row.block_ids) == 2


def test_cached_blocks_are_evicted_before_anybody_pauses() -> None:
    cache = small_cache(num_blocks=3)
    cache.release(prefill(cache, request(9, [9] * 8)))
    (row,) = full_rows(cache, 1)
    assert cache.kv.num_free == 0
    assert grow_rows([row], cache, PLENTY) == GrowthOutcome()
    assert len(row.block_ids) == 2


def test_younger_row_pauses_when_one_block_is_left() -> None:
    cache = small_cache(num_blocks=3)
    old, young = full_rows(cache, 1, 1)
    assert grow_rows([young, old], cache, PLENTY) == GrowthOutcome(paused=(young,))
    assert (len(old.block_ids), old.is_paused, len(young.block_ids), young.is_paused) == (2, False, 1, True)
    cache.check_integrity([old, young])


def test_paused_row_is_named_once_and_resumes_when_there_is_room() -> None:
    cache = small_cache(num_blocks=3)
    old, young = full_rows(cache, 1, 1)
    grow_rows([old, young], cache, PLENTY)
    assert grow_rows([old, young], cache, PLENTY) == GrowthOutcome()
    assert young.is_paused
    cache.release(old)
    assert grow_rows([young], cache, PLENTY) == GrowthOutcome()
    assert (young.is_paused, len(young.block_ids)) == (False, 2)


def test_older_paused_row_resumes_before_a_younger_row_grows() -> None:
    cache = small_cache(num_blocks=4)
    busy = prefill(cache, request(9, [9]))
    old, young = full_rows(cache, 1, 1)
    taken = cache.kv.allocate(1)
    assert grow_rows([busy, old], cache, PLENTY) == GrowthOutcome(paused=(old,))
    cache.kv.release(taken)
    assert grow_rows([busy, young, old], cache, PLENTY) == GrowthOutcome(paused=(young,))
    assert (len(old.block_ids), old.is_paused) == (2, False)
    cache.check_integrity([busy, old, young])


def test_youngest_row_is_evicted_when_none_could_go_on() -> None:
    cache = small_cache(num_blocks=3)
    rows = full_rows(cache, 1, 1, 1)
    outcome = grow_rows(rows, cache, PLENTY)
    assert outcome == GrowthOutcome(paused=(rows[1],), evicted=(rows[2],))
    assert (len(rows[0].block_ids), rows[2].block_ids) == (2, [])
    cache.check_integrity(rows[:2])


def test_rows_that_may_not_stay_paused_are_evicted_youngest_first() -> None:
    cache = small_cache(num_blocks=7, num_slots=9)
    busy = prefill(cache, request(9, [9]))
    rows = full_rows(cache, 2, 2, 2)
    outcome = grow_rows([busy, *rows], cache, 0)
    assert outcome.evicted == (rows[2],)
    assert outcome.paused == () and [len(row.block_ids) for row in rows] == [3, 3, 0]
    cache.check_integrity([busy, *rows[:2]])


def test_evicting_one_of_two_rows_that_share_a_block_frees_nothing() -> None:
    cache = small_cache(num_blocks=2)
    busy = prefill(cache, request(9, [9]))
    twins = full_twins(cache, 2, first_id=0)
    outcome = grow_rows([busy, *twins], cache, 1)
    assert outcome == GrowthOutcome(paused=tuple(twins))
    outcome = grow_rows([busy, *twins], cache, 0)
    assert outcome == GrowthOutcome(evicted=(twins[1], twins[0]))
    cache.check_integrity([busy])


def test_evicted_row_gives_everything_back_and_stays_findable() -> None:
    cache = small_cache(num_blocks=4)
    old, young = full_rows(cache, 2, 2)
    assert grow_rows([old, young], cache, 0).evicted == (young,)
    assert cache.slots.count_by_owner()["live"] == 1
    assert cache.kv.find(young.chain.keys[0]) is not None
    assert len(cached_states(cache)) >= 1
    cache.check_integrity([old])


def test_slab_of_a_cached_state_is_taken_before_any_row_pauses() -> None:
    cache = small_cache(slabs=(5, 1, 1))
    cache.release(prefill(cache, request(9, [9] * BLOCK)))
    (row,) = full_rows(cache, 2)
    while row.scheduled or len(row.block_ids) < 4:
        assert grow_rows([row], cache, PLENTY) == GrowthOutcome()
        decode(cache, row, [7] * BLOCK)
    assert cached_states(cache) == []
    cache.check_integrity([row])


def test_older_row_takes_the_slab_of_the_younger_ones_slot() -> None:
    cache = small_cache(slabs=(3, 1, 1))
    old, young = full_twins(cache, 2, first_id=0)
    assert grow_rows([old, young], cache, 0) == GrowthOutcome(evicted=(young,))
    assert len(old.block_ids) == 2


@pytest.mark.parametrize("shape", [SlabShape(3, 2), SlabShape(1, 2), SlabShape(2, 1)])
def test_lone_row_grows_though_each_of_its_states_is_alone_in_a_slab(shape: SlabShape) -> None:
    max_blocks, num_drafts = 6, BLOCK - 1
    num_slabs = shape.slabs_of_request(max_blocks, 2 + num_drafts)
    cache = small_cache(slabs=(num_slabs, shape.blocks_per_slab, shape.slots_per_slab), checkpoints="none")
    row = prefill(cache, request(0, [1] * (BLOCK * 2)), first_token=1)
    cache.grow(row)
    others = cache.slots.reserve(cache.slots.num_available)  # states of other requests, in every slab with room
    elsewhere = {slot // shape.slots_per_slab: slot for slot in others}
    elsewhere.pop(row.cursor.live_slot // shape.slots_per_slab, None)
    for slot in list(elsewhere.values())[:num_drafts]:
        others.remove(slot)
        cache.slots.cancel(slot)
    verify(cache, row, [1] * num_drafts, [1] * BLOCK)
    assert len({slot // shape.slots_per_slab for slot in (row.cursor.live_slot, *row.cursor.draft_slots)}) == BLOCK
    for slot in others:  # the other requests leave
        cache.slots.cancel(slot)
    while len(row.block_ids) < max_blocks:
        assert grow_rows([row], cache, PLENTY) == GrowthOutcome()
        verify(cache, row, [1] * num_drafts, [1] * BLOCK)
    cache.check_integrity([row])


def test_lone_row_that_fills_the_pool_is_an_error_that_changes_nothing() -> None:
    cache = small_cache(num_blocks=2)
    (row,) = full_rows(cache, 2)
    before = frozen(cache)
    with pytest.raises(CacheCapacityError, match="--inference-dynamic-batching-buffer-size-gb"):
        grow_rows([row], cache, PLENTY)
    assert frozen(cache) == before
    assert (len(row.block_ids), row.is_paused) == (2, False)
