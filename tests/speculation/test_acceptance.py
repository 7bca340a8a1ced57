"""Properties of the estimated acceptance probability of a draft."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.speculation.acceptance import REQUEST_WINDOW, Acceptance

STEPS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=40)


@given(STEPS, st.floats(0, 1))
def test_acceptance_estimate_is_between_0_and_1(steps: list[tuple[int, int]], expected: float) -> None:
    found = Acceptance(REQUEST_WINDOW, 2.0)
    assert found.chance(expected) == pytest.approx(expected)
    for drafted, accepted in steps:
        found.note(drafted, min(drafted, accepted))
        assert -1e-9 <= found.chance(expected) <= found.optimistic_chance(expected) <= 1 + 1e-9


@pytest.mark.parametrize("chance", [0.1, 0.4, 0.7, 0.95])
def test_acceptance_estimate_tracks_the_true_probability(chance: float) -> None:
    rng, found, seen = random.Random(0), Acceptance(REQUEST_WINDOW, 2.0), []
    for step in range(3000):
        kept = 0
        while kept < 4 and rng.random() < chance:
            kept += 1
        found.note(4, kept)
        if step > 50:
            seen.append(found.chance(0.5))
    mean = sum(seen) / len(seen)
    print(f"{mean:.3f} of {chance}")
    assert mean == pytest.approx(chance, abs=0.06)
    for _ in range(6):
        found.note(4, 4)
    assert found.chance(0.5) > 0.5


def test_draft_tokens_after_a_rejected_token_do_not_count() -> None:
    one, many, none = (Acceptance(REQUEST_WINDOW, 2.0) for _ in range(3))
    one.note(1, 0)
    many.note(8, 0)
    none.note(0, 0)
    assert one.chance(0.8) == many.chance(0.8) < none.chance(0.8) == pytest.approx(0.8)


@pytest.mark.parametrize(("num_drafted", "num_accepted"), [(1, 2), (0, 1), (1, -1), (-1, -1)])
def test_inconsistent_acceptance_counts_are_refused(num_drafted: int, num_accepted: int) -> None:
    with pytest.raises(ValueError, match="num_accepted"):
        Acceptance(REQUEST_WINDOW, 2.0).note(num_drafted, num_accepted)
