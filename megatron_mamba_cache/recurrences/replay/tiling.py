"""The choice of the kernel that folds states, and the tiles of Gluon kernels."""

import torch
from torch import Tensor

from ...kernels.kernel_launches import INTERPRETED, has_tested_gluon, is_hopper

FOLDED_ROWS = 256
"""Requests of boundary folds read at once; more take several rounds."""
_LARGEST_TILE = 128 * 32
"""Elements of a state that one warp holds in registers."""


def runs_gluon(pool: Tensor) -> bool:
    """Return True if Gluon kernels run on a pool's device."""
    return pool.is_cuda and has_gluon(pool.device)


def folds_by_mma(ssm_pools: Tensor, inputs: torch.dtype) -> bool:
    """Return True if a pool's states are folded by mma; `inputs` is the dtype of the rings' x and B."""
    fits = hopper_width(ssm_pools.shape[-1], ssm_pools.shape[-2]) is not None
    return fits and inputs == torch.bfloat16 and runs_gluon(ssm_pools)


def has_gluon(device: torch.device) -> bool:
    """Return True if Gluon kernels run on a device."""
    return not INTERPRETED and is_hopper(device) and has_tested_gluon()


def hopper_width(head_dim: int, d_state: int) -> int | None:
    """Return the most columns of a head that a warp keeps in registers; None if no Gluon kernel takes the head."""
    widths = [width for width in (64, 32, 16) if head_dim % width == 0 and width * d_state <= _LARGEST_TILE]
    return widths[0] if widths and d_state >= 16 and d_state & (d_state - 1) == 0 else None
