"""Reference of the align copy; torch only, without a host sync."""

import torch
from torch import Tensor

from ..prefill_rows import PAD_SLOT
from .align_rows import AlignRows
from .reference_slots import redirect_padding


def align_copy_ref(conv_pool: Tensor, ssm_pool: Tensor, rows: AlignRows, block_size: int, window_len: int) -> None:
    """Copy each row's state at the block boundary that its accepted tokens reached, in place; see `align_copy`.

    Every source is read before any write.
    """
    if rows.targets.shape[0] == 0:
        return
    running = rows.computed + rows.scheduled - rows.drafts
    accepted = rows.accepted.to(torch.int32).clamp_min(1)
    aligned = (running + accepted - 1).div(block_size, rounding_mode="floor") * block_size
    # A padded row's counts may be stale: its columns are the bound.
    in_window = rows.state_columns + aligned - running < rows.columns.shape[1]
    reached = (aligned >= running) & (aligned > 0) & (rows.targets != PAD_SLOT) & in_window

    shift = torch.where(reached, aligned - running, 0)
    column = torch.where(reached, rows.state_columns, 0)
    conv_source, ssm_source = _slots_at(rows.columns, column), _slots_at(rows.columns, column + shift)
    copies = reached & (conv_source != PAD_SLOT) & (ssm_source != PAD_SLOT)

    # A row that copies nothing repeats the first one that copies; if none does, slot 0 gets its own content.
    redirect = redirect_padding(copies)
    conv_source, ssm_source, shift, target = (
        torch.where(copies, values, 0).index_select(0, redirect).to(torch.int64)
        for values in (conv_source, ssm_source, shift, rows.targets)
    )
    times = shift[:, None] + torch.arange(window_len, device=shift.device)  # [rows, window_len]
    windows, states = conv_pool[:, conv_source[:, None], times], ssm_pool.index_select(1, ssm_source)
    conv_pool[:, :, :window_len].index_copy_(1, target, windows)
    ssm_pool.index_copy_(1, target, states)


def _slots_at(columns: Tensor, column: Tensor) -> Tensor:
    return columns.gather(1, column[:, None].to(torch.int64))[:, 0]
