import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.errors import CacheIntegrityError
from megatron_mamba_cache.policy.eviction import CachedEntry, EvictionHeap, lru_worth


def pop_all(heap: EvictionHeap) -> list[int]:
    return [heap.pop() for _ in range(len(heap))]


def test_the_least_recently_used_goes_first() -> None:
    heap = EvictionHeap()
    for entry_id, last_used in enumerate([40, 10, 30, 20]):
        heap.push(entry_id, CachedEntry(last_used, 1))
    assert pop_all(heap) == [1, 3, 2, 0]


def test_of_equal_worth_the_deeper_goes_first_then_the_lower_id() -> None:
    heap = EvictionHeap()
    for entry_id, num_tokens in [(5, 1), (3, 2), (4, 2), (1, 1)]:
        heap.push(entry_id, CachedEntry(7, num_tokens))
    assert pop_all(heap) == [3, 4, 1, 5]


def test_the_order_is_that_of_the_given_worth() -> None:
    heap = EvictionHeap(worth=lambda entry: entry.num_tokens - entry.last_used)
    for entry_id, entry in enumerate([CachedEntry(1, 9), CachedEntry(5, 6), CachedEntry(2, 5)]):
        heap.push(entry_id, entry)
    assert pop_all(heap) == [1, 2, 0]


def test_of_equal_worth_the_least_recently_used_goes_first() -> None:
    heap = EvictionHeap(worth=lambda entry: 0)
    for entry_id, last_used in enumerate([3, 1, 2]):
        heap.push(entry_id, CachedEntry(last_used, entry_id))
    assert pop_all(heap) == [1, 2, 0]


def test_the_floor_is_the_highest_worth_evicted_so_far() -> None:
    heap = EvictionHeap()
    floors = [heap.floor]
    for last_used in (5, 3, 8):
        heap.push(0, CachedEntry(last_used, 1))
        heap.pop()
        floors.append(heap.floor)
    heap.push(0, CachedEntry(9, 1))
    heap.discard(0)
    assert [*floors, heap.floor] == [0, 5, 5, 8, 8]


def test_an_entry_that_has_become_worth_more_is_not_the_first_to_go() -> None:
    heap = EvictionHeap()
    known = {entry_id: CachedEntry(entry_id, 1) for entry_id in range(4)}
    for entry_id, entry in known.items():
        heap.push(entry_id, entry)
    known[0] = CachedEntry(9, 1)
    assert [heap.pop_current(known.__getitem__) for _ in range(4)] == [1, 2, 3, 0]


def test_only_a_few_entries_are_filed_anew_for_one_eviction() -> None:
    heap = EvictionHeap()
    for entry_id in range(100):
        heap.push(entry_id, CachedEntry(entry_id, 1))
    asked: list[int] = []

    def entry_of(entry_id: int) -> CachedEntry:
        asked.append(entry_id)
        return CachedEntry(1000 + entry_id, 1)

    assert heap.pop_current(entry_of) == len(asked) <= 10
    assert len(heap) == 99


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), st.dictionaries(st.integers(0, 29), st.integers(0, 20)))
def test_what_goes_is_worth_least_now_however_the_worth_of_a_few_has_risen(
    times: list[int], rises: dict[int, int]
) -> None:
    heap = EvictionHeap()
    for entry_id, time in enumerate(times):
        heap.push(entry_id, CachedEntry(time, 1))
    for entry_id, rise in list(rises.items())[:8]:
        if entry_id < len(times):
            times[entry_id] += rise
    gone = heap.pop_current(lambda entry_id: CachedEntry(times[entry_id], 1))
    assert times[gone] == min(times)


def test_pushing_again_replaces() -> None:
    heap = EvictionHeap()
    heap.push(0, CachedEntry(1, 1))
    heap.push(1, CachedEntry(2, 1))
    heap.push(0, CachedEntry(3, 1))
    assert len(heap) == 2
    assert pop_all(heap) == [1, 0]


def test_an_entry_discarded_and_pushed_again_is_popped_once() -> None:
    heap = EvictionHeap()
    for _ in range(3):
        heap.push(0, CachedEntry(1, 1))
        heap.discard(0)
    heap.push(0, CachedEntry(1, 1))
    assert pop_all(heap) == [0]
    assert 0 not in heap


def test_popping_from_an_empty_heap_is_an_integrity_error() -> None:
    heap = EvictionHeap()
    heap.push(0, CachedEntry(1, 1))
    heap.discard(0)
    with pytest.raises(CacheIntegrityError, match="found none"):
        heap.pop()


def test_clear_removes_every_entry() -> None:
    heap = EvictionHeap()
    for entry_id in (0, 2, 1):
        heap.push(entry_id, CachedEntry(3 - entry_id, 1))
    heap.clear()
    assert len(heap) == 0 and 0 not in heap
    with pytest.raises(CacheIntegrityError):
        heap.pop()


def test_a_worth_that_cannot_be_ordered_is_refused() -> None:
    heap = EvictionHeap(worth=lambda entry: float("nan"))
    with pytest.raises(ValueError, match="ordered"):
        heap.push(0, CachedEntry(1, 1))
    assert len(heap) == 0


@pytest.mark.parametrize("direction", [1, -1])
def test_stale_items_stay_bounded_by_the_live_ones(direction: int) -> None:
    heap = EvictionHeap()
    for time in range(5_000):
        heap.push(time % 10, CachedEntry(direction * time, 1))
        assert len(heap._items) <= 2 * len(heap) + 64
    for entry_id in range(10):
        heap.discard(entry_id)
    assert len(heap._items) <= 64


@pytest.mark.parametrize("num_entries", [600, 6_000])
def test_the_order_survives_compaction(num_entries: int) -> None:
    times = list(range(num_entries))
    random.Random(0).shuffle(times)
    heap = EvictionHeap()
    for entry_id, time in enumerate(times):
        heap.push(entry_id, CachedEntry(time, 1))
    num_discarded = num_entries * 3 // 4
    for entry_id in range(num_discarded):
        heap.discard(entry_id)
    assert len(heap._items) <= 2 * len(heap) + 64
    assert pop_all(heap) == sorted(range(num_discarded, num_entries), key=times.__getitem__)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "discard", "pop"]), st.integers(0, 5), st.integers(0, 3), st.integers(0, 2)
    ),
    max_size=200,
)


@given(STEPS)
def test_any_sequence_of_operations_pops_the_minimum_of_what_is_live(steps: list[tuple[str, int, int, int]]) -> None:
    heap = EvictionHeap()
    live: dict[int, CachedEntry] = {}
    for verb, entry_id, last_used, num_tokens in steps:
        if verb == "push":
            live[entry_id] = CachedEntry(last_used, num_tokens)
            heap.push(entry_id, live[entry_id])
        elif verb == "discard":
            live.pop(entry_id, None)
            heap.discard(entry_id)
        elif live:
            expected = min(live, key=lambda i: (lru_worth(live[i]), -live[i].num_tokens, i))
            assert heap.pop() == expected
            del live[expected]
        assert len(heap) == len(live)
        assert all((i in heap) == (i in live) for i in range(6))
