"""First GEMM of an MoE layer for few tokens: multiply each token by the weights of all of its experts.

The shared expert may be included. Grid: first one program per token and output tile of the shared expert, then one per
(token, expert) pair and output tile, in token order. A token's result does not depend on other tokens. Accumulation is
in fp32. Safe in CUDA graphs: no host sync, no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import Activation
from ..kernel_launches import is_computed_in_fp32, launches_kernel
from ..overlap import await_then_release, overlapping
from .reference_experts import pair_gemm_ref

FEW_TOKENS = 4
"""Maximum number of tokens for which these kernels beat grouped GEMMs; see `benchmarks/results/experts.md`."""

_WIDEST = 4096
"""Maximum number of inputs per tile."""


def tile_width(x: Tensor) -> int:
    """Return the number of inputs per tile."""
    return min(_WIDEST, triton.next_power_of_2(x.shape[1]))


def check_few(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    rows_of_token: int,
    shared_weight: Tensor | None,
    shared_x: Tensor | None = None,
) -> None:
    """Raise `ValueError` if `pair_gemm` or `summed_gemm` does not support the shapes, dtypes or strides.

    Args:
        x: [tokens * rows_of_token, inputs].
        rows_of_token: Number of rows of `x` per token: 1, or one per expert.
        shared_x: Input of the shared expert; None: `x`.
    """
    if weight.dim() != 3 or ids.dim() != 2 or x.shape != (ids.shape[0] * rows_of_token, weight.shape[2]):
        raise ValueError(
            f"weight must have shape [experts, outputs, inputs], ids [tokens, top_k] and x [{rows_of_token} * tokens, "
            f"inputs], found weight {tuple(weight.shape)}, ids {tuple(ids.shape)} and x {tuple(x.shape)}"
        )
    if x.dtype != weight.dtype or ids.dtype != torch.int32 or not x.device == weight.device == ids.device:
        raise ValueError(
            "x and weight must have the same dtype, ids must be int32, and all must be on the same device; found x "
            f"{x.dtype} on {x.device}, weight {weight.dtype} on {weight.device}, ids {ids.dtype} on {ids.device}"
        )
    if not weight.is_contiguous() or not ids.is_contiguous() or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(
            "weight, ids and rows of x must be contiguous; found strides "
            f"weight {weight.stride()}, ids {ids.stride()}, x {x.stride()}"
        )
    if shared_weight is None:
        return
    given = x if shared_x is None else shared_x
    if shared_weight.shape[1:] != given.shape[1:] or len(given) != len(ids) * (
        rows_of_token if shared_x is None else 1
    ):
        raise ValueError(
            "the shared expert's weight must have shape [outputs, inputs], and its input one row [inputs] per token; "
            f"found weight {tuple(shared_weight.shape)} and input {tuple(given.shape)} for {len(ids)} tokens"
        )
    if not shared_weight.dtype == given.dtype == x.dtype or not (
        shared_weight.is_contiguous() and given.is_contiguous()
    ):
        raise ValueError(
            f"weight and input of the shared expert must be contiguous {x.dtype}, found weight {shared_weight.dtype} "
            f"with strides {shared_weight.stride()} and input {given.dtype} with strides {given.stride()}"
        )


_ROWS = 4
"""Number of rows of weights per program."""


@triton.jit
def _activated_gemm(
    vector, weights, other_weights,
    INPUTS: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, AWAITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of weights by a vector and apply the activation; return [ROWS].

    If AWAITS, wait for the previous kernel after the first weights are loaded.

    Args:
        weights: [ROWS, 1] pointers to rows of weights; for `gated_silu`, to the rows for the gates.
        other_weights: For `gated_silu`, [ROWS, 1] pointers to the rows of the gated weights.
    """
    element = tl.arange(0, WIDTH)
    inside = element < INPUTS
    weight = tl.load(weights + element[None, :], mask=inside[None, :], other=0)
    other = weight
    if ACTIVATION == "gated_silu":
        other = tl.load(other_weights + element[None, :], mask=inside[None, :], other=0)
    if AWAITS:
        await_then_release(OVERLAPS)
    given = tl.load(vector + element, mask=inside, other=0).to(tl.float32)[None, :]
    products, others = weight.to(tl.float32) * given, other.to(tl.float32) * given
    for begin in tl.static_range(WIDTH, INPUTS, WIDTH):
        inside = begin + element < INPUTS
        weight = tl.load(weights + begin + element[None, :], mask=inside[None, :], other=0)
        given = tl.load(vector + begin + element, mask=inside, other=0).to(tl.float32)[None, :]
        products += weight.to(tl.float32) * given
        if ACTIVATION == "gated_silu":
            other = tl.load(other_weights + begin + element[None, :], mask=inside[None, :], other=0)
            others += other.to(tl.float32) * given
    total = tl.sum(products, axis=1)
    if ACTIVATION == "squared_relu":
        total = tl.maximum(total, 0, propagate_nan=tl.PropagateNan.ALL)
        total = total * total
    if ACTIVATION == "gated_silu":
        total = total / (1 + tl.exp(-total)) * tl.sum(others, axis=1)
    return total


@triton.jit(do_not_specialize=["num_tokens", "first_expert"])
def _pairs_kernel(
    x, weight, shared_weight, ids, out, shared_out, x_stride, num_tokens, first_expert,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SHARED: tl.constexpr,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS outputs of the shared expert, or of one routed expert, for one token."""
    HALVES: tl.constexpr = 2 if ACTIVATION == "gated_silu" else 1
    TILES: tl.constexpr = (OUTPUTS + ROWS - 1) // ROWS
    SHARED_TILES: tl.constexpr = (SHARED + ROWS - 1) // ROWS
    program = tl.program_id(0)
    if program < num_tokens * SHARED_TILES:
        # Routing does not affect the shared expert, so its weights are loaded while routing still runs.
        token = (program // max(SHARED_TILES, 1)).to(tl.int64)
        row = program % max(SHARED_TILES, 1) * ROWS + tl.arange(0, ROWS)
        weights = shared_weight + tl.minimum(row, SHARED - 1).to(tl.int64)[:, None] * INPUTS
        total = _activated_gemm(
            x + token * x_stride, weights, weights + SHARED * INPUTS, INPUTS, ACTIVATION, ROWS, WIDTH, True, OVERLAPS
        )
        tl.store(shared_out + token * SHARED + row, total.to(out.dtype.element_ty), mask=row < SHARED)
    else:
        await_then_release(OVERLAPS)
        program -= num_tokens * SHARED_TILES
        pair = (program // TILES).to(tl.int64)
        expert = tl.load(ids + pair).to(tl.int64) - first_expert
        if (expert >= 0) & (expert < NUM_EXPERTS):
            row = program % TILES * ROWS + tl.arange(0, ROWS)
            weights = weight + expert * (HALVES * OUTPUTS * INPUTS) + tl.minimum(row, OUTPUTS - 1)[:, None] * INPUTS
            total = _activated_gemm(
                x + pair // TOP_K * x_stride,
                weights,
                weights + OUTPUTS * INPUTS,
                INPUTS,
                ACTIVATION,
                ROWS,
                WIDTH,
                False,
                OVERLAPS,
            )
            tl.store(out + pair * OUTPUTS + row, total.to(out.dtype.element_ty), mask=row < OUTPUTS)


def pair_gemm(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    shared_weight: Tensor | None = None,
    *,
    activation: Activation = "none",
    first_expert: int = 0,
) -> tuple[Tensor, Tensor]:
    """Multiply each token by the weights of each of its experts and of the shared expert; apply the activation.

    The function is long because all of its arguments are documented.

    Args:
        x: [tokens, inputs]; inputs contiguous.
        weight: [experts, outputs, inputs], contiguous; for `gated_silu` [experts, 2 * outputs, inputs], gates first.
        ids: [tokens, top_k] int32, contiguous: the experts of each token.
        shared_weight: [shared outputs, inputs], contiguous, or twice as many rows for `gated_silu`; None: no shared
            expert.
        activation: As in `grouped_gemm`.
        first_expert: Global index of the first expert on this rank.

    Returns:
        Two tensors in the dtype of `x`: [tokens * top_k, outputs], where rows for experts on other ranks are undefined,
        and [tokens, shared outputs] for the shared expert; shared outputs is 0 if there is none.

    Raises:
        ValueError: If shapes, dtypes or strides disagree.

    Reference: `pair_gemm_ref`. CUDA-graph safe: no host sync, one launch.
    """
    check_few(x, weight, ids, 1, shared_weight)
    if not launches_kernel(x) or not is_computed_in_fp32(x):
        return pair_gemm_ref(x, weight, ids, shared_weight, activation=activation, first_expert=first_expert)
    halves, num_tokens = 2 if activation == "gated_silu" else 1, len(x)
    outputs, shared = weight.shape[1] // halves, 0 if shared_weight is None else len(shared_weight) // halves
    out = torch.empty(ids.numel(), outputs, dtype=x.dtype, device=x.device)
    shared_out = torch.empty(num_tokens, shared, dtype=x.dtype, device=x.device)
    rows = _ROWS // halves
    num_programs = num_tokens * triton.cdiv(shared, rows) + ids.numel() * triton.cdiv(outputs, rows)
    if num_programs == 0:
        return out, shared_out
    _pairs_kernel[(num_programs,)](
        x=x,
        weight=weight,
        shared_weight=weight if shared_weight is None else shared_weight,
        ids=ids,
        out=out,
        shared_out=shared_out,
        x_stride=x.stride(0),
        num_tokens=num_tokens,
        first_expert=first_expert,
        TOP_K=ids.shape[1],
        NUM_EXPERTS=weight.shape[0],
        INPUTS=x.shape[1],
        OUTPUTS=outputs,
        SHARED=shared,
        ACTIVATION=activation,
        ROWS=rows,
        WIDTH=tile_width(x),
        num_warps=4,
        enable_fp_fusion=True,
        **overlapping(x.device),
    )
    return out, shared_out
