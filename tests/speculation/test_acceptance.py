"""Properties of the estimated acceptance probability of draft tokens."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.speculation.acceptance import REQUEST_WINDOW, Acceptance

STEPS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=40)


@given(STEPS, st.floats(0, 1))
def test_acceptance_estimate_is_between_0_and_1(steps: list[tuple[int, int]], expected: float) -> None:
    found = Acceptance(REQUEST_WINDOW, 2.0)
    assert found.probability(expected) == pytest.approx(expected)
    for drafted, accepted in steps:
        found.note(drafted, min(drafted, accepted))
        assert -1e-9 <= found.probability(expected) <= found.optimistic_probability(expected) <= 1 + 1e-9


@pytest.mark.parametrize("probability", [0.1, 0.4, 0.7, 0.95])
def test_acceptance_estimate_tracks_the_true_probability(probability: float) -> None:
    rng, found, seen = random.Random(0), Acceptance(REQUEST_WINDOW, 2.0), []
    for step in range(3000):
        kept = 0
        while kept < 4 and rng.random() < probability:
            kept += 1
        found.note(4, kept)
        if step > 50:
            seen.append(found.probability(0.5))
    mean = sum(seen) / len(seen)
    print(f"{mean:.3f} of {probability}")
    assert mean == pytest.approx(probability, abs=0.06)
    for _ in range(6):
        found.note(4, 4)
    assert found.probability(0.5) > 0.5


def test_draft_tokens_after_a_rejected_token_do_not_count() -> None:
    one, many, none = (Acceptance(REQUEST_WINDOW, 2.0) for _ in range(3))
    one.note(1, 0)
    many.note(8, 0)
    none.note(0, 0)
    assert one.probability(0.8) == many.probability(0.8) < none.probability(0.8) == pytest.approx(0.8)


@pytest.mark.parametrize(("num_drafted", "num_accepted"), [(1, 2), (0, 1), (1, -1), (-1, -1)])
def test_inconsistent_acceptance_counts_are_refused(num_drafted: int, num_accepted: int) -> None:
    with pytest.raises(ValueError, match="num_accepted"):
        Acceptance(REQUEST_WINDOW, 2.0).note(num_drafted, num_accepted)
