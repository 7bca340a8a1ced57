"""Slot numbers on their way to the device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def sent_to(device: torch.device, *lists: Sequence[int]) -> Tensor:
    """Return lists of slot numbers, all of one length, [lists, n] int32 on a device."""
    return torch.tensor([list(numbers) for numbers in lists], dtype=torch.int32).to(device)
