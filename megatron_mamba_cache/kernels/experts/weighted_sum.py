"""Weighted sum over the experts of each token, and sum over ranks.

Layout: one row per (token, expert) pair, sorted by expert. Grid: one program per token and WIDTH outputs; it adds the
token's rows in slot order, so the result is deterministic. Safe in CUDA graphs: no host sync, no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import is_computed_in_fp32, launches_kernel
from ..overlap import await_inputs, overlapping
from .reference_experts import check_weights, sum_of_ranks_ref, weighted_sum_ref


@triton.jit(do_not_specialize=["num_rows"])
def _sum_of_ranks_kernel(
    parts, addend, out, num_rows,
    HAS_ADDEND: tl.constexpr, OUTPUTS: tl.constexpr, RANKS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < OUTPUTS
    total = tl.zeros([WIDTH], tl.float32)
    for rank in range(RANKS):
        row = rank * num_rows + token
        total += tl.load(parts + row * OUTPUTS + column, mask=inside, other=0).to(tl.float32)
    if HAS_ADDEND:
        total += tl.load(addend + token * OUTPUTS + column, mask=inside, other=0).to(tl.float32)
    tl.store(out + token * OUTPUTS + column, total.to(out.dtype.element_ty), mask=inside)


def sum_of_ranks(parts: Tensor, num_tokens: int, addend: Tensor | None = None) -> Tensor:
    """Return the sum over ranks of the first `num_tokens` rows.

    Args:
        parts: [ranks, rows, outputs], contiguous.
        num_tokens: Number of rows to sum; at most `rows`.
        addend: [tokens, outputs], contiguous, added to the sum; None: nothing to add.

    Returns:
        [tokens, outputs] in the dtype of `parts`; summed in fp32.

    Reference: `sum_of_ranks_ref`. CUDA-graph safe: no host sync, one launch.
    """
    if not launches_kernel(parts) or not is_computed_in_fp32(parts):
        return sum_of_ranks_ref(parts, num_tokens, addend)
    num_ranks, num_rows, outputs = parts.shape
    out = torch.empty(num_tokens, outputs, dtype=parts.dtype, device=parts.device)
    if out.numel() == 0:
        return out
    _sum_of_ranks_kernel[(num_tokens, triton.cdiv(outputs, _SUM_WIDTH))](
        parts=parts,
        addend=parts if addend is None else addend,
        out=out,
        num_rows=num_rows,
        HAS_ADDEND=addend is not None,
        OUTPUTS=outputs,
        RANKS=num_ranks,
        WIDTH=_SUM_WIDTH,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out


_SUM_WIDTH = 1024


@triton.jit(do_not_specialize_on_alignment=["weights"])
def _weighted_sum_kernel(
    rows, positions, weights, addend, out,
    HAS_ADDEND: tl.constexpr, OUTPUTS: tl.constexpr, TOP_K: tl.constexpr, NUM_WEIGHTS: tl.constexpr,
    WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < OUTPUTS
    total = tl.zeros([WIDTH], tl.float32)
    for slot in tl.static_range(TOP_K):  # unrolled without branches, so that all loads are issued together
        position = tl.load(positions + token * TOP_K + slot).to(tl.int64)
        weight = tl.where(position >= 0, tl.load(weights + token * NUM_WEIGHTS + slot), 0)
        is_there = tl.where(inside, position, -1) >= 0  # the interpreter rejects `inside & (position >= 0)`
        row = tl.load(rows + tl.maximum(position, 0) * OUTPUTS + column, mask=is_there, other=0)
        total += weight * row.to(tl.float32)
    if HAS_ADDEND:
        added = tl.load(addend + token * OUTPUTS + column, mask=inside, other=0).to(tl.float32)
        if NUM_WEIGHTS > TOP_K:
            added = (added * tl.load(weights + token * NUM_WEIGHTS + TOP_K)).to(out.dtype.element_ty).to(tl.float32)
        total += added
    tl.store(out + token * OUTPUTS + column, total.to(out.dtype.element_ty), mask=inside)


def weighted_sum(rows: Tensor, positions: Tensor, weights: Tensor, addend: Tensor | None = None) -> Tensor:
    """Return the weighted sum over the experts of each token, added in slot order.

    Args:
        rows: [pairs, outputs], contiguous.
        positions: [tokens, top_k] int32: row of each slot; -1: no row.
        weights: [tokens, top_k] float32, contiguous; or [tokens, top_k + 1], whose last column weighs the addend.
        addend: [tokens, outputs], contiguous, added to the sum; rounded after its weight is applied. None: nothing to
            add.

    Returns:
        [tokens, outputs] in the dtype of `rows`; summed in fp32.

    Raises:
        ValueError: If `weights` has another shape or is not contiguous.

    Reference: `weighted_sum_ref`. CUDA-graph safe: no host sync, one launch.
    """
    check_weights(weights, *positions.shape)
    if not launches_kernel(rows) or not is_computed_in_fp32(rows):
        return weighted_sum_ref(rows, positions, weights, addend)
    (num_tokens, top_k), outputs = positions.shape, rows.shape[1]
    out = torch.empty(num_tokens, outputs, dtype=rows.dtype, device=rows.device)
    if out.numel() == 0:
        return out
    _weighted_sum_kernel[(num_tokens, triton.cdiv(outputs, _SUM_WIDTH))](
        rows=rows,
        positions=positions,
        weights=weights,
        addend=rows if addend is None else addend,
        out=out,
        HAS_ADDEND=addend is not None,
        OUTPUTS=outputs,
        TOP_K=top_k,
        NUM_WEIGHTS=weights.shape[1],
        WIDTH=_SUM_WIDTH,
        num_warps=4,
        enable_fp_fusion=True,
        **overlapping(rows.device),
    )
    return out
