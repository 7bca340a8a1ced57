"""Properties of the adaptive number of drafts."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.speculation.draft_length import LONGEST_REST, DraftLength

NO_LIMIT = 1 << 30
MAXIMA = [1, 2, 3, 5, 8, 16]


def run(length: DraftLength, num_steps: int, accepted: Callable[[int], int]) -> list[int]:
    """Note steps of which `accepted` tells the accepted count from the drafted one; return the drafted counts."""
    drafted = []
    for _ in range(num_steps):
        drafted.append(length.wanted(NO_LIMIT))
        length.note(drafted[-1], accepted(drafted[-1]))
    return drafted


def all_right(num_drafted: int) -> int:
    return num_drafted


def all_wrong(num_drafted: int) -> int:
    return 0


@pytest.mark.parametrize("max_drafts", MAXIMA)
@pytest.mark.parametrize("num_right_steps", [0, 50])
def test_hopeless_drafts_cost_at_most_5_percent_of_the_steps(max_drafts: int, num_right_steps: int) -> None:
    length = DraftLength(max_drafts)
    run(length, num_right_steps, all_right)
    drafted = run(length, 2000, all_wrong)
    assert 0 < sum(drafted) <= 0.05 * 2000


@pytest.mark.parametrize("max_drafts", MAXIMA)
def test_rests_double_and_stay_bounded(max_drafts: int) -> None:
    length = DraftLength(max_drafts)
    run(length, 10, all_right)
    drafted = run(length, 5000, all_wrong)
    tried = [step for step, count in enumerate(drafted) if count]
    rests = [later - earlier - 1 for earlier, later in pairwise(tried)][2:]
    assert rests[:7] == [8, 16, 32, 64, 128, 256, 256] and max(rests) == LONGEST_REST
    assert {drafted[step] for step in tried[3:]} == {1}


def test_rests_grow_faster_until_a_draft_was_right() -> None:
    drafted = run(DraftLength(4), 1000, all_wrong)
    tried = [step for step, count in enumerate(drafted) if count]
    assert [later - earlier - 1 for earlier, later in pairwise(tried)][2:] == [8, 32, 128, 256, 256, 256]


@pytest.mark.parametrize("max_drafts", MAXIMA)
def test_right_drafts_reach_the_maximum_within_logarithmic_steps(max_drafts: int) -> None:
    length = DraftLength(max_drafts)
    run(length, 3000, all_wrong)
    drafted = run(length, 1 + LONGEST_REST + max_drafts.bit_length(), all_right)
    tried = [count for count in drafted if count]
    assert drafted.index(1) <= LONGEST_REST and 0 not in drafted[drafted.index(1) :]
    assert max_drafts in tried[: max_drafts.bit_length() + 1]
    assert length.wanted(NO_LIMIT) == max_drafts


@pytest.mark.parametrize("num_right", [1, 2, 3, 5])
def test_length_settles_one_above_what_is_accepted(num_right: int) -> None:
    length = DraftLength(8)
    run(length, 10, all_right)
    drafted = run(length, 20, lambda num_drafted: min(num_right, num_drafted))
    assert set(drafted[6:]) == {num_right + 1} and drafted[0] == 8 and drafted == sorted(drafted, reverse=True)


def test_one_step_without_success_is_not_hopeless() -> None:
    length = DraftLength(8)
    run(length, 2, all_wrong)
    assert length.wanted(NO_LIMIT) == 1
    run(length, 1, all_wrong)
    assert length.wanted(NO_LIMIT) == 0


def test_steps_without_a_draft_change_nothing_outside_a_rest() -> None:
    length = DraftLength(8)
    for _ in range(100):
        length.note(0, 0)
    assert length.wanted(NO_LIMIT) == 4


def test_accepted_drafts_shorten_the_next_rest() -> None:
    length = DraftLength(1)
    run(length, 3 + 8 + 1 + 32, all_wrong)
    run(length, 1, all_right)
    drafted = run(length, 3 + 64 + 1, all_wrong)  # half of 4 * 32
    assert drafted == [1, 1, 1, *[0] * 64, 1]


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(-1, 12), st.integers(0, 12), st.integers(0, 12)), max_size=60),
)
def test_wanted_stays_within_limit_and_maximum(max_drafts: int, steps: list[tuple[int, int, int]]) -> None:
    length = DraftLength(max_drafts)
    for limit, num_offered, num_right in steps:
        wanted = length.wanted(limit)
        assert 0 <= wanted <= min(max(limit, 0), max_drafts) and wanted == length.wanted(limit)
        num_drafted = min(wanted, num_offered)
        length.note(num_drafted, min(num_drafted, num_right))


@pytest.mark.parametrize(("num_drafted", "num_accepted"), [(1, 2), (0, 1), (1, -1), (-1, -1)])
def test_impossible_counts_are_refused(num_drafted: int, num_accepted: int) -> None:
    with pytest.raises(ValueError, match="num_accepted"):
        DraftLength(4).note(num_drafted, num_accepted)


def test_no_drafts_at_all_is_not_a_length() -> None:
    with pytest.raises(ValueError, match="max_drafts must be at least 1, found 0"):
        DraftLength(0)
