"""Ranks agree on copy and prefill times once all have measured them."""

from collections.abc import Sequence

from megatron_mamba_cache.policy.tiers.copies import COPIES_TAKE_NOTHING, AgreedTimes, CopyTimes, Lane
from megatron_mamba_cache.tiers.copy_lanes import MeasuredTimes

MEBIBYTE = 2**20


def least_with(other: Sequence[int]):  # type: ignore[no-untyped-def]
    return lambda mine: [min(pair) for pair in zip(mine, other, strict=True)]


def test_copies_are_estimated_as_free_until_every_rank_has_measured() -> None:
    mine = CopyTimes(5, 50, 9, 7, 70)
    assert AgreedTimes(lambda: None, list).now() == COPIES_TAKE_NOTHING
    assert AgreedTimes(lambda: mine, least_with([0, 0, 0, 0, 0])).now() == COPIES_TAKE_NOTHING


def test_estimate_uses_the_slowest_copies_and_fastest_prefill_of_all_ranks() -> None:
    times = AgreedTimes(lambda: CopyTimes(5, 50, 9, 7, 70), least_with([8, -6, -40, -8, -60]))
    assert times.now() == CopyTimes(6, 50, 8, 8, 70)


def test_copy_times_agreed_between_ranks_are_not_exchanged_again() -> None:
    measured, calls = [CopyTimes(1, 2, 3, 4, 5)], []

    def agree(values: Sequence[int]) -> list[int]:
        calls.append(values)
        return list(values)

    times = AgreedTimes(lambda: measured[0], agree)
    first = times.now()
    measured[0] = CopyTimes(9, 9, 9, 9, 9)
    assert times.now() == first and len(calls) == 1


def test_measured_copy_times_are_the_fastest_of_large_samples() -> None:
    measured = MeasuredTimes()
    assert measured.times(1000, 5000) is None
    measured.note_copy(Lane.TO_HOST, MEBIBYTE, 1e-6)  # too small to be recorded
    measured.note_prefill(10, 1e-6)
    assert measured.times(1000, 5000) is None
    measured.note_copy(Lane.TO_HOST, 8 * MEBIBYTE, 8 * MEBIBYTE * 2e-9)
    measured.note_prefill(1000, 0.5)
    measured.note_prefill(2000, 0.1)
    assert measured.times(1000, 5000) == CopyTimes(2000, 10_000, 50_000)
    measured.note_copy(Lane.TO_DEVICE, 8 * MEBIBYTE, 8 * MEBIBYTE * 3e-9)
    measured.note_copy(Lane.TO_DISK, 8 * MEBIBYTE, 8 * MEBIBYTE * 4e-9)
    assert measured.times(1000, 5000) == CopyTimes(3000, 15_000, 50_000, 4000, 20_000)
