"""The choice of the kernel that replays states of Gated DeltaNet, and its tiling."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...replay.tiling import has_gluon, runs_gluon
from ..inputs import DeltaTokens

LANES = 4
"""Lanes that share a column in sums by Gluon."""
_SUMMED_WIDTH = 32
_SUMMED_KEY_DIMS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class ReplayTiling:
    """How states are split over programs; the kernel, and nothing else, changes the bits of results.

    Args:
        width: Columns of value_dim of a program, a power of two.
        num_warps: Of a program; 1 for "sums".
        max_registers: Of a thread; they bound the programs that fit on a multiprocessor.
        kernel: "portable" takes all tokens; "sums" takes those of bf16 that `choose_tiling` finds to fit.
    """

    width: int
    num_warps: int
    max_registers: int
    kernel: Literal["portable", "sums"] = "portable"


PORTABLE = ReplayTiling(width=32, num_warps=4, max_registers=128)
SUMS = ReplayTiling(_SUMMED_WIDTH, num_warps=1, max_registers=255, kernel="sums")


def choose_tiling(tokens: DeltaTokens, pool: Tensor) -> ReplayTiling:
    """Return the fastest tiling for these tensors and this device; it does not depend on the requests."""
    fits = sums_shape(tokens.k.shape[2], tokens.v.shape[2]) and _is_paired(tokens.q) and _is_paired(tokens.k)
    return SUMS if fits and runs_gluon(pool) else PORTABLE


def _is_paired(keys: Tensor) -> bool:
    """Return True if keys or queries can be read as pairs of bf16 numbers."""
    return keys.dtype == torch.bfloat16 and keys.stride(0) % 2 == 0 and keys.data_ptr() % 4 == 0


def replays_fast(key_dim: int, value_dim: int) -> bool:
    """Return True if a Gluon kernel for the current device replays states of this shape."""
    if not torch.cuda.is_available() or not sums_shape(key_dim, value_dim):
        return False
    return has_gluon(torch.device("cuda", torch.cuda.current_device()))


def sums_shape(key_dim: int, value_dim: int) -> bool:
    """Return True if tiles of the width of sums divide such a state and fit in the registers of a warp."""
    return key_dim in _SUMMED_KEY_DIMS and value_dim % _SUMMED_WIDTH == 0
