"""The sampling kernels keep the tokens that the definitions keep, and sample like their reference."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from megatron_mamba_cache.kernels.sampling import sampling, token_cuts
from megatron_mamba_cache.kernels.sampling.greedy_draws import greedy_tokens
from megatron_mamba_cache.kernels.sampling.row_tiles import SamplingRows
from megatron_mamba_cache.kernels.sampling.sampling import sample_tokens, sample_tokens_ref, token_probabilities
from tests.kernels.kernel_stand_ins import launches_expected

needs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or Triton's interpreter"
)
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
UNIFORMS = (0.0, 0.1371234, 0.4219876, 0.7770123, 0.9990001, math.nextafter(1, 0))

Setting = tuple[float, int, float]
"""Temperature, top-k and top-p."""

SETTINGS: Sequence[Setting] = (
    (1.0, 0, 0.0),
    (0.7, 50, 0.9),
    (0.0, 0, 0.5),
    (1.5, 5, 0.0),
    (1.0, 1, 0.5),
    (2.0, 0, 0.9512345),
    (1.0, 300, 0.8),
    (0.01, 7, 0.3),
)


def rows_of(logits: Tensor, chosen: Sequence[Setting]) -> SamplingRows:
    temperature, top_k, top_p = zip(*chosen, strict=True)
    return SamplingRows(
        logits.to(DEVICE),
        torch.tensor(temperature, device=DEVICE),
        torch.tensor(top_k, dtype=torch.int32, device=DEVICE),
        torch.tensor(top_p, device=DEVICE),
    )


def sampled_by_kernels(rows: SamplingRows, uniforms: Tensor) -> list[int]:
    with launches_expected(sampling, "_pick_kernel", of_kernel=True, device=DEVICE):
        return sample_tokens(rows, uniforms).tolist()


def uniforms_of(count: int) -> Tensor:
    return torch.tensor([UNIFORMS[index % len(UNIFORMS)] for index in range(count)], dtype=torch.float64, device=DEVICE)


@needs_kernels
@pytest.mark.parametrize(
    ("vocab_size", "spread", "dtype"),
    [(5, 1.0, torch.float32), (4097, 0.3, torch.float32), (8999, 3.0, torch.bfloat16), (4096, 2.0, torch.float16)],
)
def test_sampling_kernels_sample_the_same_tokens_as_the_reference(
    vocab_size: int, spread: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(vocab_size)
    logits = (torch.randn(len(SETTINGS), vocab_size) * spread).to(dtype)
    logits[:, 3] = -torch.inf
    logits[1, 2] = torch.nan
    rows, uniforms = rows_of(logits, SETTINGS), uniforms_of(len(SETTINGS))
    assert sampled_by_kernels(rows, uniforms) == sample_tokens_ref(rows, uniforms).tolist()


@needs_kernels
@pytest.mark.parametrize("chosen", [(1.0, 0, 0.5012345), (1.0, 20, 0.0), (1.0, 4500, 0.3012345)], ids=str)
def test_sampling_kernels_keep_the_lowest_token_ids_among_equal_logits(chosen: Setting) -> None:
    """There are more equal logits than a list can hold, so whole rows are searched."""
    num_rows = 2 if INTERPRETED else len(UNIFORMS)
    rows, uniforms = rows_of(torch.zeros(num_rows, 5000), [chosen] * num_rows), uniforms_of(num_rows)
    num_kept = math.ceil((chosen[1] or 5000) * (chosen[2] or 1))
    expected = [int(uniform * num_kept) for uniform in uniforms.tolist()]
    assert sampled_by_kernels(rows, uniforms) == sample_tokens_ref(rows, uniforms).tolist() == expected


@needs_kernels
def test_sampled_token_does_not_depend_on_the_batch() -> None:
    torch.manual_seed(2)
    rows, uniforms = rows_of(torch.randn(8, 5000), SETTINGS), uniforms_of(8)
    together = sample_tokens(rows, uniforms).tolist()
    for row_index in (1, 5) if INTERPRETED else range(8):
        fields = {name: getattr(rows, name)[row_index : row_index + 1] for name in SamplingRows.__slots__}
        assert (
            sample_tokens(SamplingRows(**fields), uniforms[row_index : row_index + 1]).tolist()
            == together[row_index : row_index + 1]
        )
    uncut = replace(rows, top_k=(rows.top_k == 1).int(), top_p=torch.zeros_like(rows.top_p))
    tokens = sample_tokens(uncut, uniforms, any_cut=True).tolist()
    assert sample_tokens(uncut, uniforms, any_cut=False).tolist() == tokens
    for row_index in (0, 2, 4):
        assert tokens[row_index] == together[row_index]


@needs_kernels
def test_nan_logits_sample_a_valid_token_but_never_a_masked_one() -> None:
    logits = torch.full((5, 4100), -torch.inf)
    logits[1] = torch.nan
    logits[2, 4099], logits[2, 7] = 3.0, torch.nan
    logits[3, 5] = logits[3, 4098] = torch.inf
    logits[4, 17] = -3e38
    chosen = [(1.0, 0, 0.0), (1.0, 9, 0.9), (1.0, 9, 0.9), (0.5, 0, 0.5), (1.0, 0, 0.0)]
    tokens = sampled_by_kernels(rows_of(logits, chosen), uniforms_of(5))
    assert all(0 <= token < 4100 for token in tokens)
    assert tokens[2] == 4099 and tokens[3] == 5 and tokens[4] == 17


@needs_kernels
@pytest.mark.parametrize("top_k", [2, 7, 50])
@pytest.mark.parametrize("logits", [(1.3,), (-0.7,), (0.0,), (3e30,), (2.1, 2.1, 2.1), (2.1, -4.0), (5.5, 1e-3, 1e-3)])
def test_all_unmasked_tokens_are_kept_if_fewer_than_top_k(logits: Sequence[float], top_k: int) -> None:
    """A grammar may allow a single token; then it does not matter which logit is the largest."""
    kept_tokens = torch.tensor([4099, 17, 4095][: len(logits)])
    row = torch.full((1, 4100), -torch.inf)
    row[0, kept_tokens] = torch.tensor(logits)
    for setting in ((1.5, top_k, 0.0), (0.3, top_k, 0.95)):
        count = 3 if INTERPRETED else len(UNIFORMS)
        rows = rows_of(row.expand(count, -1).contiguous(), [setting] * count)
        uniforms = uniforms_of(len(UNIFORMS))[-count:]
        tokens = sampled_by_kernels(rows, uniforms)
        on_cpu = SamplingRows(*(getattr(rows, name).cpu() for name in ("logits", "temperature", "top_k", "top_p")))
        assert tokens == sample_tokens_ref(on_cpu, uniforms.cpu()).tolist() and set(tokens) <= set(kept_tokens.tolist())


@needs_kernels
def test_greedy_token_of_nan_logits_is_the_same_in_any_batch() -> None:
    logits = torch.full((4, 8200), -torch.inf)
    logits[1], logits[2, 4100] = torch.nan, torch.nan
    logits[3, 8199] = -3e38
    greedy = [(0.0, 0, 0.0), (1.0, 1, 0.5), (0.0, 0, 0.0), (0.0, 0, 0.0)]
    next_to_a_sampled_row = sampled_by_kernels(
        rows_of(torch.cat((logits, logits[3:])), [*greedy, SETTINGS[0]]), uniforms_of(5)
    )
    assert next_to_a_sampled_row[:4] == greedy_tokens(logits.to(DEVICE)).tolist() == [0, 0, 0, 8199]


@needs_kernels
def test_sampling_kernels_accept_an_empty_batch() -> None:
    assert sample_tokens(rows_of(torch.empty(3, 9), [(1.0, 0, 0.0)] * 3), torch.empty(3, device=DEVICE)).shape == (3,)
    none = SamplingRows(torch.empty(0, 9, device=DEVICE), *(torch.empty(0, device=DEVICE) for _ in range(3)))
    assert sample_tokens(none, torch.empty(0, device=DEVICE)).tolist() == []


CASES = st.tuples(
    # Few distinct logits cause ties.
    st.lists(st.sampled_from([-3.5, -1.0, -0.0, 0.0, 0.25, 2.0, -math.inf]), min_size=9, max_size=9),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0, 2, 3, 5, 9, 30]),
    st.sampled_from([0.0, 0.1234567, 0.5432109, 0.9012345, 1.0]),
)


@needs_kernels
@settings(max_examples=4 if INTERPRETED else 150, deadline=None)
@given(st.lists(CASES, min_size=1, max_size=3), st.integers(0, 2**30))
def test_sampling_kernels_keep_exactly_the_top_k_and_top_p_tokens(
    cases: list[tuple[list[float], float, int, float]], seed: int
) -> None:
    """Kept tokens may be anywhere in a row of two tiles; all other tokens have low probabilities."""
    kept_tokens = torch.randperm(5000, generator=torch.Generator().manual_seed(seed))[:9].sort().values
    logits = torch.full((len(cases), 5000), -40.0)
    logits[:, kept_tokens] = torch.tensor([case[0] for case in cases])
    rows = rows_of(logits, [case[1:] for case in cases])
    tiles = token_cuts.RowTiles(*torch.empty(3, len(cases), 2, device=DEVICE))
    sampling._peaks_kernel[(len(cases), 2)](
        logits=rows.logits, stride=5000, peaks=tiles.peaks, leasts=tiles.leasts, num_tiles=2, vocab_size=5000, TILE=4096
    )
    cuts = token_cuts.find_cuts(rows, tiles)
    values = torch.where(rows.logits == 0, 0.0, rows.logits)
    bits = values.view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(5000, device=DEVICE)
    kept = (keys > cuts.keys[:, None]) | ((keys == cuts.keys[:, None]) & (ids <= cuts.last_ids[:, None]))
    wanted = token_probabilities(rows) > 0
    has_weight = values >= values.amax(1, keepdim=True) - 32 * rows.temperature[:, None]
    for row_index, case in enumerate(cases):
        if any(math.isfinite(logit) for logit in case[0]):
            assert (kept & has_weight)[row_index].nonzero().tolist() == wanted[row_index].nonzero().tolist(), case


@needs_kernels
@pytest.mark.skipif(INTERPRETED, reason="takes too long")
@pytest.mark.parametrize("chosen", [(1.0, 0, 0.0), (0.7, 0, 0.9), (1.3, 40, 0.0), (1.0, 100, 0.95)], ids=str)
def test_sampled_token_frequencies_follow_the_probabilities(chosen: Setting) -> None:
    torch.manual_seed(3)
    num_draws = 20_000
    logits = torch.randn(1, 6000) * 2
    probabilities = token_probabilities(rows_of(logits, [chosen]))[0]
    tokens = sample_tokens(
        rows_of(logits.expand(num_draws, -1), [chosen] * num_draws),
        torch.rand(num_draws, dtype=torch.float64).to(DEVICE),
    )
    counts = torch.bincount(tokens, minlength=6000).double()
    assert not counts[probabilities == 0].any()
    order = probabilities.argsort()
    groups = (num_draws * probabilities[order].cumsum(0) / 20).long()
    sums = torch.zeros(2, int(groups.max()) + 1, dtype=torch.float64, device=DEVICE)
    sums.index_add_(1, groups, torch.stack((num_draws * probabilities[order], counts[order])))
    sums = sums[:, sums[0] > 1]
    statistic, degrees = ((sums[1] - sums[0]).square() / sums[0]).sum(), sums.shape[1] - 1
    assert degrees > 20
    assert torch.special.gammaincc(torch.tensor(degrees / 2.0, dtype=torch.float64), statistic.cpu() / 2) > 0.001
