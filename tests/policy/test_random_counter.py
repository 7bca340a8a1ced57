"""Properties of the counter-based random numbers."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.policy.random_counter import DrawPurpose, counter_uniform

COORDINATES = st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 2**64 - 1), st.sampled_from(DrawPurpose))


@given(COORDINATES)
def test_random_number_is_repeatable_and_in_the_unit_interval(
    coordinates: tuple[int, int, DrawPurpose],
) -> None:
    uniform = counter_uniform(*coordinates)
    assert 0 <= uniform < 1
    assert uniform == counter_uniform(*coordinates)
    assert (uniform * 2**53).is_integer()


def test_random_numbers_equal_recorded_values() -> None:
    assert counter_uniform(0, 0, DrawPurpose.SAMPLE) == 0.5742645928430317
    assert counter_uniform(1234, 56, DrawPurpose.RESIDUAL) == 0.2870344471397209


def test_random_number_changes_with_seed_position_and_purpose() -> None:
    draws = {counter_uniform(s, p, purpose) for s in range(9) for p in range(9) for purpose in DrawPurpose}
    assert len(draws) == 9 * 9 * len(DrawPurpose)


def test_random_seed_wraps_modulo_2_to_the_64() -> None:
    assert counter_uniform(-1, 3, 0) == counter_uniform(2**64 - 1, 3, 0)


@pytest.mark.parametrize("varies", ["seed", "position"])
def test_random_numbers_are_uniform_and_uncorrelated(varies: str) -> None:
    pairs = [(i, 7) if varies == "seed" else (7, i) for i in range(20_000)]
    draws = [counter_uniform(*pair, DrawPurpose.SAMPLE) for pair in pairs]
    assert abs(statistics.mean(draws) - 0.5) < 0.01
    assert abs(statistics.pvariance(draws) - 1 / 12) < 0.003
    assert abs(statistics.correlation(draws[:-1], draws[1:])) < 0.03


@pytest.mark.parametrize(("position", "purpose"), [(-1, 0), (2**64, 0), (0, -1)])
def test_random_number_position_or_purpose_out_of_range_is_refused(position: int, purpose: int) -> None:
    with pytest.raises(ValueError):
        counter_uniform(0, position, purpose)
