"""Convolution inputs of drafts, stored in a buffer per running request instead of in its slot."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .batches import check_vectors


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Buffers for the last inputs of conv windows; the slots hold only the first `window_len` inputs.

    Input `window_len` + i of a request's window is input i of its buffer. The size of a slot therefore does not depend
    on the number of drafts, and only running requests need memory for drafts.

    Args:
        inputs: [buffers, drafts, channels] in the dtype of the windows, channels contiguous. If the windows have a
            leading dimension for layers, `inputs` has it too.
        buffers: [requests] int32, distinct; index of each request's buffer, ignored for padding.
    """

    inputs: Tensor
    buffers: Tensor


class KernelDraftInputs(NamedTuple):
    """The `DraftInputs` of one layer as kernel arguments."""

    pool: Tensor
    buffers: Tensor
    ring_stride: int
    time_stride: int


def kernel_draft_inputs(drafts: DraftInputs | None) -> KernelDraftInputs | None:
    """Convert the draft inputs of one layer to kernel arguments; None if slots hold whole windows."""
    return None if drafts is None else KernelDraftInputs(drafts.inputs, drafts.buffers, *drafts.inputs.stride()[:2])


def check_draft_inputs(drafts: DraftInputs, windows: Tensor, num_rows: int) -> None:
    """Raise a `ValueError` unless `drafts` matches `windows`, both with or both without layers."""
    check_vectors({"buffers": (drafts.buffers, num_rows)}, windows.device)
    inputs, lead = drafts.inputs, windows.shape[:-3]
    fits = inputs.dim() == windows.dim() and (inputs.shape[:-3], inputs.shape[-1]) == (lead, windows.shape[-1])
    if not fits or inputs.dtype != windows.dtype or inputs.device != windows.device:
        raise ValueError(
            f"draft inputs must be {windows.dtype} {(*lead, 'buffers', 'drafts', windows.shape[-1])} on "
            f"{windows.device}, found {inputs.dtype} {tuple(inputs.shape)} on {inputs.device}"
        )
    if inputs.numel() and inputs.stride(-1) != 1:
        raise ValueError(f"channels of draft inputs must be contiguous, found strides {inputs.stride()}")


def windows_with_drafts(windows: Tensor, drafts: DraftInputs | None, exists: Tensor) -> Tensor:
    """Return the windows with the inputs in the requests' buffers appended.

    Args:
        windows: [requests, inputs, channels], or [layers, requests, inputs, channels].
        exists: [requests] bool; where it is False, the result is arbitrary.
    """
    if drafts is None:
        return windows
    tail = drafts.inputs.index_select(-3, torch.where(exists, drafts.buffers, 0).to(torch.int64))
    return torch.cat([windows, tail], dim=-2)
