"""Products of each expert's weights with the tokens that chose it, and the weighted sum of a token's experts.

Layout: weights [experts, outputs, inputs], inputs contiguous; a gated layer's first weights hold the gates' outputs
before the others. Rows are pairs of a token and an expert in the order of experts (`order_by_expert`), so that an
expert's rows are consecutive and its weights are read once for each tile of rows. Grid: a program computes TILE rows of
one expert and WIDTH outputs. The host does not know how many tiles an expert has: programs are launched for the most
tiles that any choice can have, and each finds its expert from the starts; those beyond the last tile do nothing.

A row's inputs are summed in one order, whatever other rows there are, so a token's bits do not depend on the batch.
Accumulation is fp32. Graph safe: no host sync, no atomics.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import INTERPRETED, is_computed_in_fp32, launches_kernel
from .reference_experts import grouped_product_ref, weighted_sum_ref
from .reference_routing import ExpertOrder

__all__ = ["Activation", "grouped_product", "grouped_product_ref", "weighted_sum", "weighted_sum_ref"]

Activation = Literal["none", "squared_relu", "gated_silu"]

_TILE = 16
_WIDTH = 64
_DEPTH = 64
"""Rows, outputs and inputs of a tile."""
_SUM_WIDTH = 1024
_IS_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _tile_of(starts, number, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr):
    """Return the expert of a tile, its first row and the row after the expert's last; no rows beyond the last tile."""
    expert = tl.arange(0, EXPERTS)
    exists = expert < NUM_EXPERTS
    begin = tl.load(starts + expert, mask=exists, other=0)
    end = tl.load(starts + expert + 1, mask=exists, other=0)
    num_tiles = (end - begin + TILE - 1) // TILE
    after = tl.cumsum(num_tiles, axis=0)
    is_own = exists & (after - num_tiles <= number) & (number < after)
    own = tl.sum(tl.where(is_own, expert, 0), axis=0)
    first = tl.sum(tl.where(is_own, begin + (number - after + num_tiles) * TILE, 0), axis=0)
    last = tl.sum(tl.where(is_own, end, 0), axis=0)
    return own, first, last


@triton.jit
def _operand(pointers, mask):
    """Load what a product takes; the interpreter multiplies the bits of bf16 instead of its values."""
    values = tl.load(pointers, mask=mask, other=0)
    return values.to(tl.float32) if _IS_INTERPRETED else values


@triton.jit
def _grouped_product_kernel(
    x,
    weight,
    pairs,
    starts,
    out,
    x_stride,
    DIVISOR: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    expert, first, last = _tile_of(starts, tl.program_id(1), NUM_EXPERTS, EXPERTS, TILE)
    if first >= last:
        return
    IS_GATED: tl.constexpr = ACTIVATION == "gated_silu"
    row = first + tl.arange(0, TILE)
    is_row = row < last
    # Rows of x are tokens, or pairs in the order of experts.
    source = tl.load(pairs + row, mask=is_row, other=0) // DIVISOR if DIVISOR > 0 else row
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    is_column = column < OUTPUTS
    element = tl.arange(0, DEPTH)
    rows = x + source.to(tl.int64)[:, None] * x_stride + element[None, :]
    num_weights: tl.constexpr = (2 if IS_GATED else 1) * OUTPUTS * INPUTS
    columns = weight + expert.to(tl.int64) * num_weights + column[None, :] * INPUTS + element[:, None]
    total = tl.zeros([TILE, WIDTH], tl.float32)
    others = tl.zeros([TILE, WIDTH], tl.float32)
    for begin in range(0, INPUTS, DEPTH):
        is_input = begin + element < INPUTS
        given = _operand(rows + begin, is_row[:, None] & is_input[None, :])
        inside = is_input[:, None] & is_column[None, :]
        total = tl.dot(given, _operand(columns + begin, inside), total, input_precision=PRECISION)
        if IS_GATED:
            other = _operand(columns + OUTPUTS * INPUTS + begin, inside)
            others = tl.dot(given, other, others, input_precision=PRECISION)
    if ACTIVATION == "squared_relu":
        total = tl.maximum(total, 0)
        total = total * total
    if IS_GATED:
        total = total / (1 + tl.exp(-total)) * others
    places = out + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    tl.store(places, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _weighted_sum_kernel(rows, places, weights, out, OUTPUTS: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < OUTPUTS
    total = tl.zeros([WIDTH], tl.float32)
    for slot in range(TOP_K):
        place = tl.load(places + token * TOP_K + slot).to(tl.int64)
        weight = tl.load(weights + token * TOP_K + slot)
        total += weight * tl.load(rows + place * OUTPUTS + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + token * OUTPUTS + column, total.to(out.dtype.element_ty), mask=inside)


def grouped_product(
    x: Tensor,
    weight: Tensor,
    order: ExpertOrder,
    *,
    top_k: int | None = None,
    activation: Activation = "none",
) -> Tensor:
    """Return the activated products of rows with their experts' weights.

    Long because of its contract.

    Args:
        x: [tokens, inputs] if `top_k` is given, else [pairs, inputs] in the order of experts; inputs contiguous.
        weight: [experts, outputs, inputs], contiguous; [experts, 2 * outputs, inputs] for `gated_silu`: gates first.
        order: Of the rows; see `order_by_expert`.
        top_k: Experts of a token.
        activation: What is done to the products: nothing, max(p, 0)^2, or silu(gate) * p.

    Returns:
        [pairs, outputs] in the order of experts, in x's dtype.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `grouped_product_ref`. CUDA-graph safe: no host sync, one launch.
    """
    _check(x, weight, order, activation)
    if not launches_kernel(x) or not is_computed_in_fp32(x):
        return grouped_product_ref(x, weight, order, top_k=top_k, activation=activation)
    num_experts, num_rows = weight.shape[0], len(order.pairs)
    outputs = weight.shape[1] // (2 if activation == "gated_silu" else 1)
    out = torch.empty(num_rows, outputs, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    most_tiles = min(num_rows, num_experts + num_rows // _TILE)
    _grouped_product_kernel[(triton.cdiv(outputs, _WIDTH), most_tiles)](
        x=x,
        weight=weight,
        pairs=order.pairs,
        starts=order.starts,
        out=out,
        x_stride=x.stride(0),
        DIVISOR=top_k or 0,
        INPUTS=x.shape[1],
        OUTPUTS=outputs,
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        ACTIVATION=activation,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        TILE=_TILE,
        WIDTH=_WIDTH,
        DEPTH=_DEPTH,
        num_warps=4,
        num_stages=4,
    )
    return out


def weighted_sum(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Return for each token the sum of its experts' rows times their weights, in the order of its slots.

    Args:
        rows: [pairs, outputs], contiguous.
        places: [tokens, top_k] int32: which row each slot has.
        weights: [tokens, top_k] float32.

    Returns:
        [tokens, outputs] in the rows' dtype; summed in fp32.

    Reference: `weighted_sum_ref`. CUDA-graph safe: no host sync, one launch.
    """
    if not launches_kernel(rows) or not is_computed_in_fp32(rows):
        return weighted_sum_ref(rows, places, weights)
    (num_tokens, top_k), outputs = places.shape, rows.shape[1]
    out = torch.empty(num_tokens, outputs, dtype=rows.dtype, device=rows.device)
    if out.numel() == 0:
        return out
    _weighted_sum_kernel[(num_tokens, triton.cdiv(outputs, _SUM_WIDTH))](
        rows=rows,
        places=places,
        weights=weights,
        out=out,
        OUTPUTS=outputs,
        TOP_K=top_k,
        WIDTH=_SUM_WIDTH,
        num_warps=4,
    )
    return out


def _check(x: Tensor, weight: Tensor, order: ExpertOrder, activation: Activation) -> None:
    if x.dim() != 2 or weight.dim() != 3 or weight.shape[2] != x.shape[1]:
        raise ValueError(
            f"need x [rows, inputs] and weight [experts, outputs, inputs], found {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if activation == "gated_silu" and weight.shape[1] % 2:
        raise ValueError(f"gated_silu needs as many gates as outputs, found {weight.shape[1]} rows of weights")
    if order.starts.shape != (weight.shape[0] + 1,):
        raise ValueError(f"need an order of {weight.shape[0]} experts, found starts {tuple(order.starts.shape)}")
    if x.dtype != weight.dtype or not x.device == weight.device == order.starts.device:
        raise ValueError(f"need one dtype and device, found {x.dtype} on {x.device} and {weight.dtype}")
    if not weight.is_contiguous() or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(f"need contiguous weights and inputs, found strides {weight.stride()} and {x.stride()}")
