"""Write the inputs of attention in one launch: norm and rotate queries and keys, pack queries, cache keys and values.

Each head of queries and keys is RMS-normalized, if there are norms, and rounded; then its first channels are rotated by
the token's position, if there is a rotation. The products of a rotation are rounded before they are added, so a
rotation alone has the bits of Megatron's own.

Layout: as `kv_append`. Grid: a program computes one head of a few tokens, a query's or a key's, and moves a key's
value. The channels of a head are [parts, width]: a rotated channel and its partner are the same element of the first
two parts. All arithmetic is fp32. Graph safe: no host sync, one launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from ..overlap import await_inputs, overlapping
from .head_changes import HeadChanges
from .kv_append import check_append, check_query
from .reference import write_attention_inputs_ref

_TILE_LEN = 1024
"""The fewest channels of a program; smaller heads share one."""


@triton.jit
def _cast(values, like):
    """Return fp32 values rounded to a tensor's dtype."""
    return values.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _normed(values, scale, norm, norm_offset, channel, inside, like):
    """Return values times a scale and their channels' factors, rounded."""
    factor = tl.load(norm + tl.broadcast_to(channel, inside.shape), mask=inside, other=0).to(tl.float32) + norm_offset
    return _cast(values * scale * factor, like)


@triton.jit
def _changed_head(
    source, inside, like, norm, norm_offset, eps, table, position, part, element,
    HAS_NORM: tl.constexpr, ROTATES: tl.constexpr, HEAD_DIM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Return a head of each token [TOKENS, PARTS, WIDTH], normed and rotated, in fp32 with the values of its dtype."""
    channel = part * PART + element
    values = tl.load(source + channel, mask=inside, other=0).to(tl.float32)
    scale = 1.0
    if HAS_NORM:
        total = tl.sum(tl.sum(values * values, axis=2), axis=1)[:, None, None]
        scale = 1 / tl.sqrt(total / HEAD_DIM + eps)
        values = _normed(values, scale, norm, norm_offset, channel, inside, like)
    if ROTATES:
        partner, is_rotated = (part ^ 1) * PART + element, inside & (part < 2)
        partners = tl.load(source + partner, mask=is_rotated, other=0).to(tl.float32)
        if HAS_NORM:
            partners = _normed(partners, scale, norm, norm_offset, partner, is_rotated, like)
        angles = tl.broadcast_to(table + position[:, None, None] * (2 * PART) + element, inside.shape)
        cosine = tl.load(angles, mask=is_rotated, other=0).to(tl.float32)
        sine = tl.load(angles + PART, mask=is_rotated, other=0).to(tl.float32)
        along, across = _cast(values * cosine, like), _cast(partners * sine, like)
        values = tl.where(is_rotated, along + tl.where(part == 0, -across, across), values)
    return values


@triton.jit(do_not_specialize=["num_tokens"])
def _inputs_kernel(
    query, key, value, packed, k_cache, v_cache, token_block, token_offset, query_norm, key_norm, norm_offset, eps,
    table, positions, num_tokens, query_stride, query_head_stride, key_stride, key_head_stride, value_stride,
    value_head_stride, block_stride, offset_stride,
    HAS_NORMS: tl.constexpr, ROTATES: tl.constexpr, KV_HEADS: tl.constexpr, QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute a head of TOKENS tokens."""
    await_inputs(OVERLAPS)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = token < num_tokens
    line = token.to(tl.int64)[:, None, None]
    part, element = tl.arange(0, PARTS)[None, :, None], tl.arange(0, WIDTH)[None, None, :]
    channel = part * PART + element
    inside = exists[:, None, None] & (element < PART) & (channel < HEAD_DIM)  # [TOKENS, PARTS, WIDTH]
    head, number = tl.program_id(1) // (QUERIES + 1), tl.program_id(1) % (QUERIES + 1)
    position = tl.zeros([TOKENS], tl.int64)
    if ROTATES:
        position = tl.load(positions + token, mask=exists, other=0).to(tl.int64)
    if number < QUERIES:
        source = query + line * query_stride + head * query_head_stride + number * HEAD_DIM
        changed = _changed_head(
            source, inside, query, query_norm, norm_offset, eps, table, position, part, element,
            HAS_NORMS, ROTATES, HEAD_DIM, PART,
        )  # fmt: skip
        index = (line * (KV_HEADS * QUERIES) + head * QUERIES + number) * HEAD_DIM + channel
        tl.store(packed + index, changed.to(packed.dtype.element_ty), mask=inside)
        return
    block = tl.load(token_block + token, mask=exists, other=-1).to(tl.int64)[:, None, None]
    offset = tl.load(token_offset + token, mask=exists, other=0).to(tl.int64)[:, None, None]
    moves = (block >= 0) & inside
    new_value = tl.load(value + line * value_stride + head * value_head_stride + channel, mask=moves, other=0)
    changed = _changed_head(
        key + line * key_stride + head * key_head_stride, moves, key, key_norm, norm_offset, eps, table, position, part,
        element, HAS_NORMS, ROTATES, HEAD_DIM, PART,
    )  # fmt: skip
    index = block * block_stride + offset * offset_stride + head * HEAD_DIM + channel
    tl.store(k_cache + index, changed.to(key.dtype.element_ty).to(k_cache.dtype.element_ty), mask=moves)
    tl.store(v_cache + index, new_value.to(v_cache.dtype.element_ty), mask=moves)


def write_attention_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    token_block: Tensor,
    token_offset: Tensor,
    changes: HeadChanges,
) -> Tensor:
    """Write each new token's changed key, and its value, into the caches; return its changed queries packed.

    Long because of its contract.

    Args:
        query: [at least tokens, kv_heads, queries, dim], the queries of a head contiguous.
        key, value: [tokens, kv_heads, dim], channels contiguous; cast to the caches' dtype.
        k_cache, v_cache, token_block, token_offset: As in `append_kv`.
        changes: Norm and rotation of each head of queries and keys.

    Returns:
        [as many tokens as `query` has, kv_heads * queries, dim] contiguous, unspecified beyond the first `tokens`.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `write_attention_inputs_ref`. CUDA-graph safe: no host sync, one launch.
    """
    check_append(key, value, k_cache, v_cache, token_block, token_offset)
    check_query(query, key)
    changes.check(key)
    if key.numel() == 0 or not launches_kernel(key) or torch.float64 in (key.dtype, k_cache.dtype):
        return write_attention_inputs_ref(query, key, value, k_cache, v_cache, token_block, token_offset, changes)
    (num_tokens, num_heads, head_dim), queries = key.shape, query.shape[2]
    packed = query.new_empty(len(query), num_heads * queries, head_dim)
    norms, rotation = changes.norms, changes.rotation
    part = head_dim if rotation is None else rotation.table.shape[2]
    parts, width = triton.next_power_of_2(triton.cdiv(head_dim, part)), triton.next_power_of_2(part)
    tokens = max(1, _TILE_LEN // (parts * width))
    _inputs_kernel[(triton.cdiv(num_tokens, tokens), num_heads * (queries + 1))](
        query=query,
        key=key,
        value=value,
        packed=packed,
        k_cache=k_cache,
        v_cache=v_cache,
        token_block=token_block,
        token_offset=token_offset,
        query_norm=key if norms is None else norms.query,
        key_norm=key if norms is None else norms.key,
        norm_offset=0.0 if norms is None else norms.offset,
        eps=0.0 if norms is None else norms.eps,
        table=key if rotation is None else rotation.table,
        positions=token_block if rotation is None else rotation.positions,
        num_tokens=num_tokens,
        query_stride=query.stride(0),
        query_head_stride=query.stride(1),
        key_stride=key.stride(0),
        key_head_stride=key.stride(1),
        value_stride=value.stride(0),
        value_head_stride=value.stride(1),
        block_stride=k_cache.stride(0),
        offset_stride=k_cache.stride(1),
        HAS_NORMS=norms is not None,
        ROTATES=rotation is not None,
        KV_HEADS=num_heads,
        QUERIES=queries,
        HEAD_DIM=head_dim,
        PART=part,
        PARTS=parts,
        WIDTH=width,
        TOKENS=tokens,
        num_warps=max(1, min(4, parts * width * tokens // 256)),
        enable_fp_fusion=False,  # in fp32 too, products are rounded before they are added
        **overlapping(key.device),
    )
    return packed
