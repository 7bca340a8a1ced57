"""Properties of sampling with given random numbers."""

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_mamba_cache.kernels.sampling.greedy_draws import greedy_tokens
from megatron_mamba_cache.kernels.sampling.row_tiles import SamplingRows
from megatron_mamba_cache.kernels.sampling.sampling import (
    sample_tokens,
    sample_weighted,
    token_probabilities,
)
from tests.kernels.sampling_oracle import kept_probabilities

Row = tuple[list[float], float, int, float, float]


def rows_of(rows: list[Row], device: str = "cpu") -> SamplingRows:
    logits, temperature, top_k, top_p, _ = zip(*rows, strict=True)
    return SamplingRows(
        torch.tensor(logits, device=device),
        torch.tensor(temperature, device=device),
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor(top_p, dtype=torch.float64, device=device),
    )


def sample(rows: list[Row], device: str = "cpu") -> list[int]:
    uniforms = torch.tensor([row[-1] for row in rows], dtype=torch.float64, device=device)
    return sample_tokens(rows_of(rows, device), uniforms).tolist()


def expected_token(logits: list[float], temperature: float, top_k: int, top_p: float, uniform: float) -> int:
    kept = dict(sorted(kept_probabilities(logits, temperature, top_k, top_p).items()))
    reached = zip(kept, accumulate(kept.values()), strict=True)
    return next((token for token, cumulative in reached if uniform < cumulative), list(kept)[-1])


ROWS = st.tuples(
    # Few distinct logits cause ties; odd uniforms and thresholds avoid rounding at the cumulative probabilities.
    st.lists(st.sampled_from([-3.5, -1.0, 0.25, 2.0]), min_size=6, max_size=6),
    st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    st.sampled_from([0, 1, 2, 3, 9]),
    st.sampled_from([0.0, 0.1234567, 0.5432109, 0.9012345, 1.0]),
    st.sampled_from([0.0, 0.1371234, 0.4219876, 0.7770123, 0.9990001]),
)


@given(st.lists(ROWS, min_size=1, max_size=5))
def test_sampling_inverts_the_cumulative_distribution_of_kept_tokens(rows: list[Row]) -> None:
    assert sample(rows) == [expected_token(*row) for row in rows]


@given(st.lists(ROWS, min_size=2, max_size=5))
def test_sampled_token_depends_only_on_its_own_logits(rows: list[Row]) -> None:
    assert sample(rows) == [sample([row])[0] for row in rows]


@pytest.mark.parametrize("row", [([1.0, 5.0, 5.0], 0.0, 0, 0.0, 0.99), ([1.0, 5.0, 5.0], 2.0, 1, 0.9, 0.99)])
def test_temperature_0_and_top_k_1_take_the_first_maximum(row: Row, device: str) -> None:
    assert sample([row], device) == [1]
    assert greedy_tokens(torch.tensor([row[0]], device=device)).tolist() == [1]


def test_top_k_keeps_the_lowest_token_ids_among_equal_logits(device: str) -> None:
    assert sample([([0.0, 1.0, 1.0, 1.0], 1.0, 2, 0.0, u) for u in (0.1, 0.6, 0.999)], device) == [1, 2, 2]


def test_smallest_top_p_keeps_one_token(device: str) -> None:
    assert sample([([0.0, 0.1, 0.0], 1.0, 0, 1e-9, u) for u in (0.0, 0.5, 0.999)], device) == [1, 1, 1]


def test_top_p_reached_exactly_keeps_no_further_token(device: str) -> None:
    assert sample([([0.0] * 4, 1.0, 0, 0.5, u) for u in (0.0, 0.49, 0.51, 0.999)], device) == [0, 0, 1, 1]


@pytest.mark.parametrize("top", [math.nextafter(1, 0), 1.0])
def test_extreme_random_numbers_never_sample_an_impossible_token(top: float, device: str) -> None:
    assert sample([([0.0, 0.3, 0.1, -math.inf], 1.0, 0, 0.0, top)], device) == [2]
    assert sample([([-math.inf, 0.3, 0.1, -math.inf], 1.0, 0, 0.0, 0.0)], device) == [1]
    assert sample([([0.0, -1e9, 0.3], 1e-3, 0, 0.95, top)], device) == [2]
    assert sample([([0.3, 0.0, -1e9], 1e-3, 0, 0.95, top)], device) == [0]


def test_sampled_token_frequencies_follow_the_probabilities(device: str) -> None:
    torch.manual_seed(0)
    num_draws, logits = 20_000, [0.3, 1.2, -0.5, 0.9]
    fixed = [torch.full((num_draws,), value, device=device) for value in (0.7, 3, 0.95)]
    uniforms = torch.rand(num_draws, dtype=torch.float64).to(device)
    rows = SamplingRows(torch.tensor(logits, device=device).expand(num_draws, -1), fixed[0], fixed[1].int(), fixed[2])
    draws = sample_tokens(rows, uniforms)
    counts: Tensor = torch.bincount(draws, minlength=4).cpu()
    for token, probability in kept_probabilities(logits, 0.7, 3, 0.95).items():
        assert abs(counts[token].item() / num_draws - probability) < 5 * math.sqrt(0.25 / num_draws)
    assert counts[2] == 0


@given(st.lists(ROWS, min_size=1, max_size=5))
def test_token_probabilities_are_normalized_over_the_kept_tokens(rows: list[Row]) -> None:
    found = token_probabilities(rows_of(rows))
    kept = [kept_probabilities(*row[:-1]) for row in rows]
    expected = torch.tensor([[row.get(token, 0.0) for token in range(6)] for row in kept], dtype=torch.float64)
    # If top-p is reached exactly, rounding decides; the thresholds in ROWS are odd numbers to avoid this.
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_token_probabilities_of_greedy_requests_are_one_hot(device: str) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, -math.inf, 0.0], [0.0, 0.0, 1.0]], device=device)
    temperature, top_k = torch.tensor([0.0, 2.0, 0.0], device=device), torch.tensor([0, 1, 7], device=device)
    top_p = torch.tensor([0.0, 0.5, 0.9], device=device)
    found = token_probabilities(SamplingRows(logits, temperature, top_k, top_p))
    assert found.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]


def test_weighted_sample_inverts_the_cumulative_weights(device: str) -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 5.0, 2.0]], dtype=torch.float64, device=device).expand(5, -1)
    uniforms = torch.tensor([0.0, 0.124, 0.126, 0.749, 0.751], dtype=torch.float64, device=device)
    assert sample_weighted(weights, uniforms).tolist() == [1, 1, 3, 3, 4]


def test_weighted_sample_never_selects_a_token_with_zero_weight(device: str) -> None:
    weights = torch.tensor([[0.0, 0.1, 0.0, 0.2, 0.3, 0.0]], dtype=torch.float64, device=device)
    assert sample_weighted(weights, torch.tensor([1.0], device=device)).tolist() == [4]


def test_nan_logits_sample_a_valid_token_and_affect_no_other_request(device: str) -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 9, generator=rng).to(device)
    settings = [torch.full((4,), value, device=device) for value in (1.0, 0, 0.9)]
    uniforms = torch.rand(4, dtype=torch.float64, generator=rng).to(device)
    expected = sample_tokens(SamplingRows(logits, *settings), uniforms)
    logits[1], logits[2] = torch.nan, -torch.inf
    found = sample_tokens(SamplingRows(logits, *settings), uniforms)
    assert found[[0, 3]].tolist() == expected[[0, 3]].tolist()
    assert ((found >= 0) & (found < 9)).all()
