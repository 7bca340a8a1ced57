"""Decide on the device which rows of a verify step reached a block boundary, and what is folded for them.

With running = computed + scheduled - drafts,

    end = (running + max(accepted, 1) - 1) // block_size * block_size;  reached iff end >= running and end > 0

A step folds its checkpoint up to the last multiple of the ring length that it finds computed, so what is left to fold
for the boundary begins there. Layout and grid: a program decides ROWS rows. Graph safe: no host sync, one launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.kernel_launches import launches_kernel
from ..align_rows import AlignRows
from ..prefill_rows import PAD_SLOT
from .replay_rows import BoundaryFolds, ReplayRows

_ROWS = 256
_LANES = 4  # int32 in 16 bytes
_PAD = tl.constexpr(PAD_SLOT)


@triton.jit(do_not_specialize=["plan_stride", "num_rows", "block_size", "ring_len", "accepted_stride"])
def _plan_kernel(
    plan,
    plan_stride,
    computed,
    scheduled,
    drafts,
    accepted,
    accepted_stride,
    targets,
    slots,
    folded,
    num_rows,
    block_size,
    ring_len,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    start = tl.load(computed + row, mask=exists, other=0)
    running = start + tl.load(scheduled + row, mask=exists, other=0) - tl.load(drafts + row, mask=exists, other=0)
    kept = tl.maximum(tl.load(accepted + row * accepted_stride, mask=exists, other=1).to(tl.int32), 1)
    end = (running + kept - 1) // block_size * block_size
    target = tl.load(targets + row, mask=exists, other=_PAD)
    slot = tl.load(slots + row, mask=exists, other=_PAD)
    reached = (target != _PAD) & (slot != _PAD) & (end >= running) & (end > 0)
    first = tl.maximum(tl.load(folded + row, mask=exists, other=0), start // ring_len * ring_len)
    tl.store(plan + row, first, mask=exists)
    tl.store(plan + plan_stride + row, tl.where(reached, end, first), mask=exists)
    tl.store(plan + 2 * plan_stride + row, tl.where(reached, target, _PAD), mask=exists)


def plan_boundary_folds(rows: ReplayRows, align: AlignRows, ring_len: int, block_size: int) -> BoundaryFolds:
    """Return what to fold for the rows of a verify step that reached a boundary; see `fold_boundaries`.

    Args:
        rows: The step's rows, as its states were replayed.
        align: The same rows, with how many tokens each kept; columns are not read.

    Reference: `plan_boundary_folds_ref`. CUDA-graph safe: no host sync, one launch, grid fixed at capture.
    """
    num_rows = rows.slots.shape[0]
    if not launches_kernel(rows.slots) or not num_rows:
        return plan_boundary_folds_ref(rows, align, ring_len, block_size)
    # Lines of whole 16 bytes, so that every number of rows runs the same compiled kernels.
    plan = torch.empty((3, -(-num_rows // _LANES) * _LANES), dtype=torch.int32, device=rows.slots.device)
    _plan_kernel[(triton.cdiv(num_rows, _ROWS),)](
        plan=plan,
        plan_stride=plan.stride(0),
        computed=align.computed,
        scheduled=align.scheduled,
        drafts=align.drafts,
        accepted=align.accepted,
        accepted_stride=align.accepted.stride(0),
        targets=align.targets,
        slots=rows.slots,
        folded=rows.folded,
        num_rows=num_rows,
        block_size=block_size,
        ring_len=ring_len,
        ROWS=_ROWS,
        enable_fp_fusion=True,
    )
    return _folds(rows, plan[:, :num_rows])


def plan_boundary_folds_ref(rows: ReplayRows, align: AlignRows, ring_len: int, block_size: int) -> BoundaryFolds:
    """Do what `plan_boundary_folds` does."""
    running = align.computed + align.scheduled - align.drafts
    end = (running + align.accepted.to(torch.int32).clamp_min(1) - 1) // block_size * block_size
    reached = (align.targets != PAD_SLOT) & (rows.slots != PAD_SLOT) & (end >= running) & (end > 0)
    first = torch.maximum(rows.folded, align.computed // ring_len * ring_len)
    targets = torch.where(reached, align.targets, PAD_SLOT)
    return _folds(rows, torch.stack([first, torch.where(reached, end, first), targets]))


def _folds(rows: ReplayRows, plan: Tensor) -> BoundaryFolds:
    return BoundaryFolds(rows.slots, rows.rings, plan[0], plan[1], plan[2])
