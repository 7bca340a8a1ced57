"""Choose the kernel that replays Gated DeltaNet states, and its tiling."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...replay.tiling import current_device_runs_gluon, runs_gluon
from ..inputs import DeltaTokens

LANES = 4
"""Number of lanes that share a column of the state in the "sums" kernel."""
_SUMMED_WIDTH = 32
_SUMMED_KEY_DIMS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class ReplayTiling:
    """Kernel that replays states, and how it splits them.

    Args:
        width: Number of columns of value_dim per program, a power of two.
        num_warps: Number of warps per program; 1 for "sums".
        max_registers: Maximum number of registers per thread, which limits the programs per multiprocessor.
        kernel: "portable" supports all tokens; "sums" those of bf16 for which `choose_tiling` selects it.
    """

    width: int
    num_warps: int
    max_registers: int
    kernel: Literal["portable", "sums"] = "portable"


PORTABLE = ReplayTiling(width=32, num_warps=4, max_registers=128)
SUMS = ReplayTiling(_SUMMED_WIDTH, num_warps=1, max_registers=255, kernel="sums")


def choose_tiling(tokens: DeltaTokens, pool: Tensor) -> ReplayTiling:
    """Return the fastest tiling for these tensors on this device; the choice does not depend on the requests."""
    are_paired = all(_is_paired(values) for values in (tokens.q, tokens.k, tokens.v))
    fits = sums_shape(tokens.k.shape[2], tokens.v.shape[2]) and are_paired
    return SUMS if fits and runs_gluon(pool) else PORTABLE


def _is_paired(values: Tensor) -> bool:
    """Return True if the tensor can be loaded as pairs of bf16 numbers."""
    return values.dtype == torch.bfloat16 and values.stride(0) % 2 == 0 and values.data_ptr() % 4 == 0


def replays_fast(key_dim: int, value_dim: int) -> bool:
    """Return True if the current device has a Gluon kernel that replays states of this shape."""
    return sums_shape(key_dim, value_dim) and current_device_runs_gluon()


def sums_shape(key_dim: int, value_dim: int) -> bool:
    """Return True if the "sums" kernel supports states of this shape."""
    return key_dim in _SUMMED_KEY_DIMS and value_dim % _SUMMED_WIDTH == 0
