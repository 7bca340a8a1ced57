"""Helpers for the torch reference implementations of kernels; none of them synchronizes with the host.

A masked write cannot branch on device values, and indexing with a boolean mask would need a host sync to size the
result. So a padded entry writes the value of the first valid entry to the slot of that entry: a harmless duplicate.
"""

import torch
from torch import Tensor


def redirect_padding(valid: Tensor) -> Tensor:
    """Return each entry's own index or, for padding, that of the first valid entry, [n] int64; `valid` is [n] bool."""
    entries = torch.arange(valid.shape[0], device=valid.device)
    return torch.where(valid, entries, valid.to(torch.int32).argmax())


def along_first_dim(mask: Tensor, like: Tensor) -> Tensor:
    """Reshape `mask` [n] to broadcast over the trailing dimensions of `like` [n, ...]."""
    return mask.reshape(-1, *[1] * (like.dim() - 1))


def compute_dtype(inputs: Tensor) -> torch.dtype:
    """Return the dtype in which references compute: float64 for float64 inputs, float32 otherwise."""
    return torch.float64 if inputs.dtype == torch.float64 else torch.float32
