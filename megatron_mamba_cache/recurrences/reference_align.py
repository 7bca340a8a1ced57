"""References of the align copy, into the same pools and into rounded places; torch only, without a host sync."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.reference import redirect_padding
from .align_rows import AlignRows
from .draft_inputs import DraftInputs, windows_with_drafts
from .prefill_rows import PAD_SLOT
from .reference_rounding import store_rounded_ref
from .reference_slots import store_slots


class _Decided(NamedTuple):
    """[rows] each: whether a row keeps a state, and where that is; 0 in rows that keep none."""

    keeps: Tensor
    conv_source: Tensor
    ssm_source: Tensor
    shift: Tensor


def align_copy_ref(
    conv_pool: Tensor,
    ssm_pool: Tensor,
    rows: AlignRows,
    block_size: int,
    window_len: int,
    drafts: DraftInputs | None = None,
) -> None:
    """Copy each row's state at the block boundary that its accepted tokens reached, in place; see `align_copy`.

    Every source is read before any write.
    """
    if rows.targets.shape[0] == 0:
        return
    decided = _decide(rows, block_size)
    windows = _windows(conv_pool, decided, window_len, drafts)
    # A row that copies nothing repeats the first one that copies; if none does, slot 0 gets its own content.
    redirect = redirect_padding(decided.keeps)
    ssm_source, target = (
        torch.where(decided.keeps, values, 0).index_select(0, redirect).to(torch.int64)
        for values in (decided.ssm_source, rows.targets)
    )
    windows, states = windows.index_select(1, redirect), ssm_pool.index_select(1, ssm_source)
    conv_pool[:, :, :window_len].index_copy_(1, target, windows)
    ssm_pool.index_copy_(1, target, states)


def rounded_align_copy_ref(
    conv_pool: Tensor,
    ssm_pool: Tensor,
    rows: AlignRows,
    block_size: int,
    window_len: int,
    ends: Tensor,
    values: Tensor,
    scales: Tensor,
    drafts: DraftInputs | None = None,
) -> None:
    """Round each row's state at the block boundary that its accepted tokens reached, in place.

    Args:
        values, scales: Those of `RoundedStates`; see `rounded_align_copy`.
    """
    if rows.targets.shape[0] == 0:
        return
    decided = _decide(rows, block_size)
    targets = torch.where(decided.keeps, rows.targets, PAD_SLOT)
    windows = _windows(conv_pool, decided, window_len, drafts)
    states = ssm_pool.index_select(1, decided.ssm_source.to(torch.int64))
    for layer in range(ssm_pool.shape[0]):
        store_slots(ends[layer], targets, windows[layer])
        if states.numel():
            store_rounded_ref(values[layer], scales[layer], targets, states[layer])


def _decide(rows: AlignRows, block_size: int) -> _Decided:
    running = rows.computed + rows.scheduled - rows.drafts
    accepted = rows.accepted.to(torch.int32).clamp_min(1)
    aligned = (running + accepted - 1).div(block_size, rounding_mode="floor") * block_size
    # A padded row's counts may be stale: its columns are the bound.
    in_window = rows.state_columns + aligned - running < rows.columns.shape[1]
    reached = (aligned >= running) & (aligned > 0) & (rows.targets != PAD_SLOT) & in_window

    shift = torch.where(reached, aligned - running, 0)
    column = torch.where(reached, rows.state_columns, 0)
    conv_source, ssm_source = _slots_at(rows.columns, column), _slots_at(rows.columns, column + shift)
    keeps = reached & (conv_source != PAD_SLOT) & (ssm_source != PAD_SLOT)
    return _Decided(keeps, *(torch.where(keeps, values, 0) for values in (conv_source, ssm_source, shift)))


def _windows(conv_pool: Tensor, decided: _Decided, window_len: int, drafts: DraftInputs | None) -> Tensor:
    """Return windows [layers, rows, window_len, conv_dim]; those in slot 0 of rows that keep none."""
    pool = conv_pool if drafts is None else conv_pool[:, :, :window_len]
    stored = windows_with_drafts(pool.index_select(1, decided.conv_source.to(torch.int64)), drafts, decided.keeps)
    times = decided.shift[:, None] + torch.arange(window_len, device=decided.shift.device)  # [rows, window_len]
    return stored.gather(2, times[None, :, :, None].to(torch.int64).expand(stored.shape[0], -1, -1, stored.shape[3]))


def _slots_at(columns: Tensor, column: Tensor) -> Tensor:
    return columns.gather(1, column[:, None].to(torch.int64))[:, 0]
