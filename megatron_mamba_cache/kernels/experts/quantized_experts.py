"""Routed experts with weights that stay codes: FP8 and NVFP4 for few tokens, NVFP4 on Hopper for many, too.

Layout and grid as in `grouped_gemm`: a program computes a tile of one expert's rows, and WIDTH outputs. Codes are
multiplied as in `few_token_gemm`, each read once for a tile of rows. A token's bits depend on the tile's length, which
the number of pairs gives, not on other tokens. With more rows, `coded_gemm_hopper` computes NVFP4; a caller dequantizes
other weights. Graph safe: no host sync, no atomics.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import Activation
from ..kernel_launches import launches_kernel
from ..overlap import await_inputs, overlapping
from ..quantized.code_tiles import sum_inputs, sum_nvfp4_inputs
from ..quantized.few_token_gemm import has_kernel, scales_of_kernel
from ..quantized.few_token_tiles import words_of_tile
from ..quantized.quantized_matrix import RUN, QuantizedMatrix
from .coded_gemm_hopper import multiply_codes_on_hopper
from .expert_order import order_by_expert
from .gemm_tiles import fits_long_tiles, loads_boxes_on
from .grouped_gemm import tile_of
from .overlapped_expert import OverlappedExpert
from .pair_gemms import FEW_TOKENS
from .quantized_experts_hopper import can_multiply_on_hopper, is_mxfp4, multiply_on_hopper
from .quantized_pairs import quantized_pair_gemm
from .quantized_rows import can_multiply_pairs
from .quantized_sums import quantized_summed_gemm
from .reference_experts import ExpertOrder, grouped_gemm_ref
from .routed_experts import takes_shared_expert
from .weighted_sum import weighted_sum

_MOST_MEAN_ROWS = 64
"""Of an expert; with more, dequantizing all weights before a GEMM of many rows takes less time."""

_FEW_PROGRAMS = 4 * 132
"""Up to which each needs more codes in flight to keep an H200's memory busy."""


@triton.jit
def _quantized_experts_kernel(
    x,
    words,
    scales,
    factors,
    pairs,
    starts,
    out,
    x_stride,
    DIVISOR: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BITS: tl.constexpr,
    LENGTH: tl.constexpr,
    GRID_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute and store TILE rows times WIDTH outputs of an expert. Long because of its arguments."""
    await_inputs(OVERLAPS)
    IS_GATED: tl.constexpr = ACTIVATION == "gated_silu"
    OF_EXPERT: tl.constexpr = (2 if IS_GATED else 1) * OUTPUTS
    NUM_OUTPUTS: tl.constexpr = WIDTH // 2 if IS_GATED else WIDTH  # of a tile, which has their gates too
    expert, first, last = tile_of(starts, tl.program_id(1), NUM_EXPERTS, EXPERTS, TILE)
    if first >= last:
        return
    row, first_output = first + tl.arange(0, TILE), tl.program_id(0) * NUM_OUTPUTS
    is_row = row < last
    # Rows of x are tokens, or pairs in the order of experts.
    source = tl.load(pairs + row, mask=is_row, other=0) // DIVISOR if DIVISOR > 0 else row
    weight = tl.arange(0, WIDTH)
    weight = weight // NUM_OUTPUTS * OUTPUTS + tl.minimum(first_output + weight % NUM_OUTPUTS, OUTPUTS - 1)
    weight += expert * OF_EXPERT
    IS_UNIFORM: tl.constexpr = not IS_GATED and BLOCK_ROWS % WIDTH == 0
    if BITS == 4:
        total = sum_nvfp4_inputs(
            x, words, scales, weight, source, is_row, x_stride, 0, LENGTH, LENGTH, RUN, TILE, WIDTH, DEPTH
        )
    else:
        total = sum_inputs(
            x, words, scales, weight, expert * OF_EXPERT + first_output if IS_UNIFORM else weight, source, is_row,
            x_stride, 0, LENGTH, LENGTH, GRID_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS, RUN, TILE, WIDTH, DEPTH, False,
        )  # fmt: skip
    if HAS_FACTORS:
        total *= tl.load(factors + weight)[:, None]
    if ACTIVATION == "squared_relu":
        total = tl.maximum(total, 0, propagate_nan=tl.PropagateNan.ALL)
        total = total * total
    if IS_GATED:
        gate, other = tl.split(tl.permute(tl.reshape(total, [2, NUM_OUTPUTS, TILE]), [1, 2, 0]))
        total = gate / (1 + tl.exp(-gate)) * other
    output = first_output + tl.arange(0, NUM_OUTPUTS)
    pointers = out + row.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=is_row[None, :] & (output < OUTPUTS)[:, None])


def can_multiply_quantized(x: Tensor, num_pairs: int, *weights: QuantizedMatrix | Tensor) -> bool:
    """Return True if `quantized_grouped_gemm` launches a kernel for these weights, and is the fastest."""
    return (
        launches_kernel(x)
        and x.dtype is torch.bfloat16
        and all(isinstance(weight, QuantizedMatrix) and _has_kernel(x, weight, num_pairs) for weight in weights)
        and (num_pairs <= _MOST_MEAN_ROWS * weights[0].shape[0] or _takes_long_tiles(x, num_pairs, *weights))  # type: ignore[arg-type]
    )


def _takes_long_tiles(x: Tensor, num_pairs: int, *weights: QuantizedMatrix) -> bool:
    """Return True if `coded_gemm_hopper` multiplies rows by these weights, the first of which may be gated."""
    mean_rows = num_pairs / weights[0].shape[0]
    return mean_rows > _MOST_MEAN_ROWS and all(
        weight.code_bits == 4
        and weight.factors is not None
        and fits_long_tiles(x, weight.shape, mean_rows, is_gathered=True, is_gated=True)
        and loads_boxes_on(x)
        for weight in weights
    )


def _has_kernel(x: Tensor, weight: QuantizedMatrix, num_pairs: int) -> bool:
    if is_mxfp4(weight):
        return can_multiply_on_hopper(x, weight, num_pairs, "gated_silu")  # the activation that demands most
    return has_kernel(weight) and weight.shape[1] % weight.block_rows == 0


def quantized_grouped_gemm(
    x: Tensor,
    weight: QuantizedMatrix,
    order: ExpertOrder,
    *,
    top_k: int | None = None,
    activation: Activation = "none",
    follows_first: bool = False,
) -> Tensor:
    """Return the activated GEMM of rows with their experts' weights; see `grouped_gemm`. Long because of its kernel.

    Args:
        follows_first: True if the previous launch is the layer's first GEMM with the same order.

    Raises:
        ValueError: If the kernel does not compute these tensors.

    Reference: `quantized_grouped_gemm_ref`. CUDA-graph safe: no host sync; one launch, and one that both
    GEMMs of an order share.
    """
    if not launches_kernel(x):
        return quantized_grouped_gemm_ref(x, weight, order, top_k=top_k, activation=activation)
    num_experts, rows, columns = weight.shape
    if (
        not _has_kernel(x, weight, len(order.pairs))
        or x.dtype is not torch.bfloat16
        or x.shape[1:] != (columns,)
        or x.stride(1) != 1
    ):
        raise ValueError(
            f"need bf16 rows of {columns} inputs and FP8 experts in whole blocks, found {tuple(x.shape)} {x.dtype} and "
            f"{weight.code_bits}-bit experts {weight.shape} in blocks of {weight.block_rows} rows"
        )
    num_rows, outputs = len(order.pairs), rows // (2 if activation == "gated_silu" else 1)
    out = torch.empty(num_rows, outputs, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if _takes_long_tiles(x, num_rows, weight):
        multiply_codes_on_hopper(x, weight, order, out, top_k=top_k, activation=activation)
        return out
    if can_multiply_on_hopper(x, weight, num_rows, activation):
        multiply_on_hopper(x, weight, order, out, top_k=top_k, activation=activation, follows_first=follows_first)
        return out
    tile, width, words = _tile_sizes(weight, num_rows / num_experts)
    num_tiles, most_tiles = triton.cdiv(rows, width), min(num_rows, num_experts + num_rows // tile)
    _quantized_experts_kernel[(num_tiles, most_tiles)](
        x=x,
        words=weight.words,
        scales=x if weight.scales is None else scales_of_kernel(weight),
        factors=x if weight.factors is None else weight.factors,
        pairs=order.pairs,
        starts=order.starts,
        out=out,
        x_stride=x.stride(0),
        DIVISOR=top_k or 0,
        OUTPUTS=outputs,
        BITS=weight.code_bits,
        LENGTH=weight.words.shape[2],
        GRID_COLUMNS=0 if weight.scales is None else weight.scales.shape[2],
        BLOCK_ROWS=weight.block_rows,
        BLOCK_COLUMNS=weight.block_columns,
        RUN=RUN,
        HAS_FACTORS=weight.factors is not None,
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        ACTIVATION=activation,
        TILE=tile,
        WIDTH=width,
        DEPTH=words,
        num_warps=4,
        num_stages=8 if tile == 16 and num_tiles * most_tiles < _FEW_PROGRAMS else 4,
        enable_fp_fusion=True,
        **overlapping(x.device),
    )
    return out


def _tile_sizes(weight: QuantizedMatrix, mean_rows: float) -> tuple[int, int, int]:
    """Return rows, outputs and words of a tile."""
    words = words_of_tile(weight)
    return (16, 64, words) if mean_rows <= 16 else (32, 128, words) if mean_rows <= 32 else (64, 128, words)


def quantized_grouped_gemm_ref(
    x: Tensor, weight: QuantizedMatrix, order: ExpertOrder, *, top_k: int | None = None, activation: Activation = "none"
) -> Tensor:
    """Torch twin of `quantized_grouped_gemm`."""
    return grouped_gemm_ref(
        x.double(), weight.dequantized(torch.float64), order, top_k=top_k, activation=activation
    ).to(x.dtype)


class QuantizedSharedExpert(NamedTuple):
    """Quantized weights of the shared expert's two GEMMs, with shapes as in `SharedExpert`."""

    first: QuantizedMatrix
    second: QuantizedMatrix


def takes_quantized_shared(
    x: Tensor, first: QuantizedMatrix, second: QuantizedMatrix, shared: QuantizedSharedExpert
) -> bool:
    """Return True if `routed_quantized_experts` should also compute the shared expert; see `takes_shared_expert`."""
    return (
        takes_shared_expert(x)
        and _takes_pairs(x, first, second)
        and can_multiply_pairs(first, shared.first)
        and can_multiply_pairs(second, shared.second)
    )


def _takes_pairs(x: Tensor, first: QuantizedMatrix, second: QuantizedMatrix) -> bool:
    """Return True if each pair of a token and an expert is computed alone: for few tokens, with FP8 weights."""
    return len(x) <= FEW_TOKENS and launches_kernel(x) and can_multiply_pairs(first) and can_multiply_pairs(second)


def routed_quantized_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: QuantizedMatrix,
    second: QuantizedMatrix,
    activation: Activation,
    *,
    apart: Callable[[Tensor], Tensor] | None = None,
    first_expert: int = 0,
    addend: Callable[[], Tensor] | None = None,
    shared: QuantizedSharedExpert | None = None,
    overlapped: OverlappedExpert | None = None,
) -> Tensor:
    """Return the weighted sum of each token's experts on this rank; see `routed_experts`.

    CUDA-graph safe: no host sync; two launches for few tokens with FP8 weights, else four.

    Args:
        shared: Weights of the shared expert, if `takes_quantized_shared`.
    """
    if overlapped is not None:
        overlapped.launch(after_queued=False)
    if _takes_pairs(x, first, second):
        first_shared, second_shared = (None, None) if shared is None else shared
        inner, inner_shared = quantized_pair_gemm(
            x, first, ids, first_shared, activation=activation, first_expert=first_expert
        )
        return quantized_summed_gemm(
            inner if apart is None else apart(inner),
            second,
            ids,
            weights,
            None if addend is None else addend(),
            shared_rows=None if shared is None else inner_shared,
            shared_weight=second_shared,
            first_expert=first_expert,
            follows_pairs=apart is None and addend is None,
        )
    order = order_by_expert(ids, first.shape[0], first_expert)
    inner = quantized_grouped_gemm(x, first, order, top_k=ids.shape[1], activation=activation)
    follows_first = apart is None and can_multiply_on_hopper(x, first, ids.numel(), activation)
    rows = quantized_grouped_gemm(inner if apart is None else apart(inner), second, order, follows_first=follows_first)
    return weighted_sum(rows, order.positions, weights, None if addend is None else addend())
