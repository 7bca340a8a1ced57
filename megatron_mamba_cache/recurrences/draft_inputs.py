"""Inputs of a step's drafts that are in a buffer of their row, not in the row's slot."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .batches import check_vectors


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Where the windows of rows continue whose slots hold the first `window_len` inputs only.

    Input `window_len` + i of a row's window is its buffer's i-th here. So a slot takes the same bytes with any number
    of drafts, and only running requests have room for those of theirs.

    Args:
        inputs: [buffers, drafts, channels], of the window's dtype, channels contiguous; with the layers as first
            dimension where the window has them.
        buffers: [rows] int32; each row's buffer. Those of different rows are distinct; padded rows' are not read.
    """

    inputs: Tensor
    buffers: Tensor


class KernelDraftInputs(NamedTuple):
    """A kernel's view of `DraftInputs` of one layer."""

    pool: Tensor
    buffers: Tensor
    ring_stride: int
    time_stride: int


def kernel_draft_inputs(drafts: DraftInputs | None) -> KernelDraftInputs | None:
    """Return what a kernel of one layer reads and writes; None if slots hold whole windows."""
    return None if drafts is None else KernelDraftInputs(drafts.inputs, drafts.buffers, *drafts.inputs.stride()[:2])


def check_draft_inputs(drafts: DraftInputs, windows: Tensor, num_rows: int) -> None:
    """Raise a ValueError unless `drafts` goes on where `windows` end, with or without layers."""
    check_vectors({"buffers": (drafts.buffers, num_rows)}, windows.device)
    inputs, lead = drafts.inputs, windows.shape[:-3]
    fits = inputs.dim() == windows.dim() and (inputs.shape[:-3], inputs.shape[-1]) == (lead, windows.shape[-1])
    if not fits or inputs.dtype != windows.dtype or inputs.device != windows.device:
        raise ValueError(
            f"need draft inputs (*{tuple(lead)}, buffers, drafts, {windows.shape[-1]}) of {windows.dtype} on "
            f"{windows.device}, found {tuple(inputs.shape)} of {inputs.dtype} on {inputs.device}"
        )
    if inputs.numel() and inputs.stride(-1) != 1:
        raise ValueError(f"need contiguous channels of draft inputs, found strides {inputs.stride()}")


def windows_with_drafts(windows: Tensor, drafts: DraftInputs | None, exists: Tensor) -> Tensor:
    """Return windows with what is in their rows' buffers.

    Args:
        windows: [rows, inputs, channels] or [layers, rows, ...].
        exists: [rows]; of the others anything may be returned.
    """
    if drafts is None:
        return windows
    behind = drafts.inputs.index_select(-3, torch.where(exists, drafts.buffers, 0).to(torch.int64))
    return torch.cat([windows, behind], dim=-2)
