"""Attention to the pieces of a history, merged, equals attention to the whole history.

Without a GPU or the interpreter, the op is its reference; `test_interpreted` runs this file again.
"""

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_mamba_cache.kernels.attention import split_prompts
from megatron_mamba_cache.kernels.attention.flashinfer_calls import PageLists
from megatron_mamba_cache.kernels.attention.split_prompts import (
    best_pieces,
    merge_parts,
    merge_parts_ref,
    split_history,
)
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.packed_batches import same_bits

BLOCK = 4
lengths = st.tuples(st.integers(0, 9), st.integers(0, 40)).map(lambda found: (found[0], sum(found)))


def lists_of(requests: list[tuple[int, int]]) -> PageLists:
    """Return page lists for requests of (query tokens, cached tokens); pages are numbered by request and position."""
    num_pages = [-(-kv_len // BLOCK) for _, kv_len in requests]
    pages = [100 * number + page for number, count in enumerate(num_pages) for page in range(count)]
    last = [kv_len - max(count - 1, 0) * BLOCK for (_, kv_len), count in zip(requests, num_pages, strict=True)]
    cumulative = [0, *accumulate(query_len for query_len, _ in requests)], [0, *accumulate(num_pages)]
    return PageLists(*(torch.tensor(found, dtype=torch.int32) for found in (*cumulative, pages, last)))


def keys_of(pages: PageLists) -> list[list[tuple[int, int]]]:
    """Return (page, offset) of the keys of each request, in order."""
    ends = pages.cu_pages.tolist()
    held = [pages.pages[start:stop].tolist() for start, stop in pairwise(ends)]
    return [
        [(page, offset) for page in mine for offset in range(last if page == mine[-1] else BLOCK)]
        for mine, last in zip(held, pages.last_page_lens.tolist(), strict=True)
    ]


@given(requests=st.lists(lengths, min_size=1, max_size=5), num_pieces=st.integers(2, 8), padding=st.integers(0, 3))
def test_split_kv_pieces_and_new_blocks_cover_each_key_once(
    requests: list[tuple[int, int]], num_pieces: int, padding: int
) -> None:
    pages = lists_of(requests)
    num_tokens = int(pages.cu_query[-1]) + padding
    history, own = split_history(pages, BLOCK, num_pieces, num_tokens)
    pieces, rest = keys_of(history), keys_of(own)
    stride = len(requests) + 1
    assert len(pieces) == num_pieces * stride and len(rest) == stride
    for number, keys in enumerate(keys_of(pages)):
        assert [key for copy in range(num_pieces) for key in pieces[copy * stride + number]] + rest[number] == keys
        query_len, kv_len = requests[number]
        assert len(rest[number]) >= min(query_len, kv_len)  # the keys of the queries need the causal mask
        assert len(rest[number]) <= query_len + BLOCK or query_len > kv_len
    assert not any(pieces[stride - 1 :: stride]) and rest[-1] == []  # padding
    expected = np.add.outer(np.arange(num_pieces) * num_tokens, [*pages.cu_query[1:].tolist(), num_tokens])
    assert history.cu_query.tolist() == [0, *expected.ravel().tolist()]
    assert own.cu_query.tolist() == [*pages.cu_query.tolist(), num_tokens]


@pytest.mark.parametrize(
    ("num_programs", "pieces"),
    [(16, 8), (32, 4), (48, 2), (64, 2), (72, 3), (96, 1), (128, 1), (144, 3), (264, 1), (1000, 1)],
)
def test_number_of_kv_splits_fills_the_multiprocessors_of_an_h200(num_programs: int, pieces: int) -> None:
    assert best_pieces(num_programs, 132) == pieces


def attention_of(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax(scores) @ values and the log2 of the softmax sums, for scores [tokens, heads, keys]."""
    sums = scores.logsumexp(-1)
    weights = torch.where(sums[..., None] == -torch.inf, 0, (scores - sums[..., None]).exp())
    return torch.einsum("thk,khd->thd", weights, values), sums / np.log(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("num_tokens", "heads", "dim", "num_parts"), [(1, 16, 256, 3), (5, 3, 7, 2), (3, 8, 64, 9)])
def test_merged_split_kv_outputs_equal_attention_to_all_keys(
    num_tokens: int, heads: int, dim: int, num_parts: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(1)
    scores = 3 * torch.randn(num_tokens, heads, 5 * num_parts, dtype=torch.float64)
    values = torch.randn(5 * num_parts, heads, dim, dtype=torch.float64)
    scores[0, :, 5:10] = -torch.inf  # a part without keys
    scores[-1, 0] = -torch.inf  # a token without keys
    whole, _ = attention_of(scores, values)
    found = [attention_of(scores[..., keys], values[keys]) for keys in torch.arange(5 * num_parts).split(5)]
    parts = torch.stack([out for out, _ in found]).to(device, dtype)
    lse = torch.stack([sums for _, sums in found]).to(device, torch.float32)
    out = torch.full_like(parts[0], torch.nan)
    with launches_expected(split_prompts, "_merge_kernel", of_kernel=dtype is not torch.float64, device=device):
        assert merge_parts(parts, lse, out) is out
    tolerance = {torch.bfloat16: 2**-6, torch.float32: 1e-5, torch.float64: 1e-6}[dtype]
    for merged in (out, merge_parts_ref(parts, lse)):
        torch.testing.assert_close(merged.cpu().double(), whole, rtol=tolerance, atol=tolerance)
    assert not out[-1, 0].any()


def test_merged_split_kv_output_of_a_token_is_bit_equal_in_any_batch(device: str) -> None:
    torch.manual_seed(2)
    parts, lse = torch.randn(3, 4, 8, 32, device=device).bfloat16(), torch.randn(3, 4, 8, device=device)
    together = merge_parts(parts, lse, torch.empty_like(parts[0]))
    for token in range(4):
        own = slice(token, token + 1)
        alone = merge_parts(parts[:, own].contiguous(), lse[:, own].contiguous(), torch.empty_like(parts[0, own]))
        assert same_bits(alone, together[own])


@pytest.mark.parametrize(
    "change", [{"parts": (2, 3, 4, 9)}, {"lse": (2, 3, 5)}, {"out": (3, 4, 7)}], ids=lambda change: next(iter(change))
)
def test_merging_split_kv_outputs_refuses_mismatched_shapes(change: dict[str, tuple[int, ...]]) -> None:
    sizes = {"parts": (2, 3, 4, 8), "lse": (2, 3, 4), "out": (3, 4, 8)} | change
    with pytest.raises(ValueError, match="parts must have shape"):
        merge_parts(**{name: torch.zeros(size) for name, size in sizes.items()})
