"""Helpers shared by the torch twins of kernels; no host sync.

A masked write must not branch on device values, nor index with a mask (its size is data). So padded entries are
redirected to the first valid one, slot and value: duplicates that write equal bytes.
"""

import torch
from torch import Tensor


def redirect_padding(valid: Tensor) -> Tensor:
    """Map each entry of `valid` [n] bool to itself, or to the first valid entry if it is padding; [n] int64."""
    entries = torch.arange(valid.shape[0], device=valid.device)
    return torch.where(valid, entries, valid.to(torch.int32).argmax())


def along_first_dim(mask: Tensor, like: Tensor) -> Tensor:
    """Reshape `mask` [n] to broadcast over the trailing dimensions of `like` [n, ...]."""
    return mask.reshape(-1, *[1] * (like.dim() - 1))


def compute_dtype(inputs: Tensor) -> torch.dtype:
    """Return the dtype that reference ops compute in: float64 for float64 inputs, float32 otherwise."""
    return torch.float64 if inputs.dtype == torch.float64 else torch.float32
