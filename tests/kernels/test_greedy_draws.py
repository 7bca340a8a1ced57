"""Greedy sampling by kernel and reference, compared with plain Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.kernels.sampling import greedy_draws
from megatron_mamba_cache.kernels.sampling.greedy_draws import greedy_tokens, greedy_tokens_ref
from megatron_mamba_cache.kernels.sampling.row_tiles import TILE
from tests.kernels.kernel_stand_ins import launches_expected

OPS = {"kernel": greedy_tokens, "reference": greedy_tokens_ref}
VALUES = st.sampled_from([-math.inf, -3.5, -0.0, 0.0, 0.25, 2.0, math.inf, math.nan])


def first_largest(row: list[float]) -> int:
    numbers = [-math.inf if math.isnan(value) else value for value in row]
    return numbers.index(max(numbers))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(rows=st.lists(st.lists(VALUES, min_size=5, max_size=5), min_size=1, max_size=4))
def test_greedy_sampling_takes_the_first_maximum(op: str, dtype: torch.dtype, rows: list[list[float]]) -> None:
    assert OPS[op](torch.tensor(rows, dtype=dtype)).tolist() == [first_largest(row) for row in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 7, TILE, TILE + 1, 2 * TILE + 100])
def test_greedy_sampling_breaks_ties_between_tiles_by_the_lowest_token(
    vocab_size: int, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-3, 3, (9, vocab_size), generator=generator).to(dtype)
    logits[0], logits[1] = -math.inf, math.nan
    maxima = [vocab_size - 1, vocab_size // 2, min(TILE, vocab_size - 1), min(TILE - 1, vocab_size - 1), 0]
    for row, token in enumerate(maxima, 2):
        logits[row, token] = 3
    expected = [first_largest(row) for row in logits.tolist()]
    wide = torch.cat((logits, logits + 4), dim=1).to(device)  # strided rows
    with launches_expected(greedy_draws, "_best_of_row_kernel", of_kernel=True, device=device):
        found = greedy_tokens(wide[:, :vocab_size]).tolist()
    assert found == expected == greedy_tokens_ref(logits).tolist()
    assert greedy_tokens(wide[3:4, :vocab_size]).tolist() == expected[3:4]


def test_greedy_sampling_accepts_an_empty_batch_and_float64(device: str) -> None:
    assert greedy_tokens(torch.zeros(0, 5, device=device)).tolist() == []
    close = torch.tensor([[1.0, 1.0 + 1e-12, 1.0]], dtype=torch.float64, device=device)
    assert greedy_tokens(close).tolist() == [1]
