import random
from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.errors import CacheIntegrityError
from megatron_mamba_cache.policy.eviction import FULL_PRIORITY_AGE, EvictionOrder, Weight

NOW = 100


class Push(NamedTuple):
    """Arguments of one `EvictionOrder.push` call."""

    last_used: int
    num_tokens: int
    weight: Weight


def equally(kind: int) -> float:
    return 1.0


def push_uses(order: EvictionOrder, *last_uses: int) -> None:
    """Push the ids 0, 1, ... with these times of their last use."""
    for entry_id, last_used in enumerate(last_uses):
        order.push(entry_id, last_used, 1, Weight())


def take_all(order: EvictionOrder, now: int = NOW, likelihood: Callable[[int], float] = equally) -> list[int]:
    taken = []
    while len(order):
        taken.append(order.first(now, likelihood))
        order.discard(taken[-1])
    return taken


def num_items(order: EvictionOrder) -> int:
    queues = (queue for classes in order._classes.values() for queue in classes.values())
    return sum(len(queue.run) + len(queue.late) for queue in queues)


def priority(last_used: int, weight: Weight, now: int, likelihood: Callable[[int], float]) -> float:
    if weight.is_held:
        return weight.gain / FULL_PRIORITY_AGE
    return likelihood(weight.kind) * weight.gain / (now - last_used + FULL_PRIORITY_AGE)


def test_least_recently_used_entry_is_evicted_first() -> None:
    order = EvictionOrder()
    push_uses(order, 40, 10, 30, 20)
    assert take_all(order) == [1, 3, 2, 0]


@pytest.mark.parametrize(("age", "first"), [(4, 0), (7, 1)])
def test_priority_is_gain_divided_by_age_plus_a_constant(age: int, first: int) -> None:
    # 1 / 12 against 1.5 / (12 + age)
    order = EvictionOrder()
    order.push(0, NOW, 1, Weight(gain=1.0))
    order.push(1, NOW - age, 1, Weight(gain=1.5))
    assert order.first(NOW, equally) == first


def test_states_of_equal_priority_are_evicted_by_depth_then_id() -> None:
    order = EvictionOrder()
    for entry_id, num_tokens in [(5, 1), (3, 2), (4, 2), (1, 1)]:
        order.push(entry_id, 7, num_tokens, Weight())
    assert take_all(order) == [3, 4, 1, 5]


@pytest.mark.parametrize(("times_more", "first"), [(2, 1), (4, 0)])
def test_entry_with_four_times_the_gain_and_three_times_the_age_is_evicted_later(times_more: float, first: int) -> None:
    order = EvictionOrder()
    order.push(0, NOW, 1, Weight(gain=1.0))
    order.push(1, NOW - 2 * FULL_PRIORITY_AGE, 1, Weight(gain=times_more))  # three times the denominator
    assert order.first(NOW, equally) == first


def test_state_of_a_kind_more_likely_to_be_hit_is_evicted_later() -> None:
    order = EvictionOrder()
    for kind in range(2):
        order.push(kind, NOW, 1, Weight(kind))
    assert order.first(NOW, lambda kind: [0.1, 0.2][kind]) == 0
    assert order.first(NOW, lambda kind: [0.2, 0.1][kind]) == 1


def test_first_eviction_candidate_of_a_kind_ignores_other_kinds() -> None:
    order = EvictionOrder()
    for entry_id in range(4):
        order.push(entry_id, entry_id, 1, Weight(entry_id // 2))
    assert [order.first(NOW, equally, kinds) for kinds in (None, {0}, {1}, {0, 1})] == [0, 0, 2, 0]
    with pytest.raises(CacheIntegrityError, match="no entry to evict"):
        order.first(NOW, equally, {2})


def test_held_state_is_ranked_as_just_used_and_certain_to_be_hit() -> None:
    order = EvictionOrder()
    order.push(0, 0, 1, Weight(kind=1, is_held=True))
    order.push(1, NOW - 1, 1, Weight())
    order.push(2, NOW, 1, Weight())
    order.push(3, NOW - 50, 1, Weight(gain=0.5, is_held=True))
    assert take_all(order, likelihood=lambda kind: [1.0, 0.01][kind]) == [3, 1, 0, 2]


def test_next_state_to_evict_changes_as_time_passes() -> None:
    order = EvictionOrder()
    order.push(0, 0, 1, Weight(gain=3.0))
    order.push(1, 50, 1, Weight(gain=1.5))
    assert [order.first(now, equally) for now in (50, 1000)] == [0, 1]


def test_state_with_zero_gain_is_evicted_first_at_any_age() -> None:
    order = EvictionOrder()
    order.push(0, 0, 1, Weight(gain=1e-9))
    order.push(1, NOW, 1, Weight(gain=0.0))
    assert take_all(order) == [1, 0]


def test_pushing_an_entry_again_replaces_its_age_and_weight() -> None:
    order = EvictionOrder()
    push_uses(order, 1, 2)
    order.push(0, 3, 1, Weight(1, 2.0))
    assert order.weight_of(0) == Weight(1, 2.0)
    assert len(order) == 2
    assert take_all(order) == [1, 0]


def test_entry_discarded_and_pushed_again_is_evicted_once() -> None:
    order = EvictionOrder()
    for _ in range(3):
        push_uses(order, 1)
        order.discard(0)
    push_uses(order, 1)
    assert take_all(order) == [0]
    assert 0 not in order


def test_reading_the_first_eviction_candidate_removes_nothing() -> None:
    order = EvictionOrder()
    push_uses(order, 2, 1)
    assert [order.first(NOW, equally) for _ in range(3)] == [1, 1, 1]
    assert len(order) == 2


def test_first_eviction_candidate_of_an_empty_order_raises() -> None:
    order = EvictionOrder()
    push_uses(order, 1)
    order.discard(0)
    order.discard(0)
    with pytest.raises(CacheIntegrityError, match="no entry to evict"):
        order.first(NOW, equally)


def test_clearing_the_eviction_order_removes_every_entry() -> None:
    order = EvictionOrder()
    push_uses(order, 3, 1, 2)
    order.clear()
    assert len(order) == 0 and 0 not in order
    push_uses(order, 1)
    assert take_all(order) == [0]


@pytest.mark.parametrize("gain", [float("nan"), -1.0])
def test_nan_or_negative_gain_is_refused(gain: float) -> None:
    order = EvictionOrder()
    push_uses(order, 1)
    with pytest.raises(ValueError, match="gain must be at least 0"):
        order.push(0, 2, 1, Weight(gain=gain))
    assert order.weight_of(0) == Weight()
    assert take_all(order) == [0]


@pytest.mark.parametrize("direction", [1, -1])
def test_stale_heap_items_are_at_most_twice_the_live_entries(direction: int) -> None:
    order = EvictionOrder()
    for time in range(5_000):
        order.push(time % 10, direction * time, 1, Weight(time % 3, 1.0 + time % 7))
        assert num_items(order) <= 2 * len(order) + 64
    for entry_id in range(10):
        order.discard(entry_id)
    assert num_items(order) <= 64


def test_empty_eviction_queues_are_removed() -> None:
    order = EvictionOrder()
    for entry_id in range(30):
        order.push(entry_id, 0, 1, Weight(gain=2.0**entry_id))
    for entry_id in range(1, 30):
        order.discard(entry_id)
    order.first(NOW, equally)
    assert sum(len(classes) for classes in order._classes.values()) == 1


@pytest.mark.parametrize("num_entries", [600, 6_000])
def test_eviction_order_is_unchanged_by_heap_compaction(num_entries: int) -> None:
    times = list(range(num_entries))
    random.Random(0).shuffle(times)
    order = EvictionOrder()
    push_uses(order, *times)
    num_discarded = num_entries * 3 // 4
    for entry_id in range(num_discarded):
        order.discard(entry_id)
    assert num_items(order) <= 2 * len(order) + 64
    assert take_all(order, num_entries) == sorted(range(num_discarded, num_entries), key=times.__getitem__)


GAINS = st.one_of(st.sampled_from([0.0, 1.0, 1.0, 1.0]), st.floats(0, 1e9))
WEIGHTS = st.builds(Weight, kind=st.integers(0, 2), gain=GAINS, is_held=st.booleans())
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "push", "discard", "first", "first", "clear"]),
        st.integers(0, 9),
        st.builds(Push, st.integers(0, NOW), st.integers(0, 2), WEIGHTS),
    ),
    max_size=150,
)


@given(STEPS, st.tuples(*[st.floats(0.001, 1)] * 3))
def test_first_eviction_candidate_has_nearly_the_lowest_priority(
    steps: list[tuple[str, int, Push]], likelihoods: tuple[float, float, float]
) -> None:
    order = EvictionOrder()
    live: dict[int, Push] = {}
    for verb, entry_id, pushed in steps:
        if verb == "push":
            live[entry_id] = pushed
            order.push(entry_id, *pushed)
        elif verb == "discard":
            live.pop(entry_id, None)
            order.discard(entry_id)
        elif verb == "clear":
            live.clear()
            order.clear()
        elif live:
            first = order.first(NOW, likelihoods.__getitem__)
            worths = {
                known: priority(live[known].last_used, live[known].weight, NOW, likelihoods.__getitem__)
                for known in live
            }
            assert worths[first] <= sqrt(2) * min(worths.values()) * (1 + 1e-9)
        assert len(order) == len(live)
        assert all((known in order) == (known in live) for known in range(10))


@given(STEPS, st.tuples(*[st.floats(0.001, 1)] * 3))
def test_first_eviction_candidate_is_exact_for_power_of_two_gains(
    steps: list[tuple[str, int, Push]], likelihoods: tuple[float, float, float]
) -> None:
    order = EvictionOrder()
    live: dict[int, Push] = {}
    for verb, entry_id, pushed in steps:
        if verb == "push":
            weight = pushed.weight._replace(gain=2.0 ** int(pushed.weight.gain % 4))
            live[entry_id] = pushed._replace(weight=weight)
            order.push(entry_id, *live[entry_id])
        elif verb != "clear":
            live.pop(entry_id, None)
            order.discard(entry_id)
    expected = sorted(
        live,
        key=lambda known: (
            priority(live[known].last_used, live[known].weight, NOW, likelihoods.__getitem__),
            live[known].last_used,
            -live[known].num_tokens,
            known,
        ),
    )
    assert take_all(order, likelihood=likelihoods.__getitem__) == expected
