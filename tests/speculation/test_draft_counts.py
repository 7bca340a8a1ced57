"""Properties of the draft counts that maximize tokens per second."""

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.speculation.acceptance import LEAST_GAIN, Positions, best_threshold, expected_tokens, reach_of

CHANCES = st.floats(0.0, 1.0)
ROWS = st.lists(st.tuples(CHANCES, st.integers(0, 4)), min_size=1, max_size=4)


def counts_of(
    probabilities: list[float], max_counts: list[int], seconds: Callable[[int, int], float], plain: float
) -> list[int]:
    reach = reach_of(np.array(probabilities), np.ones(max(max_counts)))
    threshold, rate = best_threshold(reach, max_counts, seconds)
    if rate <= LEAST_GAIN * len(probabilities) / plain:
        return [0] * len(max_counts)
    counts: list[int] = np.minimum((reach >= threshold).sum(axis=1), max_counts).tolist()
    return counts


def brute_expected(probabilities: list[float], counts: list[int]) -> float:
    return sum(
        probability**number
        for probability, count in zip(probabilities, counts, strict=True)
        for number in range(count + 1)
    )


@given(ROWS)
def test_expected_number_of_tokens_is_a_sum_of_acceptance_probabilities(requests: list[tuple[float, int]]) -> None:
    probabilities, counts = [min(probability, 0.999) for probability, _ in requests], [count for _, count in requests]
    tokens = expected_tokens(reach_of(np.array(probabilities), np.ones(4)))
    found = sum(tokens[index, count] for index, count in enumerate(counts))
    assert found == pytest.approx(brute_expected(probabilities, counts), abs=1e-4)


@given(ROWS, st.floats(0.1, 10), st.floats(0, 3), st.floats(0, 3))
def test_draft_counts_respect_limits_and_are_faster_than_no_drafts(
    requests: list[tuple[float, int]], plain: float, once: float, each: float
) -> None:
    probabilities, max_counts = [probability for probability, _ in requests], [room for _, room in requests]
    counts = counts_of(probabilities, max_counts, lambda total, most: plain + once + each * total, plain)
    assert all(0 <= count <= room for count, room in zip(counts, max_counts, strict=True))
    if any(counts):
        tokens = brute_expected([min(p, 0.999) for p in probabilities], counts)
        rate = tokens / (plain + once + each * sum(counts))
        assert rate > LEAST_GAIN * len(requests) / plain


@given(ROWS, st.floats(0, 1), st.floats(0, 0.5))
def test_draft_counts_are_nearly_optimal(requests: list[tuple[float, int]], once: float, each: float) -> None:
    probabilities, max_counts = [probability for probability, _ in requests], [room for _, room in requests]

    def rate(counts: list[int]) -> float:
        total = sum(counts)
        return brute_expected(probabilities, counts) / (1 + (once + each * total if total else 0))

    best = max(rate(list(counts)) for counts in product(*(range(room + 1) for room in max_counts)))
    found = counts_of(probabilities, max_counts, lambda total, most: 1 + once + each * total, 1.0)
    assert rate(found) >= 0.93 * best


def test_request_with_higher_acceptance_gets_more_drafts() -> None:
    counts = counts_of([0.95, 0.6, 0.05], [4, 4, 4], lambda total, most: 1.1 + 0.05 * total, 1.0)
    assert counts[0] == 4 > counts[1] > counts[2] == 0


def test_drafter_time_depends_on_the_longest_draft() -> None:
    seconds = {0: 1.0, 1: 1.3, 2: 1.6, 3: 9.0, 4: 9.0}
    assert max(counts_of([0.9] * 3, [4] * 3, lambda total, most: seconds[most], 1.0)) == 2


@pytest.mark.parametrize("probability", [0.0, 1.0, math.nextafter(1.0, 0.0)])
def test_acceptance_probabilities_of_zero_and_one_are_supported(probability: float) -> None:
    expected = [0] if probability == 0 else [3]
    assert counts_of([probability], [3], lambda total, most: 1.2, 1.0) == expected


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), CHANCES), max_size=40))
def test_rejections_by_position_are_relative_to_the_expected_ones(drafts: list[tuple[int, int, float]]) -> None:
    found, rejected, expected = Positions(4), [0.0] * 4, [0.0] * 4
    for num_drafted, kept, chance in drafts:
        for position in range(min(num_drafted, kept + 1, 4)):
            expected[position] += 1 - chance
            rejected[position] += position == kept
    for begin in range(0, len(drafts), 7):
        num_drafted, kept, chances = np.array(drafts[begin : begin + 7]).T
        num_drafted, kept = num_drafted.astype(np.int64), kept.astype(np.int64)
        found.note(num_drafted, np.minimum(num_drafted, kept), chances)
    overall = (sum(rejected) + 4) / (sum(expected) + 4)
    factors = [(number / overall + 4) / (count + 4) for number, count in zip(rejected, expected, strict=True)]
    assert found.factors(4) == pytest.approx(factors) and found.factors(2) == pytest.approx(factors[:2])
