"""Align copy: keep the state at the block boundary that a verify step's accepted tokens reached.

The device decides. For each row, with running = computed + scheduled - drafts,

    aligned = (running + max(accepted, 1) - 1) // block_size * block_size
    copy iff aligned >= running and aligned > 0;  shift = aligned - running

The SSM state of column state_column + shift goes to the row's target slot, and so does the conv window of column
state_column, from input `shift` on, whose last inputs may lie beside the row's ring.

Layout: see `slot_tiles` and `window_tiles`. Grid: the programs that stay resident. Each decides all rows, numbers
those that move bytes, and takes every n-th of their tiles, all layers and both state types: one row spreads over the
whole device, and a step that moves nothing costs one decision. Graph safe: no host sync, one launch, grid fixed at
capture.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.kernel_launches import launches_kernel
from .align_rows import AlignRows
from .draft_inputs import DraftInputs, check_draft_inputs
from .prefill_rows import PAD_SLOT
from .reference_align import align_copy_ref
from .slot_tiles import CopyTiling, copy_tiles, cut_slots, next_turn, numbered, of_number
from .window_tiles import copy_windows, cut_windows

__all__ = ["ROWS_AT_A_TIME", "TILING", "AlignRows", "align_copy", "align_copy_ref"]

TILING = CopyTiling(tile_len=4096, num_warps=16, programs_per_sm=1)
ROWS_AT_A_TIME = 256
"""Rows that a program decides at once; more rows take several rounds."""
_PAD = tl.constexpr(PAD_SLOT)


class RowsToDecide(NamedTuple):
    """A kernel's view of `AlignRows`, and of where their windows go on: the rings, None if in their slots."""

    computed: Tensor
    scheduled: Tensor
    drafts: Tensor
    accepted: Tensor
    columns: Tensor
    state_columns: Tensor
    targets: Tensor
    rings: Tensor | None
    accepted_stride: int
    columns_stride: int
    num_columns: int


@triton.jit
def decide(rows, first_row, num_rows, block_size, ROWS: tl.constexpr):
    """Decide ROWS rows: whether each keeps a state, and whether its target is another place than its source.

    Then SSM source << 32 | conv source, target << 32 | shift, and the ring.
    """
    row = first_row + tl.arange(0, ROWS)
    exists = row < num_rows
    computed = tl.load(rows.computed + row, mask=exists, other=0)
    scheduled = tl.load(rows.scheduled + row, mask=exists, other=0)
    drafts = tl.load(rows.drafts + row, mask=exists, other=0)
    target = tl.load(rows.targets + row, mask=exists, other=_PAD)
    running = computed + scheduled - drafts
    # Most rows are far from a boundary, however many drafts they accept: nothing more is read for those.
    is_near = (target != _PAD) & ((running + block_size - 1) // block_size * block_size - running < rows.num_columns)
    accepted = tl.load(rows.accepted + row * rows.accepted_stride, mask=is_near, other=1).to(tl.int32)
    state_column = tl.load(rows.state_columns + row, mask=is_near, other=0)

    aligned = (running + tl.maximum(accepted, 1) - 1) // block_size * block_size
    shift = aligned - running
    # A padded row's counts may be stale: its columns are the bound.
    reached = is_near & (shift >= 0) & (aligned > 0) & (state_column + shift < rows.num_columns)

    column = rows.columns + row * rows.columns_stride + state_column
    conv_source = tl.load(column, mask=reached, other=_PAD)
    ssm_source = tl.load(column + shift, mask=reached, other=_PAD)
    is_real = (conv_source != _PAD) & (ssm_source != _PAD)
    is_elsewhere = (shift > 0) | (conv_source != target)
    sources, destinations = (ssm_source.to(tl.int64) << 32) | conv_source, (target.to(tl.int64) << 32) | shift
    rings = tl.zeros_like(sources)
    if rows.rings is not None:
        rings += tl.load(rows.rings + row, mask=reached, other=0)
    return reached & is_real, is_elsewhere, sources, destinations, rings


@triton.jit(do_not_specialize=["num_rows", "block_size"])
def _align_copy_kernel(
    rows,
    conv,
    behind,
    ssm,
    num_rows,
    block_size,
    ROWS: tl.constexpr,
    LAYERS: tl.constexpr,
    CONV_TIMES: tl.constexpr,
    CONV_LENGTH: tl.constexpr,
    CONV_LANES: tl.constexpr,
    CONV_WIDTH: tl.constexpr,
    SSM_LENGTH: tl.constexpr,
    SSM_LANES: tl.constexpr,
    SSM_WIDTH: tl.constexpr,
):
    CONV_TILES: tl.constexpr = LAYERS * ((CONV_LENGTH + CONV_WIDTH - 1) // CONV_WIDTH)
    SSM_TILES: tl.constexpr = LAYERS * ((SSM_LENGTH + SSM_WIDTH - 1) // SSM_WIDTH)
    turn = tl.program_id(0)
    for first_row in range(0, num_rows, ROWS):
        keeps, is_elsewhere, sources, destinations, rings = decide(rows, first_row, num_rows, block_size, ROWS)
        moves = keeps & is_elsewhere
        num_moves = tl.sum(moves.to(tl.int32), axis=0)
        if num_moves > 0:
            numbers = numbered(moves)
            for number in range(1, num_moves + 1):
                source = of_number(sources, numbers, number)
                destination = of_number(destinations, numbers, number)
                ssm_source = source >> 32
                conv_source = source & 0x7FFFFFFF
                target = destination >> 32
                shift = destination & 0x7FFFFFFF
                if ssm_source != target:
                    copy_tiles(ssm, ssm, ssm_source, target, turn, LAYERS, SSM_LENGTH, SSM_LANES, SSM_WIDTH)
                turn = next_turn(turn, SSM_TILES)
                ring = of_number(rings, numbers, number)
                copy_windows(
                    conv, conv, behind, conv_source, target, shift, ring, turn,
                    LAYERS, CONV_TIMES, CONV_LENGTH, CONV_LANES, CONV_WIDTH,
                )  # fmt: skip
                turn = next_turn(turn, CONV_TILES)


def align_copy(
    conv_pool: Tensor,
    ssm_pool: Tensor,
    rows: AlignRows,
    block_size: int,
    window_len: int,
    tiling: CopyTiling = TILING,
    *,
    drafts: DraftInputs | None = None,
) -> None:
    """Copy each row's state at the block boundary that its accepted tokens reached into its target, in place.

    A row that reaches no boundary, has no target or is padded copies nothing, whatever its counts. The target may be
    one of the row's own columns, a source included. Every other slot, the target's window from window_len on, and
    bytes between the states of a strided pool stay as they are.

    Args:
        conv_pool: [layers, slots, window, conv_dim], oldest input first; channels contiguous. window >= window_len +
            the largest shift, or window_len if `drafts` are given.
        ssm_pool: [layers, slots, heads, d_state, head_dim]; a slot's state contiguous. Without heads, only conv windows
            are copied.
        window_len: conv inputs that a cached state keeps, at least 1.
        drafts: Where the rows' windows go on from input window_len on, all layers; None: in their slots.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `align_copy_ref`. CUDA-graph safe: no host sync, one launch, grid fixed at capture.
    """
    check_pools(conv_pool, ssm_pool, block_size, window_len)
    check_rows(rows, conv_pool.device)
    if drafts is not None:
        check_draft_inputs(drafts, conv_pool, rows.targets.shape[0])
    if 0 in (rows.targets.shape[0], conv_pool.numel()):
        return
    if not launches_kernel(conv_pool):
        align_copy_ref(conv_pool, ssm_pool, rows, block_size, window_len, drafts)
        return
    _launch(conv_pool, ssm_pool, rows, block_size, window_len, tiling, drafts)


def _launch(
    conv_pool: Tensor,
    ssm_pool: Tensor,
    rows: AlignRows,
    block_size: int,
    window_len: int,
    tiling: CopyTiling,
    drafts: DraftInputs | None,
) -> None:
    windows = conv_pool[:, :, :window_len]
    conv = cut_windows(windows, windows, drafts, tiling)
    ssm = cut_slots(ssm_pool.flatten(2)[:, :, None], tiling)
    _align_copy_kernel[(tiling.num_programs(conv_pool.device),)](
        rows=rows_to_decide(rows, drafts),
        conv=conv.sources.states,
        behind=conv.behind,
        ssm=ssm.states,
        num_rows=rows.targets.shape[0],
        block_size=block_size,
        ROWS=ROWS_AT_A_TIME,
        LAYERS=conv_pool.shape[0],
        **conv.sizes,
        SSM_LENGTH=ssm.length,
        SSM_LANES=ssm.lanes,
        SSM_WIDTH=ssm.width,
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
    )


def rows_to_decide(rows: AlignRows, drafts: DraftInputs | None) -> RowsToDecide:
    """Return a kernel's view of the rows."""
    return RowsToDecide(
        rows.computed,
        rows.scheduled,
        rows.drafts,
        rows.accepted,
        rows.columns,
        rows.state_columns,
        rows.targets,
        None if drafts is None else drafts.rings,
        accepted_stride=rows.accepted.stride(0),
        columns_stride=rows.columns.stride(0),
        num_columns=rows.columns.shape[1],
    )


def check_pools(conv_pool: Tensor, ssm_pool: Tensor, block_size: int, window_len: int) -> None:
    """Raise a ValueError unless an align copy can read the pools."""
    if conv_pool.dim() != 4 or ssm_pool.dim() != 5 or conv_pool.shape[:2] != ssm_pool.shape[:2]:
        raise ValueError(
            "need conv_pool [layers, slots, window, conv_dim] and ssm_pool [layers, slots, heads, d_state, head_dim] "
            f"of equal layers and slots, found {tuple(conv_pool.shape)} and {tuple(ssm_pool.shape)}"
        )
    if conv_pool.device != ssm_pool.device:
        raise ValueError(f"need both pools on one device, found {conv_pool.device} and {ssm_pool.device}")
    if not conv_pool[:1, :1, :1].is_contiguous() or not ssm_pool[:1, :1].is_contiguous():
        raise ValueError(
            "need contiguous channels in conv_pool and contiguous states in ssm_pool, "
            f"found strides {conv_pool.stride()} and {ssm_pool.stride()}"
        )
    if block_size < 1 or not 1 <= window_len <= conv_pool.shape[2]:
        raise ValueError(
            f"need block_size >= 1 and window_len from 1 to the pool's window {conv_pool.shape[2]}, "
            f"found {block_size} and {window_len}"
        )


def check_rows(rows: AlignRows, device: torch.device) -> None:
    """Raise a ValueError unless the tensors of `rows` fit together and are on `device`."""
    vectors = {
        name: getattr(rows, name)
        for name in ("computed", "scheduled", "drafts", "accepted", "state_columns", "targets")
    }
    num_rows = rows.targets.shape[0]
    for name, values in (vectors | {"columns": rows.columns}).items():
        dtypes = (torch.int32, torch.int64) if name == "accepted" else (torch.int32,)
        if values.dtype not in dtypes or values.device != device:
            raise ValueError(f"need {name} of {dtypes} on {device}, found {values.dtype} on {values.device}")
        if values.dim() != (2 if name == "columns" else 1) or values.shape[0] != num_rows:
            raise ValueError(f"need {name} for {num_rows} rows, found {tuple(values.shape)}")
        if name != "accepted" and values.shape[-1] > 1 and values.stride(-1) != 1:
            raise ValueError(f"need contiguous {name}, found strides {values.stride()}")
