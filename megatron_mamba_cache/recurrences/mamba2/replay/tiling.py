"""Choose the kernel that replays states, and its tiling."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...replay.tiling import current_device_runs_gluon, hopper_width, runs_gluon
from ..inputs import SSMTokens

_LARGEST_MULTIPLIED = 128
"""Largest d_state that the "mma" kernel supports."""
_MOST_SUMMED = 3
"""Maximum number of tokens per request for which "sums" is faster than "mma" with float32 states."""


@dataclass(frozen=True, slots=True)
class ReplayTiling:
    """Kernel that replays states, and how it splits them; results depend on it only through the order of summation.

    Args:
        kernel: "portable" supports all shapes. "sums" needs a head_dim divisible by `width`, and a d_state that is
            a power of two; "mma" also needs bf16 tokens.
        width: Number of columns of head_dim per program, a power of two.
        num_warps: Number of warps per program; 1 except for "portable".
        max_registers: Maximum number of registers per thread, which limits the programs per multiprocessor.
    """

    kernel: Literal["portable", "sums", "mma"]
    width: int
    num_warps: int
    max_registers: int


PORTABLE = ReplayTiling("portable", width=64, num_warps=4, max_registers=128)


def choose_tiling(tokens: SSMTokens, ssm_pool: Tensor, max_tokens: int) -> ReplayTiling:
    """Return the tiling that was measured to be fastest for these shapes on this device.

    The time of "sums" grows with the number of tokens per request. That of "mma" is nearly constant, but it must split
    float32 states into bf16 parts. The choice does not depend on the individual requests, so one warmup step per
    `max_tokens` compiles all kernels.
    """
    width = hopper_width(tokens.x.shape[2], tokens.B.shape[2])
    if not runs_gluon(ssm_pool) or width is None:
        return PORTABLE
    fits_products = tokens.B.shape[2] <= _LARGEST_MULTIPLIED and all(
        tensor.dtype == torch.bfloat16 for tensor in (tokens.x, tokens.B, tokens.C)
    )
    splits_states = ssm_pool.dtype != torch.bfloat16
    if not fits_products or (splits_states and max_tokens <= _MOST_SUMMED):
        return ReplayTiling("sums", width, num_warps=1, max_registers=255)
    # Stochastic rounding needs more registers.
    registers = {torch.float16: 200, torch.bfloat16: 168}.get(ssm_pool.dtype, 128)
    return ReplayTiling("mma", width, num_warps=1, max_registers=registers)


def replays_fast(head_dim: int, d_state: int) -> bool:
    """Return True if the current device has a Gluon kernel that replays states of this shape."""
    return hopper_width(head_dim, d_state) is not None and current_device_runs_gluon()
