"""Properties of the estimated acceptance probability of draft tokens."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.speculation.acceptance import REQUEST_WINDOW, Acceptance
from megatron_mamba_cache.speculation.drafter_acceptance import DrafterAcceptance

STEPS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8), st.integers(0, 8)), max_size=40)
WEIGHT = 2.0


def note(found: Acceptance, *outcomes: tuple[int, int, int]) -> None:
    """Note outcomes: key, number of drafts, number accepted."""
    ids, drafted, accepted = np.array(sorted(outcomes, key=lambda outcome: outcome[0])).T
    keys, index = np.unique(ids, return_inverse=True)
    found.note(keys.tolist(), index, np.minimum(accepted + 1, drafted), np.minimum(accepted, drafted))


def one(found: Acceptance, expected: float, key: int = 0) -> float:
    return float(found.probabilities([key], expected)[0])


@given(STEPS, st.floats(0, 1), st.integers(1, 9))
def test_acceptance_estimates_are_those_of_one_outcome_after_another(
    steps: list[tuple[int, int, int]], expected: float, at_once: int
) -> None:
    found, numbers = Acceptance(REQUEST_WINDOW, WEIGHT), dict.fromkeys(range(4), (0.0, 0.0))
    for begin in range(0, len(steps), at_once):
        note(found, *steps[begin : begin + at_once])
    for key, drafted, accepted in steps:
        kept = min(drafted, accepted)
        tried = min(drafted, kept + 1)
        decay = (1 - 1 / REQUEST_WINDOW) ** tried
        numbers[key] = numbers[key][0] * decay + kept, numbers[key][1] * decay + tried
    probabilities = found.probabilities(range(4), expected)
    assert probabilities.tolist() == pytest.approx(
        [(accepted + WEIGHT * expected) / (tried + WEIGHT) for accepted, tried in numbers.values()]
    )
    optimistic = found.optimistic_probabilities(range(4), expected)
    assert (probabilities >= -1e-9).all() and (optimistic <= 1 + 1e-9).all() and (optimistic >= probabilities).all()


@pytest.mark.parametrize("probability", [0.1, 0.4, 0.7, 0.95])
def test_acceptance_estimate_tracks_the_true_probability(probability: float) -> None:
    rng, found, seen = random.Random(0), Acceptance(REQUEST_WINDOW, WEIGHT), []
    for step in range(3000):
        kept = 0
        while kept < 4 and rng.random() < probability:
            kept += 1
        note(found, (0, 4, kept))
        if step > 50:
            seen.append(one(found, 0.5))
    mean = sum(seen) / len(seen)
    print(f"{mean:.3f} of {probability}")
    assert mean == pytest.approx(probability, abs=0.06)
    note(found, *[(0, 4, 4)] * 6)
    assert one(found, 0.5) > 0.5


def test_draft_tokens_after_a_rejected_token_do_not_count() -> None:
    found = Acceptance(REQUEST_WINDOW, WEIGHT)
    note(found, (1, 1, 0), (2, 8, 0))
    assert one(found, 0.8, 1) == one(found, 0.8, 2) < one(found, 0.8, 3) == pytest.approx(0.8)


@pytest.mark.parametrize(("num_drafted", "num_accepted"), [(1, 2), (0, 1), (0, 0), (1, -1), (-1, -1)])
def test_inconsistent_acceptance_counts_are_refused(num_drafted: int, num_accepted: int) -> None:
    with pytest.raises(ValueError, match="num_accepted"):
        DrafterAcceptance().note([0, 1], [4, num_drafted], [4, num_accepted])


def test_outcomes_of_a_forgotten_request_count_for_new_requests() -> None:
    found, other = DrafterAcceptance(), DrafterAcceptance()
    for acceptance in (found, other):
        for _ in range(5):
            acceptance.note([1], [4], [0])
    found.forget(1)
    before, after = other.reach([1], 4), found.reach([1], 4)
    assert (after[0] == after[1]).all() and (after[1] == before[1]).all() and (before[0][1:] < before[1][1:]).all()
