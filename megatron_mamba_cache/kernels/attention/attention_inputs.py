"""Prepare attention inputs in one launch: normalize and rotate heads, pack queries, append keys and values.

If the model has query and key norms, each head is RMS-normalized and rounded. If it has rotary embeddings, the first
channels of each head are then rotated by the token's position. The products in a rotation are rounded before they are
added, so a rotation without a norm is bit-identical to Megatron's.

Layout: as in `kv_append`. Grid: a program computes one query head or one key head for a few tokens; for a key it also
copies the value. The channels of a head are viewed as [parts, width]; the rotation pairs channel i of the first part
with channel i of the second. Arithmetic is in fp32. Safe in CUDA graphs: no host sync, one launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from ..overlap import await_inputs, overlapping
from .head_changes import HeadChanges
from .kv_append import check_append, check_query
from .kv_values import UNSCALED, KVScales, addressed, stored_values
from .reference import write_attention_inputs_ref

_TILE_LEN = 1024
"""Minimum number of channels per program; smaller heads share a program."""


@triton.jit
def _cast(values, like):
    """Round fp32 values to the precision of the tensor `like`; return them in fp32."""
    return values.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _normed(values, scale, norm, norm_offset, channel, inside, like):
    """Multiply values by the head's inverse RMS and by (weight + offset); round to the precision of `like`."""
    factor = tl.load(norm + tl.broadcast_to(channel, inside.shape), mask=inside, other=0).to(tl.float32) + norm_offset
    return _cast(values * scale * factor, like)


@triton.jit
def _changed_head(
    source, inside, like, norm, norm_offset, eps, table, position, part, element,
    HAS_NORM: tl.constexpr, ROTATES: tl.constexpr, HEAD_DIM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Load one head of each token; normalize and rotate it as configured; return [TOKENS, PARTS, WIDTH] fp32."""
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
    value_head_stride, block_stride, offset_stride, key_scale, value_scale,
    HAS_NORMS: tl.constexpr, ROTATES: tl.constexpr, KV_HEADS: tl.constexpr, QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Normalize, rotate and store one query head, or one key head and its value, for TOKENS tokens."""
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
    tl.store(k_cache + index, stored_values(changed.to(key.dtype.element_ty), key_scale, k_cache), mask=moves)
    tl.store(v_cache + index, stored_values(new_value, value_scale, v_cache), mask=moves)


def write_attention_inputs(
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
    """Normalize and rotate queries and keys, append keys and values to the caches, and return the queries packed.

    The function is long because all of its arguments are documented.

    Args:
        query: [padded tokens, kv_heads, queries, dim]; the queries of one KV head are contiguous.
        key, value: [tokens, kv_heads, dim], channels contiguous; stored as by `append_kv`.
        k_cache, v_cache, token_block, token_offset, scales: As in `append_kv`.
        changes: Norm and rotation to apply to each query head and key head.

    Returns:
        [padded tokens, kv_heads * queries, dim], contiguous; rows after the first `tokens` are undefined.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `write_attention_inputs_ref`. CUDA-graph safe: no host sync, one launch.
    """
    check_append(key, value, k_cache, v_cache, token_block, token_offset)
    check_query(query, key)
    changes.check(key)
    if key.numel() == 0 or not launches_kernel(key) or torch.float64 in (key.dtype, k_cache.dtype):
        return write_attention_inputs_ref(
            query, key, value, k_cache, v_cache, token_block, token_offset, changes, scales
        )
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
        k_cache=addressed(k_cache),
        v_cache=addressed(v_cache),
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
        key_scale=scales.key,
        value_scale=scales.value,
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
        enable_fp_fusion=False,  # products must be rounded before they are added, for fp32 inputs too
        **overlapping(key.device),
    )
    return packed
