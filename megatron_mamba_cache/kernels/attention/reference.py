"""Torch reference for attention over the paged cache: supports any shape, dtype and device, but is slow."""

from collections.abc import Iterator
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from ..reference import compute_dtype, redirect_padding
from .head_changes import HeadChanges, Rotation
from .interface import AttentionRows, AttentionShape, DeviceLengths, PlannedAttention
from .kv_values import UNSCALED, KVScales, loaded_values, stored_values_ref

_QUERY_TILE = 256
_MAX_GROUPED_QUERY = 16  # maximum number of query tokens for a request to be grouped with others
_MAX_PADDED_TOKENS = 1 << 18  # maximum number of cached tokens, including padding, gathered for one group


def paged_attention_ref(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: AttentionRows, scale: float, scales: KVScales = UNSCALED
) -> Tensor:
    """Compute causal attention from each query token to its request's cached tokens (bottom-right aligned mask).

    Neighboring short requests with the same number of query tokens are computed together. No host sync.

    Args:
        q: [tokens, heads, dim]; heads must be a multiple of kv_heads, and consecutive heads share a KV head.
        k_cache, v_cache: [blocks, block_size, kv_heads, dim]; contents after a request's length are ignored.
        scales: Scales of FP8 caches.

    Returns:
        [tokens, heads, dim] in the dtype of `q`; zeros for padding.
    """
    out = torch.zeros_like(q)
    row_starts = (0, *accumulate(rows.query_lens))
    for first, last in _row_groups(rows):
        query_len, kv_len = rows.query_lens[first], max(rows.kv_lens[first:last])
        if query_len == 0 or kv_len == 0:
            continue
        group = slice(row_starts[first], row_starts[last])
        queries = q[group].unflatten(0, (last - first, query_len))  # [group, query_len, heads, dim]
        lengths = rows.kv_lengths[first:last]
        table = rows.block_table[first:last]
        keys = loaded_values(_gather_cached(k_cache, table, lengths, kv_len), scales.key, compute_dtype(q))
        values = loaded_values(_gather_cached(v_cache, table, lengths, kv_len), scales.value, compute_dtype(q))
        out[group] = _attend(queries, keys, values, lengths, scale).flatten(0, 1).to(q.dtype)
    return out


def append_kv_ref(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    token_block: Tensor,
    token_offset: Tensor,
    query: Tensor | None = None,
    scales: KVScales = UNSCALED,
) -> Tensor | None:
    """Torch reference for `append_kv`."""
    packed = None if query is None else query.flatten(1, 2).contiguous()
    if key.numel() == 0:
        return packed
    valid = token_block >= 0
    redirect = redirect_padding(valid)
    blocks = torch.where(valid, token_block, 0).index_select(0, redirect).to(torch.int64)
    offsets = torch.where(valid, token_offset, 0).index_select(0, redirect).to(torch.int64)
    any_valid = valid.any()
    for cache, new, scale in ((k_cache, key, scales.key), (v_cache, value, scales.value)):
        content = stored_values_ref(new.index_select(0, redirect), scale, cache.dtype)
        cache.index_put_((blocks, offsets), torch.where(any_valid, content, cache[0, 0]))
    return packed


def write_attention_inputs_ref(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    token_block: Tensor,
    token_offset: Tensor,
    changes: HeadChanges,
    scales: KVScales = UNSCALED,
) -> Tensor:
    """Torch reference for `write_attention_inputs`."""
    num_tokens, norms, rotation = len(key), changes.norms, changes.rotation
    queries = query[:num_tokens]
    if norms is not None:
        queries = _normed(queries, norms.query, norms.offset, norms.eps)
        key = _normed(key, norms.key, norms.offset, norms.eps)
    if rotation is not None:
        queries, key = _rotated(queries, rotation), _rotated(key, rotation)
    append_kv_ref(key, value, k_cache, v_cache, token_block, token_offset, scales=scales)
    return torch.cat((queries, query[num_tokens:])).flatten(1, 2)


def _normed(heads: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    """Return the RMS norm over the last dimension, times (weight + offset), rounded once."""
    dtype = compute_dtype(heads)
    wide = heads.to(dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (weight.to(dtype) + offset)).to(heads.dtype)


def _rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    """Return heads [tokens, ..., dim] rotated by token positions; each op rounds to their dtype."""
    angles = rotation.table.index_select(0, rotation.positions[: len(heads)])
    cosine, sine = angles.view(len(heads), *[1] * (heads.dim() - 2), *angles.shape[1:]).unbind(-2)
    half = angles.shape[2]
    first, second, rest = heads.tensor_split((half, 2 * half), dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1)


def _row_groups(rows: AttentionRows) -> Iterator[tuple[int, int]]:
    """Yield half-open ranges of requests to compute together: one, or several short ones with equal query lengths."""
    first, num_rows = 0, len(rows.query_lens)
    while first < num_rows:
        last, longest, query_len = first + 1, rows.kv_lens[first], rows.query_lens[first]
        while query_len <= _MAX_GROUPED_QUERY and last < num_rows and rows.query_lens[last] == query_len:
            longest = max(longest, rows.kv_lens[last])
            if longest * (last + 1 - first) > _MAX_PADDED_TOKENS:
                break
            last += 1
        yield first, last
        first = last


def _gather_cached(cache: Tensor, table: Tensor, lengths: Tensor, kv_len: int) -> Tensor:
    """Return cached tokens [requests, kv_heads, kv_len, dim]; zeros after each request's length."""
    block_size = cache.shape[1]
    num_blocks = -(-kv_len // block_size)
    starts = torch.arange(num_blocks, device=table.device) * block_size
    blocks = torch.where(starts < lengths[:, None], table[:, :num_blocks], 0).to(torch.int64)
    tokens = cache.index_select(0, blocks.flatten()).unflatten(0, blocks.shape)
    tokens = tokens.flatten(1, 2)[:, :kv_len]  # [rows, kv_len, kv_heads, dim]
    held = torch.arange(kv_len, device=table.device) < lengths[:, None]
    return torch.where(held[:, :, None, None], tokens, 0).transpose(1, 2)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Return attention results [rows, query_len, heads, dim], computed in tiles to limit the memory for scores."""
    query_len, kv_len = queries.shape[1], keys.shape[2]
    tiles = []
    for begin in range(0, query_len, _QUERY_TILE):
        tile = queries[:, begin : begin + _QUERY_TILE]
        before = torch.arange(begin, begin + tile.shape[1], device=queries.device) - query_len
        positions = lengths[:, None] + before  # [rows, tile], absolute position of each query token
        seen = kv_len - query_len + begin + tile.shape[1]  # number of leading keys that this tile attends to
        tiles.append(_attend_tile(tile, keys[:, :, :seen], values[:, :, :seen], positions, scale))
    return torch.cat(tiles, dim=1)


def _attend_tile(tile: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float) -> Tensor:
    kv_heads, kv_len = keys.shape[1:3]
    heads_first = tile.to(keys.dtype).transpose(1, 2)  # [rows, heads, tile, dim]
    grouped = heads_first.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # [rows, kv_heads, group * tile, dim]
    scores = (grouped @ keys.transpose(2, 3)).unflatten(2, (-1, tile.shape[1])) * scale
    hidden = torch.arange(kv_len, device=tile.device) > positions[:, :, None]  # [rows, tile, kv_len]
    hidden = hidden[:, None, None]
    # The softmax of a fully masked token is NaN; the second masked_fill replaces it with zeros.
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1).masked_fill(hidden, 0)
    attended = weights.flatten(2, 3) @ values  # [rows, kv_heads, group * tile, dim]
    return attended.unflatten(2, (-1, tile.shape[1])).flatten(1, 2).transpose(1, 2)


class ReferenceAttention:
    """Attention backend that calls `paged_attention_ref`."""

    name = setting = "reference"

    @staticmethod
    def refusal(shape: AttentionShape) -> str | None:
        """Return None: the reference supports every model."""
        return None

    def __init__(self, shape: AttentionShape) -> None:
        self._scale = shape.scale

    def plan(self, rows: AttentionRows) -> PlannedAttention:
        """Return the attention function for the step; each layer calls it."""
        return partial(self._attend, rows)

    def _attend(
        self, rows: AttentionRows, q: Tensor, k_cache: Tensor, v_cache: Tensor, scales: KVScales = UNSCALED
    ) -> Tensor:
        return paged_attention_ref(q, k_cache, v_cache, rows, self._scale, scales)

    def capture(self, rows: AttentionRows, *, may_be_left_out: bool = False) -> "CapturedReference":
        """Return the attention to capture in a CUDA graph; requests in a replay must not be longer than in `rows`."""
        return CapturedReference(self, rows)


class CapturedReference(DeviceLengths):
    """Reference attention inside a CUDA graph: each token becomes a request that reads its length on the device."""

    def begin(self) -> PlannedAttention:
        """Return the attention function for the step; each layer calls it."""
        return self._backend.plan(token_rows(self._rows))


def token_rows(rows: AttentionRows) -> AttentionRows:
    """Turn each packed token into a request with one query token; the lengths are computed on the device.

    Host lengths are upper bounds. A token after the last request has KV length 0.
    """
    num_tokens = sum(rows.query_lens)
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=rows.cu_query.device)
    ends = rows.cu_query[1:]
    owners = torch.searchsorted(ends, tokens, right=True)
    is_owned = owners < ends.shape[0]
    owners = owners.clamp_max(ends.shape[0] - 1)
    seen = rows.kv_lengths[owners] - (ends[owners] - 1 - tokens)
    longest = max(rows.kv_lens, default=0)
    return AttentionRows(
        cu_query=torch.arange(num_tokens + 1, dtype=torch.int32, device=tokens.device),
        kv_lengths=torch.where(is_owned, seen, 0).to(torch.int32),
        block_table=rows.block_table[owners],
        query_lens=(1,) * num_tokens,
        kv_lens=(longest,) * num_tokens,
        host_block_table=rows.host_block_table,
    )
