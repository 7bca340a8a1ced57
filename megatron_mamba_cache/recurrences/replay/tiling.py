"""Choose the kernel that folds states, and the tiles of Gluon kernels."""

import torch
from torch import Tensor

from ...kernels.kernel_launches import INTERPRETED, has_tested_gluon, is_hopper

FOLDED_ROWS = 256
"""Number of requests whose targets a fold kernel reads per iteration."""
_LARGEST_TILE = 128 * 32
"""Maximum number of state elements that one warp holds in registers."""


def runs_gluon(pool: Tensor) -> bool:
    """Return True if Gluon kernels run on the pool's device."""
    return pool.is_cuda and has_gluon(pool.device)


def folds_by_mma(pools: Tensor, inputs: torch.dtype) -> bool:
    """Return True if mma instructions fold the states of this pool; `inputs` is the dtype of x and B in the rings."""
    fits = hopper_width(pools.shape[-1], pools.shape[-2]) is not None
    return fits and inputs == torch.bfloat16 and runs_gluon(pools)


def current_device_runs_gluon() -> bool:
    """Return True if the current CUDA device exists and runs Gluon kernels."""
    return torch.cuda.is_available() and has_gluon(torch.device("cuda", torch.cuda.current_device()))


def has_gluon(device: torch.device) -> bool:
    """Return True if Gluon kernels run on this device."""
    return not INTERPRETED and is_hopper(device) and has_tested_gluon()


def hopper_width(head_dim: int, d_state: int) -> int | None:
    """Return the maximum number of columns of a head that a warp keeps in registers.

    Return None if no Gluon kernel supports heads of this shape.
    """
    widths = [width for width in (64, 32, 16) if head_dim % width == 0 and width * d_state <= _LARGEST_TILE]
    return widths[0] if widths and d_state >= 16 and d_state & (d_state - 1) == 0 else None
