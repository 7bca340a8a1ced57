"""Simulated copies take the expected time, alone and concurrently with copies in the other direction."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.loads.timed_copies import Clock, CopyRates, TimedCopies
from megatron_mamba_cache.policy.tiers.copies import CopyOrder, CopyStatus, Lane
from megatron_mamba_cache.recurrences.slab_shape import UnitBytes

RATES = CopyRates(alone=100.0, both=160.0)
LANES = (Lane.TO_HOST, Lane.TO_DEVICE)


def order(number: int, lane: Lane, num_blocks: int = 0, num_states: int = 1) -> CopyOrder:
    return CopyOrder(number, lane, ((0, 0),) * num_blocks, ((0, 0),) * num_states)


def copies_and_clock(rates: CopyRates = RATES) -> tuple[TimedCopies, Clock]:
    clock = Clock()
    return TimedCopies(clock, UnitBytes(state=100, block=10, token_row=1), rates), clock


def under_way(copies: TimedCopies, numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if copies.status(number) is CopyStatus.UNDER_WAY]


def test_simulated_single_copy_runs_at_the_rate_of_one_lane() -> None:
    copies, clock = copies_and_clock()
    copies.start([order(0, Lane.TO_HOST, num_blocks=5)])
    assert copies.next_end() == 1.5
    clock.now = 1.49
    assert copies.status(0) is CopyStatus.UNDER_WAY
    clock.now = 1.5
    assert copies.status(0) is CopyStatus.DONE and copies.next_end() == float("inf")
    assert copies.num_bytes == {Lane.TO_HOST: 150}


def test_simulated_copies_in_one_lane_run_in_order() -> None:
    copies, clock = copies_and_clock()
    copies.start([order(number, Lane.TO_DEVICE) for number in range(3)])
    clock.now = 2.0
    assert under_way(copies, range(3)) == [2] and copies.next_end() == 3.0


def test_simulated_copies_in_both_directions_share_the_combined_rate() -> None:
    copies, clock = copies_and_clock()
    copies.start([order(0, Lane.TO_HOST), order(1, Lane.TO_DEVICE, num_states=2)])
    assert copies.next_end() == 100 / 80
    clock.now = 100 / 80
    assert under_way(copies, [0, 1]) == [1]
    assert copies.next_end() == pytest.approx(100 / 80 + 1.0)  # the remaining 100 bytes are copied alone


def test_simulated_offload_pauses_between_copies() -> None:
    copies, clock = copies_and_clock(CopyRates(alone=100.0, both=160.0, writing=0.5))
    copies.start([order(0, Lane.TO_HOST), order(1, Lane.TO_DEVICE)])
    assert copies.next_end() == 100 / 80
    clock.now = 100 / 80
    assert under_way(copies, [0, 1]) == [0]
    assert copies.next_end() == pytest.approx(100 / 80 + 1.0)  # the remaining 50 bytes are copied alone


def test_waiting_advances_simulated_time_to_the_end_of_the_copies() -> None:
    copies, clock = copies_and_clock()
    copies.start([order(number, Lane.TO_HOST) for number in range(3)])
    copies.wait([1, 0])
    assert clock.now == 2.0 and under_way(copies, range(3)) == [2]
    copies.wait([0])
    assert clock.now == 2.0


@given(st.lists(st.tuples(st.sampled_from(LANES), st.integers(1, 30), st.floats(0, 0.5)), min_size=1, max_size=20))
def test_simulated_copies_are_ordered_and_no_faster_than_their_rates(
    orders: list[tuple[Lane, int, float]],
) -> None:
    copies, clock = copies_and_clock()
    ends: dict[int, float] = {}

    def pass_time(until: float) -> None:
        while copies.next_end() <= until:
            clock.now = copies.next_end()
            done = [n for n in begun if n not in ends and copies.status(n) is CopyStatus.DONE]
            assert done, "no copy had ended when one was said to"
            ends.update(dict.fromkeys(done, clock.now))
        clock.now = until

    begun: dict[int, float] = {}
    for number, (lane, num_blocks, gap) in enumerate(orders):
        copies.start([order(number, lane, num_blocks, 0)])
        begun[number] = clock.now
        pass_time(clock.now + gap)
    pass_time(1e6)
    assert ends.keys() == begun.keys()
    for lane in LANES:
        of_lane = [number for number, (other, _, _) in enumerate(orders) if other is lane]
        assert [ends[number] for number in of_lane] == sorted(ends[number] for number in of_lane)
        num_bytes = sum(10 * orders[number][1] for number in of_lane)
        assert num_bytes <= RATES.alone * (max((ends[number] for number in of_lane), default=0.0) + 1e-9)
    total = sum(10 * num_blocks for _, num_blocks, _ in orders)
    assert total <= RATES.both * (max(ends.values()) + 1e-9)
