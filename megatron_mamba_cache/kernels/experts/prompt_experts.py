"""Routed experts with FP8 weights for prompt tokens, whose activations are quantized to FP8.

Rows are pairs of a token and an expert, sorted by expert. Each is quantized, multiplied by the first weight, activated,
rounded to bf16, quantized again and multiplied by the second weight; its sums have two levels, as in
`quantized/prompt_gemm`. On Hopper, `prompt_gemm_hopper` computes the GEMMs; the portable kernel here computes every
form. Grid: tiles of outputs, and tiles of rows of one expert. A token's bits do not depend on other tokens. Graph safe:
no host sync, no atomics.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import Activation
from ..kernel_launches import INTERPRETED, has_tested_gluon, is_hopper, launches_kernel
from ..overlap import await_inputs, overlapping
from ..quantized.activations import ActivationScheme, QuantizedActivations, quantize_activations
from ..quantized.prompt_gemm import codes_of, has_prompt_gemm, sum_products, values_in_order_of_words
from ..quantized.quantized_matrix import QuantizedMatrix
from ..reference import compute_dtype
from .expert_order import order_by_expert
from .grouped_gemm import tile_of
from .prompt_gemm_hopper import multiply_prompts_on_hopper
from .prompt_pipeline import HALF
from .reference_experts import ExpertOrder, grouped_gemm_ref
from .weighted_sum import weighted_sum

_ROWS, _WEIGHTS, _DEPTH = (128, 128, 128) if not INTERPRETED else (32, 32, 128)


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """Weights of a layer's experts, and the schemes by which their inputs are quantized."""

    first: QuantizedMatrix
    second: QuantizedMatrix
    first_scheme: ActivationScheme
    second_scheme: ActivationScheme


@triton.jit(do_not_specialize=["num_rows"])
def _prompt_experts_kernel(
    codes,
    row_scales,
    words,
    scales,
    factors,
    starts,
    out,
    num_rows,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GRID_ROWS: tl.constexpr,
    GRID_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute TILE rows of an expert times WIDTH rows of its weights. Long because of its arguments."""
    await_inputs(OVERLAPS)
    IS_GATED: tl.constexpr = ACTIVATION == "gated_silu"
    OF_EXPERT: tl.constexpr = (2 if IS_GATED else 1) * OUTPUTS
    NUM_OUTPUTS: tl.constexpr = WIDTH // 2 if IS_GATED else WIDTH  # of a tile, which has their gates too
    expert, first, last = tile_of(starts, tl.program_id(1), NUM_EXPERTS, EXPERTS, TILE)
    if first >= last:
        return
    row, weight = first + tl.arange(0, TILE), tl.arange(0, WIDTH)
    first_output = tl.program_id(0) * NUM_OUTPUTS
    weight = weight // NUM_OUTPUTS * OUTPUTS + tl.minimum(first_output + weight % NUM_OUTPUTS, OUTPUTS - 1)
    own_row, depth = tl.minimum(row, last - 1), tl.arange(0, DEPTH)
    of_rows = codes + own_row.to(tl.int64)[:, None] * COLUMNS + depth[None, :]
    of_weights = words + (expert * OF_EXPERT + weight).to(tl.int64)[:, None] * COLUMNS + depth[None, :]
    total = tl.zeros([TILE, WIDTH], tl.float32)
    for begin in range(0, COLUMNS, DEPTH):
        is_here = (begin + depth < COLUMNS)[None, :]
        found = tl.load(of_rows + begin, mask=is_here, other=0.0)
        weights = tl.load(of_weights + begin, mask=is_here, other=0.0)
        products = sum_products(found, weights)
        if GRID_COLUMNS > 0:
            by_row = tl.load(row_scales + begin // DEPTH * num_rows + own_row)
            block = expert * GRID_ROWS + weight // BLOCK_ROWS
            products *= by_row[:, None] * tl.load(scales + block * GRID_COLUMNS + begin // DEPTH)[None, :]
        total += products
    if GRID_COLUMNS == 0:
        total *= tl.load(row_scales + own_row)[:, None]
    if HAS_FACTORS:
        total *= tl.load(factors + expert * OF_EXPERT + weight)[None, :]
    if ACTIVATION == "squared_relu":
        total = tl.maximum(total, 0, propagate_nan=tl.PropagateNan.ALL)
        total = total * total
    if IS_GATED:
        gate, other = tl.split(tl.permute(tl.reshape(total, [TILE, 2, NUM_OUTPUTS]), [0, 2, 1]))
        total = gate / (1 + tl.exp(-gate)) * other
    output = first_output + tl.arange(0, NUM_OUTPUTS)
    pointers = out + row.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=(row < last)[:, None] & (output < OUTPUTS)[None, :])


def grouped_prompt_gemm(
    x: QuantizedActivations, weight: QuantizedMatrix, order: ExpertOrder, activation: Activation, dtype: torch.dtype
) -> Tensor:
    """Multiply each quantized row by its expert's weights, and apply the activation.

    Long because the kernel's arguments are named one by one.

    Args:
        x: Rows sorted by expert, in groups of the weight's blocks, or in one group if it has none.
        weight: [experts, outputs, columns], FP8; for `gated_silu` [experts, 2 * outputs, columns], gates first.
        dtype: Of the result.

    Returns:
        [pairs, outputs] sorted by expert.

    Raises:
        ValueError: If the weight or the groups do not fit.

    Reference: `grouped_prompt_gemm_ref`. CUDA-graph safe: no host sync.
    """
    num_experts, rows, columns = weight.shape
    group = columns if weight.scales is None else weight.block_columns
    if not has_prompt_gemm(weight) or x.columns != group or x.codes.shape[1] != columns:
        raise ValueError(
            f"need FP8 experts and rows [.., {columns}] in groups of {group}, found {weight.code_bits}-bit codes in "
            f"blocks of {weight.block_columns}, rows {tuple(x.codes.shape)} in groups of {x.columns}"
        )
    if not launches_kernel(x.codes) or dtype is torch.float64:
        return grouped_prompt_gemm_ref(x, weight, order, activation, dtype)
    outputs = rows // (2 if activation == "gated_silu" else 1)
    out = torch.empty(len(order.pairs), outputs, dtype=dtype, device=x.codes.device)
    if out.numel() == 0:
        return out
    if _takes_hopper_kernel(x, weight, out, activation):
        multiply_prompts_on_hopper(x, weight, codes_of(weight), order, out, activation)
        return out
    grid = (0, 0) if weight.scales is None else weight.scales.shape[1:]
    most_tiles = min(len(out), num_experts + len(out) // _ROWS)
    _prompt_experts_kernel[(triton.cdiv(rows, _WEIGHTS), most_tiles)](
        codes=x.codes,
        row_scales=x.scales,
        words=codes_of(weight),
        scales=x.scales if weight.scales is None else weight.scales,
        factors=x.scales if weight.factors is None else weight.factors,
        starts=order.starts,
        out=out,
        num_rows=len(x.codes),
        OUTPUTS=outputs,
        COLUMNS=columns,
        GRID_ROWS=grid[0],
        GRID_COLUMNS=grid[1],
        BLOCK_ROWS=weight.block_rows,
        HAS_FACTORS=weight.factors is not None,
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        ACTIVATION=activation,
        TILE=_ROWS,
        WIDTH=_WEIGHTS,
        DEPTH=_DEPTH if weight.scales is None else weight.block_columns,
        num_warps=8,
        num_stages=4,
        enable_fp_fusion=True,
        **overlapping(out.device),
    )
    return out


def _takes_hopper_kernel(x: QuantizedActivations, weight: QuantizedMatrix, out: Tensor, activation: Activation) -> bool:
    """Return True if `prompt_gemm_hopper` computes the GEMM: bf16 results, and blocks that its tiles do not split."""
    if INTERPRETED or not out.is_cuda or out.dtype is not torch.bfloat16 or not is_hopper(out.device):
        return False
    if weight.scales is not None and (weight.block_columns != 2 * HALF.value or weight.block_rows % HALF.value):
        return False
    is_gated = activation == "gated_silu"
    is_whole = not is_gated or weight.scales is None or out.shape[1] % weight.block_rows == 0
    is_aligned = x.codes.shape[1] % 16 == 0 and weight.words.data_ptr() % 16 == 0
    return is_whole and is_aligned and has_tested_gluon()


def grouped_prompt_gemm_ref(
    x: QuantizedActivations, weight: QuantizedMatrix, order: ExpertOrder, activation: Activation, dtype: torch.dtype
) -> Tensor:
    """Torch twin: products of the values that codes and scales mean, in fp32 or fp64, rounded once to `dtype`."""
    computed = compute_dtype(torch.empty(0, dtype=dtype))
    values = values_in_order_of_words(weight, computed)
    return grouped_gemm_ref(x.dequantized(computed), values, order, activation=activation).to(dtype)


def routed_prompt_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: QuantizedExperts,
    activation: Activation,
    *,
    apart: Callable[[Tensor], Tensor] | None = None,
    first_expert: int = 0,
    addend: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Return the weighted sum of each prompt token's experts on this rank; see `routed_experts`.

    CUDA-graph safe: no host sync.
    """
    order = order_by_expert(ids, experts.first.shape[0], first_expert)
    quantized = quantize_activations(x, experts.first_scheme, order.positions)
    inner = grouped_prompt_gemm(quantized, experts.first, order, activation, x.dtype)
    quantized = quantize_activations(inner if apart is None else apart(inner), experts.second_scheme)
    rows = grouped_prompt_gemm(quantized, experts.second, order, "none", x.dtype)
    return weighted_sum(rows, order.positions, weights, None if addend is None else addend())
