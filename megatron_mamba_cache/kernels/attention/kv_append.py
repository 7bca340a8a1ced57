"""Write new keys and values to the blocks of a paged KV cache and pack the queries, in one launch.

Keys and values are stored as `kv_values` describes.

Layout: in the caches, the heads of a token are contiguous. In `key`, `value` and `query`, the KV heads may be strided.
Grid: a program copies, for a few tokens and all KV heads, either keys and values or one query per head. Safe in CUDA
graphs: no host sync, one launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from ..overlap import await_inputs, overlapping
from .kv_values import UNSCALED, KVScales, addressed, stored_values
from .reference import append_kv_ref

_TILE_LEN = 1024
"""Minimum number of key elements per program; a program copies several tokens if each has fewer."""


@triton.jit(do_not_specialize=["num_tokens"])
def _append_kv_kernel(
    key, value, query, packed, k_cache, v_cache, token_block, token_offset, num_tokens, key_stride, key_head_stride,
    value_stride, value_head_stride, query_stride, query_head_stride, block_stride, offset_stride, key_scale,
    value_scale,
    QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = token < num_tokens
    element = tl.arange(0, WIDTH)[None, :]
    head, channel = element // HEAD_DIM, element % HEAD_DIM
    line = token.to(tl.int64)[:, None]
    if tl.program_id(1) > 0:
        number = tl.program_id(1) - 1
        is_query = exists[:, None] & (element < LENGTH)  # [TOKENS, WIDTH]
        queries = query + line * query_stride + head * query_head_stride + channel
        found = tl.load(queries + number * HEAD_DIM, mask=is_query)
        packed_index = line * (QUERIES * LENGTH) + (head * QUERIES + number) * HEAD_DIM + channel
        tl.store(packed + packed_index, found, mask=is_query)
        return
    block = tl.load(token_block + token, mask=exists, other=-1).to(tl.int64)
    offset = tl.load(token_offset + token, mask=exists, other=0).to(tl.int64)
    moves = (block[:, None] >= 0) & (element < LENGTH)  # [TOKENS, WIDTH]
    index = block[:, None] * block_stride + offset[:, None] * offset_stride + element
    new_key = tl.load(key + line * key_stride + head * key_head_stride + channel, mask=moves)
    new_value = tl.load(value + line * value_stride + head * value_head_stride + channel, mask=moves)
    tl.store(k_cache + index, stored_values(new_key, key_scale, k_cache), mask=moves)
    tl.store(v_cache + index, stored_values(new_value, value_scale, v_cache), mask=moves)


def append_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    token_block: Tensor,
    token_offset: Tensor,
    query: Tensor | None = None,
    scales: KVScales = UNSCALED,
) -> Tensor | None:
    """Write the keys and values of new tokens to the paged caches in place; return the queries packed.

    The function is long because all of its arguments are documented.

    Args:
        key, value: [tokens, kv_heads, dim], channels contiguous; cast to the dtype of the caches; for FP8,
            divided by the scale first.
        k_cache, v_cache: [blocks, block_size, kv_heads, dim] with equal strides; the heads of a token are contiguous.
        token_block: [tokens] int32 or int64 block ids; tokens with a negative id are skipped. No two tokens may have
            the same target, except in blocks that are never read.
        token_offset: [tokens] int32 or int64 positions within the block.
        query: [padded tokens, kv_heads, queries, dim], the queries of one KV head contiguous; None: no queries.
        scales: Scales of FP8 caches.

    Returns:
        [padded tokens, kv_heads * queries, dim], contiguous, rows after `tokens` undefined; None without `query`.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `append_kv_ref`. CUDA-graph safe: no host sync, one launch.
    """
    check_append(key, value, k_cache, v_cache, token_block, token_offset)
    if query is not None:
        check_query(query, key)
    if key.numel() == 0 or not launches_kernel(key) or torch.float64 in (key.dtype, k_cache.dtype):
        return append_kv_ref(key, value, k_cache, v_cache, token_block, token_offset, query, scales)
    num_tokens, num_heads, head_dim = key.shape
    queries = 0 if query is None else query.shape[2]
    packed = None if query is None else query.new_empty(len(query), num_heads * queries, head_dim)
    width = triton.next_power_of_2(num_heads * head_dim)
    tokens = max(1, _TILE_LEN // width)
    _append_kv_kernel[(triton.cdiv(num_tokens, tokens), 1 + queries)](
        key=key,
        value=value,
        query=key if query is None else query,
        packed=key if packed is None else packed,
        k_cache=addressed(k_cache),
        v_cache=addressed(v_cache),
        token_block=token_block,
        token_offset=token_offset,
        num_tokens=num_tokens,
        key_stride=key.stride(0),
        key_head_stride=key.stride(1),
        value_stride=value.stride(0),
        value_head_stride=value.stride(1),
        query_stride=0 if query is None else query.stride(0),
        query_head_stride=0 if query is None else query.stride(1),
        block_stride=k_cache.stride(0),
        offset_stride=k_cache.stride(1),
        key_scale=scales.key,
        value_scale=scales.value,
        QUERIES=queries,
        HEAD_DIM=head_dim,
        LENGTH=num_heads * head_dim,
        WIDTH=width,
        TOKENS=tokens,
        num_warps=max(1, min(8, width * tokens // 256)),
        enable_fp_fusion=True,
        **overlapping(key.device),
    )
    return packed


def check_query(query: Tensor, key: Tensor) -> None:
    """Raise `ValueError` if the queries do not match the keys as `append_kv` requires."""
    if query.dim() != 4 or (*query.shape[1:2], *query.shape[3:]) != key.shape[1:] or len(query) < len(key):
        raise ValueError(
            f"query must have shape [{len(key)} or more tokens, kv_heads, queries, dim] for key {tuple(key.shape)}, "
            f"found query {tuple(query.shape)}"
        )
    if query.stride()[2:] != (query.shape[3], 1) or query.dtype != key.dtype or query.device != key.device:
        raise ValueError(
            f"query must be {key.dtype} on {key.device} and contiguous for each KV head, found strides "
            f"{query.stride()}, {query.dtype} on {query.device}"
        )


def check_append(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, token_block: Tensor, token_offset: Tensor
) -> None:
    """Raise `ValueError` if keys, values, caches and target positions do not match."""
    if key.dim() != 3 or k_cache.dim() != 4 or key.shape != value.shape or key.shape[1:] != k_cache.shape[2:]:
        raise ValueError(
            "key and value must have shape [tokens, kv_heads, dim] and caches [blocks, block_size, kv_heads, dim], "
            f"found key {tuple(key.shape)}, value {tuple(value.shape)} and k_cache {tuple(k_cache.shape)}"
        )
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride() or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"k_cache and v_cache must have equal shapes, strides and dtypes, found {tuple(k_cache.shape)} "
            f"{k_cache.stride()} {k_cache.dtype} and {tuple(v_cache.shape)} {v_cache.stride()} {v_cache.dtype}"
        )
    has_runs = key.shape[2] == 1 or key.stride(2) == value.stride(2) == 1
    if not has_runs or not k_cache[:1, :1].is_contiguous():
        raise ValueError(
            "channels of key and value and heads of the caches must be contiguous, "
            f"found strides key {key.stride()}, value {value.stride()} and k_cache {k_cache.stride()}"
        )
    for name, locations in (("token_block", token_block), ("token_offset", token_offset)):
        if locations.dtype not in (torch.int32, torch.int64) or locations.device != key.device:
            raise ValueError(
                f"{name} must be int32 or int64 on {key.device}, found {locations.dtype} on {locations.device}"
            )
        if locations.shape != key.shape[:1] or not locations.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous with shape [{key.shape[0]}], found shape "
                f"{tuple(locations.shape)} with strides {locations.stride()}"
            )
    if not key.device == value.device == k_cache.device == v_cache.device:
        raise ValueError(
            f"all tensors must be on the same device, found key on {key.device}, value on {value.device}, k_cache on "
            f"{k_cache.device}, v_cache on {v_cache.device}"
        )
