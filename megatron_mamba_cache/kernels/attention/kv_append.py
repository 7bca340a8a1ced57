"""KV append: write new keys and values into their blocks of a paged cache, and pack queries, in one launch.

Layout: a token's heads are one run of elements in the caches; in `key` and `value`, and the queries of a head of keys,
they may be strided. Grid: a program moves a few tokens, of all heads the key and the value, or one query. Graph safe:
no host sync, one launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from ..overlap import await_inputs, overlapping
from .reference import append_kv_ref

_TILE_LEN = 1024
"""The fewest elements of key, and of value, that a program moves; smaller tokens share a program."""


@triton.jit(do_not_specialize=["num_tokens"])
def _append_kv_kernel(
    key, value, query, packed, k_cache, v_cache, token_block, token_offset, num_tokens, key_stride, key_head_stride,
    value_stride, value_head_stride, query_stride, query_head_stride, block_stride, offset_stride,
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
    tl.store(k_cache + index, new_key.to(k_cache.dtype.element_ty), mask=moves)
    tl.store(v_cache + index, new_value.to(v_cache.dtype.element_ty), mask=moves)


def append_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    token_block: Tensor,
    token_offset: Tensor,
    query: Tensor | None = None,
) -> Tensor | None:
    """Write each new token's key and value into the paged caches, in place; return its queries packed.

    Long because of its contract.

    Args:
        key, value: [tokens, kv_heads, dim], channels contiguous; cast to the caches' dtype.
        k_cache, v_cache: [blocks, block_size, kv_heads, dim] of equal strides, a token's heads contiguous.
        token_block: [tokens] int32 or int64 block ids; a negative one is skipped. Tokens have distinct targets, except
            in blocks that are never read.
        token_offset: [tokens] int32 or int64 positions inside the block.
        query: [at least tokens, kv_heads, queries, dim], the queries of a head contiguous; None for none.

    Returns:
        [as many tokens as `query` has, kv_heads * queries, dim] contiguous, unspecified beyond the first `tokens`.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `append_kv_ref`. CUDA-graph safe: no host sync, one launch.
    """
    check_append(key, value, k_cache, v_cache, token_block, token_offset)
    if query is not None:
        check_query(query, key)
    if key.numel() == 0 or not launches_kernel(key) or torch.float64 in (key.dtype, k_cache.dtype):
        return append_kv_ref(key, value, k_cache, v_cache, token_block, token_offset, query)
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
        k_cache=k_cache,
        v_cache=v_cache,
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
    """Raise `ValueError` if queries do not fit their keys; see `append_kv`."""
    if query.dim() != 4 or (*query.shape[1:2], *query.shape[3:]) != key.shape[1:] or len(query) < len(key):
        raise ValueError(
            f"need query [at least {len(key)} tokens, kv_heads, queries, dim] of keys {tuple(key.shape)}, "
            f"found {tuple(query.shape)}"
        )
    if query.stride()[2:] != (query.shape[3], 1) or query.dtype != key.dtype or query.device != key.device:
        raise ValueError(
            f"need contiguous queries of a head in {key.dtype} on {key.device}, found strides {query.stride()}, "
            f"{query.dtype} on {query.device}"
        )


def check_append(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, token_block: Tensor, token_offset: Tensor
) -> None:
    """Raise `ValueError` if new keys and values do not fit the caches and their targets."""
    if key.dim() != 3 or k_cache.dim() != 4 or key.shape != value.shape or key.shape[1:] != k_cache.shape[2:]:
        raise ValueError(
            "need key and value [tokens, kv_heads, dim] and caches [blocks, block_size, kv_heads, dim], "
            f"found {tuple(key.shape)}, {tuple(value.shape)} and {tuple(k_cache.shape)}"
        )
    if k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride() or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"need caches of one shape, stride and dtype, found {tuple(k_cache.shape)} {k_cache.stride()} "
            f"{k_cache.dtype} and {tuple(v_cache.shape)} {v_cache.stride()} {v_cache.dtype}"
        )
    has_runs = key.shape[2] == 1 or key.stride(2) == value.stride(2) == 1
    if not has_runs or not k_cache[:1, :1].is_contiguous():
        raise ValueError(
            "need contiguous channels in key and value and contiguous heads in the caches, "
            f"found strides {key.stride()}, {value.stride()} and {k_cache.stride()}"
        )
    for name, locations in (("token_block", token_block), ("token_offset", token_offset)):
        if locations.dtype not in (torch.int32, torch.int64) or locations.device != key.device:
            raise ValueError(f"need {name} of integers on {key.device}, found {locations.dtype} on {locations.device}")
        if locations.shape != key.shape[:1] or not locations.is_contiguous():
            raise ValueError(f"need contiguous {name} of {key.shape[0]} tokens, found {tuple(locations.shape)}")
    if not key.device == value.device == k_cache.device == v_cache.device:
        raise ValueError(f"need keys, values and caches on one device, found {key.device} and {k_cache.device}")
