"""Conv inputs of drafted tokens, stored in a buffer of the request instead of its slot."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .batches import check_vectors


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """The rest of windows whose slots hold only the first `window_len` inputs.

    Input `window_len` + i of a request's window is input i of its buffer. So a slot's size does not depend on the
    number of drafts, and only running requests have room for drafts.

    Args:
        inputs: [buffers, drafts, channels], of the window's dtype, channels contiguous; with the layers as first
            dimension if the window has them.
        buffers: [requests] int32; pairwise distinct, and not read for padding requests.
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
    """Return a kernel's view for one layer; None if slots hold whole windows."""
    return None if drafts is None else KernelDraftInputs(drafts.inputs, drafts.buffers, *drafts.inputs.stride()[:2])


def check_draft_inputs(drafts: DraftInputs, windows: Tensor, num_rows: int) -> None:
    """Raise a ValueError unless `drafts` continues `windows`, with or without layers."""
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
    """Return windows with the inputs from their buffers.

    Args:
        windows: [requests, inputs, channels] or [layers, requests, ...].
        exists: [requests]; for the others the result is arbitrary.
    """
    if drafts is None:
        return windows
    tail = drafts.inputs.index_select(-3, torch.where(exists, drafts.buffers, 0).to(torch.int64))
    return torch.cat([windows, tail], dim=-2)
