"""Properties of the reference for attention over a paged cache."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.attention import reference
from megatron_mamba_cache.kernels.attention.interface import AttentionRows
from megatron_mamba_cache.kernels.attention.reference import paged_attention_ref
from tests.kernels.packed_batches import same_bits

BLOCK, DIM, HEADS = 4, 8, 6
SCALE = DIM**-0.5
MIXES = [
    [(1, 1), (1, 9), (1, 4), (5, 5), (3, 11), (7, 8)],
    [(1, 3)],
    [(6, 6), (1, 12), (1, 5), (0, 0), (2, 7), (1, 1)],
    [(9, 17)],
]


class Cache:
    """A paged cache with shuffled blocks and random requests; unused entries are NaN."""

    def __init__(self, lengths: list[tuple[int, int]], kv_heads: int, device: str) -> None:
        num_blocks = [-(-kv_len // BLOCK) for _, kv_len in lengths]
        width = max(num_blocks) + 1
        free = torch.randperm(sum(num_blocks) + 2).tolist()
        self.k = torch.full((len(free), BLOCK, kv_heads, DIM), float("nan"), device=device)
        self.v = self.k.clone()
        table = torch.full((len(lengths), width), -1, dtype=torch.int32)
        self.contents = []
        for row, (_, kv_len) in enumerate(lengths):
            keys, values = torch.randn(2, kv_len, kv_heads, DIM, device=device)
            for index in range(num_blocks[row]):
                block = table[row, index] = free.pop()
                tokens = slice(index * BLOCK, min((index + 1) * BLOCK, kv_len))
                self.k[block, : tokens.stop - tokens.start] = keys[tokens]
                self.v[block, : tokens.stop - tokens.start] = values[tokens]
            self.contents.append((keys, values))
        self.rows = AttentionRows(
            torch.tensor([0, *accumulate(q for q, _ in lengths)], dtype=torch.int32, device=device),
            torch.tensor([kv for _, kv in lengths], dtype=torch.int32, device=device),
            table.to(device),
            tuple(q for q, _ in lengths),
            tuple(kv for _, kv in lengths),
            table.numpy(),
        )


def dense_attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute causal attention (bottom-right aligned) in fp64, one query token at a time; [query_len, heads, dim]."""
    group, outputs = HEADS // keys.shape[1], []
    keys, values = (t.double().repeat_interleave(group, 1) for t in (keys, values))
    for i, query in enumerate(q.double()):
        seen = keys.shape[0] - q.shape[0] + i + 1
        weights = torch.softmax(torch.einsum("hd,shd->hs", query, keys[:seen]) * SCALE, -1)
        outputs.append(torch.einsum("hs,shd->hd", weights, values[:seen]))
    return torch.stack(outputs)


@pytest.mark.parametrize("lengths", MIXES)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("tile", [2, 256])
def test_paged_attention_reference_matches_dense_attention(
    lengths: list[tuple[int, int]], kv_heads: int, tile: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(kv_heads)
    monkeypatch.setattr(reference, "_QUERY_TILE", tile)
    cache = Cache(lengths, kv_heads, device)
    num_tokens = sum(cache.rows.query_lens)
    q = torch.randn(num_tokens + 2, HEADS, DIM, device=device)
    out = paged_attention_ref(q, cache.k, cache.v, cache.rows, SCALE)
    start = 0
    for (query_len, _), (keys, values) in zip(lengths, cache.contents, strict=True):
        if query_len:
            expected = dense_attention(q[start : start + query_len], keys, values)
            torch.testing.assert_close(out[start : start + query_len].double(), expected, rtol=1e-5, atol=1e-5)
        start += query_len
    assert (out[num_tokens:] == 0).all()


def test_paged_attention_accepts_host_kv_lengths_that_are_upper_bounds(device: str) -> None:
    torch.manual_seed(0)
    cache = Cache([(1, 3), (1, 6), (3, 5)], 2, device)
    q = torch.randn(5, HEADS, DIM, device=device)
    rows = cache.rows
    loose = replace(rows, kv_lens=(7, 9, 12))
    exact = paged_attention_ref(q, cache.k, cache.v, rows, SCALE)
    torch.testing.assert_close(paged_attention_ref(q, cache.k, cache.v, loose, SCALE), exact, rtol=1e-6, atol=1e-6)


def test_paged_attention_gives_zeros_for_padding_without_cached_tokens(device: str) -> None:
    torch.manual_seed(1)
    cache = Cache([(1, 3), (1, 4)], 2, device)
    q = torch.randn(2, HEADS, DIM, device=device)
    cache.rows.kv_lengths[1] = 0
    out = paged_attention_ref(q, cache.k, cache.v, cache.rows, SCALE)
    assert (out[1] == 0).all() and out[0].isfinite().all() and (out[0] != 0).any()


def test_paged_attention_is_unchanged_when_a_large_batch_is_split(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    cache = Cache([(1, 3), (1, 9), (1, 2), (1, 5)], 2, device)
    q = torch.randn(4, HEADS, DIM, device=device)
    together = paged_attention_ref(q, cache.k, cache.v, cache.rows, SCALE)
    monkeypatch.setattr(reference, "_MAX_PADDED_TOKENS", 10)
    torch.testing.assert_close(paged_attention_ref(q, cache.k, cache.v, cache.rows, SCALE), together)


def test_paged_attention_computes_bf16_inputs_in_float32(device: str) -> None:
    torch.manual_seed(3)
    cache = Cache([(1, 3), (4, 9)], 2, device)
    q = torch.randn(5, HEADS, DIM, device=device).bfloat16()
    k, v = cache.k.bfloat16(), cache.v.bfloat16()
    out = paged_attention_ref(q, k, v, cache.rows, SCALE)
    exact = paged_attention_ref(q.float(), k.float(), v.float(), cache.rows, SCALE)
    assert same_bits(out, exact.bfloat16())
