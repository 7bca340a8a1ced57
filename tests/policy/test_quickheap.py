import random
from math import log2
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.policy.quickheap import Quickheap


class Counted(tuple[int]):
    """An item that counts the comparisons of all such items, and notes which were compared."""

    comparisons: ClassVar[int] = 0
    compared: ClassVar[set[int]] = set()

    def __lt__(self, other: tuple[int, ...]) -> bool:
        Counted.comparisons += 1
        Counted.compared |= {self[0], other[0]}
        return super().__lt__(other)


def shuffled(num_items: int) -> list[tuple[int]]:
    numbers = list(range(num_items))
    random.Random(num_items).shuffle(numbers)
    return [(number,) for number in numbers]


def pop_all(heap: Quickheap[tuple[int]]) -> list[tuple[int]]:
    return [heap.pop() for _ in range(len(heap))]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.lists(st.integers(0, 40), max_size=20)),
        st.tuples(st.just("pop"), st.lists(st.none(), max_size=15)),
        st.tuples(st.just("keep"), st.lists(st.integers(0, 40), max_size=20)),
    ),
    max_size=40,
)


@given(STEPS, st.integers(1, 8))
def test_any_sequence_of_operations_pops_the_least_item_there_is(
    steps: list[tuple[str, list[int]]], heap_size: int
) -> None:
    heap: Quickheap[tuple[int]] = Quickheap(heap_size)
    model: list[tuple[int]] = []
    for verb, values in steps:
        if verb == "push":
            for value in values:
                heap.push((value,))
            model = sorted([*model, *((value,) for value in values)])
        elif verb == "pop":
            num_popped = min(len(values), len(model))
            assert [heap.pop() for _ in range(num_popped)] == model[:num_popped]
            del model[:num_popped]
        else:
            unwanted = set(values)
            heap.keep(lambda item, unwanted=unwanted: item[0] not in unwanted)
            model = [item for item in model if item[0] not in unwanted]
        assert len(heap) == len(model)
    assert pop_all(heap) == model


@pytest.mark.parametrize("num_items", [0, 1, 2_048, 2_049, 20_000])
def test_many_items_leave_in_order(num_items: int) -> None:
    heap: Quickheap[tuple[int]] = Quickheap()
    for item in shuffled(num_items):
        heap.push(item)
    assert pop_all(heap) == [(number,) for number in range(num_items)]


@pytest.mark.parametrize("arrival", ["random", "ascending", "descending", "equal"])
def test_an_item_costs_a_logarithmic_number_of_comparisons(arrival: str) -> None:
    num_items = 20_000
    items = {
        "random": shuffled(num_items),
        "ascending": [(number,) for number in range(num_items)],
        "descending": [(-number,) for number in range(num_items)],
        "equal": [(0,)] * num_items,
    }[arrival]
    heap: Quickheap[tuple[int]] = Quickheap()
    Counted.comparisons = 0
    for item in items:
        heap.push(Counted(item))
    for item in items:  # as many again, while others leave
        heap.pop()
        heap.push(Counted(item))
    pop_all(heap)
    assert Counted.comparisons < 2 * num_items * 2 * log2(num_items)


def test_the_least_of_many_items_leave_without_a_look_at_the_others() -> None:
    heap: Quickheap[tuple[int]] = Quickheap(heap_size=64)
    for item in shuffled(20_000):
        heap.push(Counted(item))
    Counted.compared.clear()
    for _ in range(64):
        heap.pop()
    assert len(Counted.compared) <= 2 * 64 + 1  # one heap of all would look at 990


def test_buckets_do_not_outlive_what_was_in_them() -> None:
    heap: Quickheap[tuple[int]] = Quickheap(heap_size=4)
    for number in range(1_000):
        heap.push((-number,))
    assert len(heap._bounds) == len(heap._buckets) > 10
    heap.keep(lambda item: item[0] == -500)
    assert len(heap._bounds) == len(heap._buckets) <= 1
    assert pop_all(heap) == [(-500,)]


def test_an_empty_queue_has_nothing_to_pop() -> None:
    heap: Quickheap[tuple[int]] = Quickheap()
    heap.push((1,))
    heap.push((0,))
    heap.clear()
    assert len(heap) == 0
    with pytest.raises(IndexError):
        heap.pop()
