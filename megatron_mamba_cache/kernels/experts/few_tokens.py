"""The products of a few tokens with their experts: a pair of a token and an expert at a time, in no order by expert.

With so few tokens hardly two choose the same expert, and reading the weights takes all the time. So there are no
tensor cores here, which want tiles, but many small programs: each multiplies a vector with a few rows of weights, all
loads of which are in flight at once.

Layout: pairs in the order of tokens, then of the tokens' experts. Grid of `product_of_pairs`: pairs times tiles of
outputs. Grid of `sum_of_products`: tokens times tiles of outputs; a program goes through the token's experts in their
order. A token's bits do not depend on other tokens. Accumulation is fp32. Graph safe: no host sync, no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import Activation
from ..kernel_launches import is_computed_in_fp32, launches_kernel
from ..masks import only_if
from ..overlap import await_inputs, overlapping
from .reference_experts import product_of_pairs_ref, sum_of_products_ref

__all__ = ["FEW_TOKENS", "product_of_pairs", "product_of_pairs_ref", "sum_of_products", "sum_of_products_ref"]

FEW_TOKENS = 4
"""Up to as many tokens take less time so than in the order of experts; see `benchmarks/results/experts.md`."""

_WIDEST = 4096
"""Inputs of a tile at most."""


@triton.jit
def _multiply(vector, weights, is_here, INPUTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return [ROWS, WIDTH] partial products of a vector with rows of weights; zeros unless `is_here`."""
    element = tl.arange(0, WIDTH)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for begin in tl.static_range(0, INPUTS, WIDTH):
        inside = only_if(is_here, begin + element < INPUTS)
        weight = tl.load(weights + begin + element[None, :], mask=inside[None, :], other=0)
        given = tl.load(vector + begin + element, mask=inside, other=0)
        total += weight.to(tl.float32) * given.to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["first_expert"])
def _pairs_kernel(
    x,
    weight,
    ids,
    out,
    x_stride,
    first_expert,
    DIVISOR: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    await_inputs(OVERLAPS)
    HALVES: tl.constexpr = 2 if ACTIVATION == "gated_silu" else 1
    pair = tl.program_id(1)
    expert = tl.load(ids + pair) - first_expert
    if (expert >= 0) & (expert < NUM_EXPERTS):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        vector = x + (pair // DIVISOR).to(tl.int64) * x_stride
        weights = weight + expert.to(tl.int64) * (HALVES * OUTPUTS * INPUTS)
        weights += tl.minimum(row, OUTPUTS - 1)[:, None] * INPUTS
        total = tl.sum(_multiply(vector, weights, True, INPUTS, ROWS, WIDTH), axis=1)
        if ACTIVATION == "squared_relu":
            total = tl.maximum(total, 0, propagate_nan=tl.PropagateNan.ALL)
            total = total * total
        if ACTIVATION == "gated_silu":
            others = tl.sum(_multiply(vector, weights + OUTPUTS * INPUTS, True, INPUTS, ROWS, WIDTH), axis=1)
            total = total / (1 + tl.exp(-total)) * others
        tl.store(out + pair.to(tl.int64) * OUTPUTS + row, total.to(out.dtype.element_ty), mask=row < OUTPUTS)


@triton.jit(do_not_specialize=["first_expert"])
def _sum_kernel(
    rows,
    weight,
    ids,
    shares,
    addend,
    out,
    first_expert,
    HAS_ADDEND: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    await_inputs(OVERLAPS)
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    partial = tl.zeros([ROWS, WIDTH], tl.float32)
    for slot in range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(ids + pair) - first_expert
        is_here = (expert >= 0) & (expert < NUM_EXPERTS)
        weights = weight + expert.to(tl.int64) * (OUTPUTS * INPUTS) + tl.minimum(row, OUTPUTS - 1)[:, None] * INPUTS
        share = tl.load(shares + pair)
        partial += share * _multiply(rows + pair * INPUTS, weights, is_here, INPUTS, ROWS, WIDTH)
    total = tl.sum(partial, axis=1)
    if HAS_ADDEND:
        total += tl.load(addend + token * OUTPUTS + row, mask=row < OUTPUTS, other=0).to(tl.float32)
    tl.store(out + token * OUTPUTS + row, total.to(out.dtype.element_ty), mask=row < OUTPUTS)


def product_of_pairs(
    x: Tensor, weight: Tensor, ids: Tensor, *, activation: Activation = "none", first_expert: int = 0
) -> Tensor:
    """Return the activated products of tokens with each of their experts' weights.

    Args:
        x: [tokens, inputs]; inputs contiguous.
        weight: [experts, outputs, inputs], contiguous; [experts, 2 * outputs, inputs] for `gated_silu`: gates first.
        ids: [tokens, top_k] int32, contiguous: each token's experts.
        activation: See `grouped_product`.
        first_expert: Number of the first expert whose weights are here.

    Returns:
        [tokens * top_k, outputs] in x's dtype; rows of experts that are elsewhere are not written.

    Raises:
        ValueError: If shapes, dtypes or strides disagree.

    Reference: `product_of_pairs_ref`. CUDA-graph safe: no host sync, one launch.
    """
    _check(x, weight, ids, 1)
    if not launches_kernel(x) or not is_computed_in_fp32(x):
        return product_of_pairs_ref(x, weight, ids, activation=activation, first_expert=first_expert)
    outputs = weight.shape[1] // (2 if activation == "gated_silu" else 1)
    out = torch.empty(ids.numel(), outputs, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = 4
    _pairs_kernel[(triton.cdiv(outputs, rows), ids.numel())](
        x=x,
        weight=weight,
        ids=ids,
        out=out,
        x_stride=x.stride(0),
        first_expert=first_expert,
        DIVISOR=ids.shape[1],
        NUM_EXPERTS=weight.shape[0],
        INPUTS=x.shape[1],
        OUTPUTS=outputs,
        ACTIVATION=activation,
        ROWS=rows,
        WIDTH=_width(x),
        num_warps=4,
        **overlapping(x.device),
    )
    return out


def sum_of_products(
    rows: Tensor,
    weight: Tensor,
    ids: Tensor,
    shares: Tensor,
    addend: Tensor | None = None,
    *,
    first_expert: int = 0,
) -> Tensor:
    """Return for each token the weighted sum of its rows' products with their experts' weights.

    Long because of its contract.

    Args:
        rows: [tokens * top_k, inputs], contiguous; those of experts that are elsewhere are not read.
        weight: [experts, outputs, inputs], contiguous.
        ids: [tokens, top_k] int32, contiguous: each token's experts.
        shares: [tokens, top_k] float32, contiguous: what each of them weighs.
        addend: [tokens, outputs], contiguous, added to the sum; None for none.
        first_expert: Number of the first expert whose weights are here.

    Returns:
        [tokens, outputs] in the rows' dtype; the products are not rounded before they are summed.

    Raises:
        ValueError: If shapes, dtypes or strides disagree.

    Reference: `sum_of_products_ref`. CUDA-graph safe: no host sync, one launch.
    """
    _check(rows, weight, ids, ids.shape[1])
    if not launches_kernel(rows) or not is_computed_in_fp32(rows):
        return sum_of_products_ref(rows, weight, ids, shares, addend, first_expert=first_expert)
    (num_tokens, top_k), outputs = ids.shape, weight.shape[1]
    out = torch.empty(num_tokens, outputs, dtype=rows.dtype, device=rows.device)
    if out.numel() == 0:
        return out
    # Fewer outputs a program keep more programs busy where there are few.
    rows_at_once = 4 if outputs >= 2048 else 2
    _sum_kernel[(triton.cdiv(outputs, rows_at_once), num_tokens)](
        rows=rows,
        weight=weight,
        ids=ids,
        shares=shares,
        addend=rows if addend is None else addend,
        out=out,
        first_expert=first_expert,
        HAS_ADDEND=addend is not None,
        TOP_K=top_k,
        NUM_EXPERTS=weight.shape[0],
        INPUTS=rows.shape[1],
        OUTPUTS=outputs,
        ROWS=rows_at_once,
        WIDTH=_width(rows),
        num_warps=4,
        **overlapping(rows.device),
    )
    return out


def _width(x: Tensor) -> int:
    return min(_WIDEST, triton.next_power_of_2(x.shape[1]))


def _check(x: Tensor, weight: Tensor, ids: Tensor, rows_of_token: int) -> None:
    if weight.dim() != 3 or ids.dim() != 2 or x.shape != (ids.shape[0] * rows_of_token, weight.shape[2]):
        raise ValueError(
            "need weight [experts, outputs, inputs], ids [tokens, top_k] and their rows [rows, inputs], found "
            f"{tuple(weight.shape)}, {tuple(ids.shape)} and {tuple(x.shape)}"
        )
    if x.dtype != weight.dtype or ids.dtype != torch.int32 or not x.device == weight.device == ids.device:
        raise ValueError(f"need one dtype and device and int32 ids, found {x.dtype}, {weight.dtype} and {ids.dtype}")
    if not weight.is_contiguous() or not ids.is_contiguous() or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(f"need contiguous weights, ids and inputs, found strides {weight.stride()} and {x.stride()}")
