"""Grouped GEMM: multiply each expert's weights by the tokens routed to it.

Layout: weights [experts, outputs, inputs], inputs contiguous; in a gated layer, the gates come before the gated
outputs. Rows are (token, expert) pairs sorted by expert (`order_by_expert`), so an expert's weights are read once per
row tile. Grid: a program computes TILE rows of one expert and WIDTH outputs. The host does not know the number of
tiles, so it launches programs for the maximum; programs after the last tile return immediately.

With few rows per expert, the GEMM is limited by memory bandwidth; with many, by arithmetic. `gemm_tiles` chooses the
tile sizes, or the kernel in `grouped_gemm_hopper`. A given variant sums the inputs of a row in a fixed order, so a
token's result does not depend on the rest of the batch. Accumulation is in fp32. Safe in CUDA graphs: no host sync, no
atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..activations import Activation
from ..kernel_launches import INTERPRETED, is_computed_in_fp32, launches_kernel
from ..overlap import await_inputs, overlapping
from .gemm_tiles import GemmVariant, choose_variant, takes_long_tiles
from .grouped_gemm_hopper import multiply_on_hopper
from .reference_experts import ExpertOrder, grouped_gemm_ref

_IS_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def tile_of(starts, number, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr):
    """Return a tile's expert, its first row and the expert's end row; all 0 for numbers after the last tile."""
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
def _load_weights(
    weight, first_row, first_column, begin,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, BOXES: tl.constexpr,
):  # fmt: skip
    """Load weights [WIDTH, DEPTH]; a TMA box that extends past the last column includes unrelated weights."""
    if BOXES:
        values = weight.load([first_row + first_column, begin])
    else:
        column, element = first_column + tl.arange(0, WIDTH), begin + tl.arange(0, DEPTH)
        pointers = weight + (first_row + column).to(tl.int64)[:, None] * INPUTS + element[None, :]
        values = tl.load(pointers, mask=(column < OUTPUTS)[:, None] & (element < INPUTS)[None, :], other=0)
    return values


@triton.jit
def _multiply(given, weights, total, SWAPS: tl.constexpr, PRECISION: tl.constexpr):
    """Return total plus the product of rows and weights; the weights are on the left if SWAPS.

    In Triton's interpreter, `tl.dot` would multiply bf16 bit patterns as integers, and its order of summation would
    depend on a row's position. There, an explicit sum in a fixed order replaces it.
    """
    left, right = (weights, given) if SWAPS else (given, weights)
    if _IS_INTERPRETED:
        found = total + tl.sum(left.to(tl.float32).T[:, :, None] * right.to(tl.float32).T[:, None, :], axis=0)
    else:
        found = tl.dot(left, right.T, total, input_precision=PRECISION)
    return found


@triton.jit
def _compute_tile(
    x, weight, pairs, out, x_stride, expert, first, last,
    DIVISOR: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, SWAPS: tl.constexpr,
    BOXES: tl.constexpr,
):  # fmt: skip
    """Compute and store WIDTH outputs for TILE rows of one expert; rows from `last` on are not stored."""
    IS_GATED: tl.constexpr = ACTIVATION == "gated_silu"
    row = first + tl.arange(0, TILE)
    is_row = row < last
    # Rows of x are tokens if DIVISOR > 0, else pairs sorted by expert.
    source = tl.load(pairs + row, mask=is_row, other=0) // DIVISOR if DIVISOR > 0 else tl.where(is_row, row, first)
    first_column = tl.program_id(0) * WIDTH
    column = first_column + tl.arange(0, WIDTH)
    element = tl.arange(0, DEPTH)
    rows = x + source.to(tl.int64)[:, None] * x_stride + element[None, :]
    first_row = expert * ((2 if IS_GATED else 1) * OUTPUTS)
    total = tl.zeros([WIDTH, TILE] if SWAPS else [TILE, WIDTH], tl.float32)
    others = tl.zeros([WIDTH, TILE] if SWAPS else [TILE, WIDTH], tl.float32)
    for begin in range(0, INPUTS, DEPTH):
        if INPUTS % DEPTH == 0:
            given = tl.load(rows + begin)
        else:
            given = tl.load(rows + begin, mask=(begin + element < INPUTS)[None, :], other=0)
        weights = _load_weights(weight, first_row, first_column, begin, OUTPUTS, INPUTS, WIDTH, DEPTH, BOXES)
        total = _multiply(given, weights, total, SWAPS, PRECISION)
        if IS_GATED:
            weights = _load_weights(
                weight, first_row + OUTPUTS, first_column, begin, OUTPUTS, INPUTS, WIDTH, DEPTH, BOXES
            )
            others = _multiply(given, weights, others, SWAPS, PRECISION)
    if ACTIVATION == "squared_relu":
        total = tl.maximum(total, 0, propagate_nan=tl.PropagateNan.ALL)
        total = total * total
    if IS_GATED:
        total = total / (1 + tl.exp(-total)) * others
    result = total.to(out.dtype.element_ty)
    if SWAPS:
        pointers = out + row.to(tl.int64)[None, :] * OUTPUTS + column[:, None]
        tl.store(pointers, result, mask=is_row[None, :] & (column < OUTPUTS)[:, None])
    else:
        pointers = out + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
        tl.store(pointers, result, mask=is_row[:, None] & (column < OUTPUTS)[None, :])


@triton.jit
def _grouped_gemm_kernel(
    x, weight, pairs, starts, out, x_stride,
    DIVISOR: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
    DEPTH: tl.constexpr, SWAPS: tl.constexpr, BOXES: tl.constexpr, HAS_HALVES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    expert, first, last = tile_of(starts, tl.program_id(1), NUM_EXPERTS, EXPERTS, TILE)
    if first >= last:
        return
    if HAS_HALVES and last - first <= TILE // 2:
        _compute_tile(
            x, weight, pairs, out, x_stride, expert, first, last,
            DIVISOR, INPUTS, OUTPUTS, ACTIVATION, PRECISION, TILE // 2, WIDTH, DEPTH, SWAPS, BOXES,
        )  # fmt: skip
    else:
        _compute_tile(
            x, weight, pairs, out, x_stride, expert, first, last,
            DIVISOR, INPUTS, OUTPUTS, ACTIVATION, PRECISION, TILE, WIDTH, DEPTH, SWAPS, BOXES,
        )  # fmt: skip


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    order: ExpertOrder,
    *,
    top_k: int | None = None,
    activation: Activation = "none",
    follows_first: bool = False,
) -> Tensor:
    """Multiply each row by its expert's weights, and apply the activation.

    The function is long because all of its arguments are documented.

    Args:
        x: [tokens, inputs] if `top_k` is given, else [pairs, inputs] sorted by expert; inputs contiguous.
        weight: [experts, outputs, inputs], contiguous; for `gated_silu` [experts, 2 * outputs, inputs], gates first.
        order: The pairs sorted by expert; see `order_by_expert`.
        top_k: Number of experts per token; None: `x` has one row per pair.
        activation: For a product p, `none` returns p, `squared_relu` max(p, 0)^2, and `gated_silu` silu(gate) * p.
        follows_first: True if the previous launch on this stream is the layer's first GEMM, with the same order, and
            `takes_long_tiles` was True for it. The kernel then reads weights before that GEMM ends.

    Returns:
        [pairs, outputs] sorted by expert, in the dtype of `x`.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `grouped_gemm_ref`. CUDA-graph safe: no host sync, one launch, or two for many rows on Hopper.
    """
    _check(x, weight, order, activation)
    if not launches_kernel(x) or not is_computed_in_fp32(x):
        return grouped_gemm_ref(x, weight, order, top_k=top_k, activation=activation)
    num_experts, num_rows = weight.shape[0], len(order.pairs)
    is_gated = activation == "gated_silu"
    outputs = weight.shape[1] // (2 if is_gated else 1)
    out = torch.empty(num_rows, outputs, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if takes_long_tiles(x, weight, num_rows, is_gathered=top_k is not None, is_gated=is_gated):
        multiply_on_hopper(x, weight, order, out, top_k=top_k, activation=activation, follows_first=follows_first)
        return out
    variant = choose_variant(num_rows, weight, is_gated=is_gated)
    most_tiles = min(num_rows, num_experts + num_rows // variant.rows)
    _grouped_gemm_kernel[(triton.cdiv(outputs, variant.outputs), most_tiles)](
        x=x,
        weight=_boxes(weight, variant) if variant.loads_boxes else weight,
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
        TILE=variant.rows,
        WIDTH=variant.outputs,
        DEPTH=variant.inputs,
        SWAPS=variant.rows < 64,  # on tensor cores the left operand has at least 64 rows
        BOXES=variant.loads_boxes,
        HAS_HALVES=variant.has_halves,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
        enable_fp_fusion=True,
        **overlapping(x.device),
    )
    return out


def _boxes(weight: Tensor, variant: GemmVariant) -> TensorDescriptor:
    """Return a TMA descriptor for the weights of all experts as one matrix."""
    return TensorDescriptor.from_tensor(weight.flatten(0, 1), [variant.outputs, variant.inputs])


def _check(x: Tensor, weight: Tensor, order: ExpertOrder, activation: Activation) -> None:
    if x.dim() != 2 or weight.dim() != 3 or weight.shape[2] != x.shape[1]:
        raise ValueError(
            f"x must have shape [rows, inputs] and weight [experts, outputs, inputs], found x {tuple(x.shape)} and "
            f"weight {tuple(weight.shape)}"
        )
    if activation == "gated_silu" and weight.shape[1] % 2:
        raise ValueError(
            f"weight must have shape [experts, 2 * outputs, inputs] for gated_silu, found {tuple(weight.shape)}"
        )
    if order.starts.shape != (weight.shape[0] + 1,):
        raise ValueError(f"order.starts must have shape [{weight.shape[0] + 1}], found {tuple(order.starts.shape)}")
    if x.dtype != weight.dtype or not x.device == weight.device == order.starts.device:
        raise ValueError(
            f"x and weight must have the same dtype, and all inputs the same device; found x {x.dtype} on {x.device}, "
            f"weight {weight.dtype} on {weight.device}, order on {order.starts.device}"
        )
    if not weight.is_contiguous() or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(
            f"weight and rows of x must be contiguous, found strides weight {weight.stride()}, x {x.stride()}"
        )
