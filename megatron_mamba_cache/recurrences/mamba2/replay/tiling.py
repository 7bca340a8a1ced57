"""The choice of the kernel that replays states, and its tiling."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...replay.tiling import has_gluon, hopper_width, runs_gluon
from ..inputs import SSMTokens

_LARGEST_MULTIPLIED = 128
"""The largest d_state that an mma keeps in registers."""
_MOST_SUMMED = 3
"""The most tokens of a request for which sums with float32 states are faster than mma."""


@dataclass(frozen=True, slots=True)
class ReplayTiling:
    """How states are split over programs, which changes only the order of the sums of an output.

    Args:
        kernel: "portable" takes all shapes; "sums" takes heads of whole tiles and a d_state that is a power of two, and
            "mma" such heads of bf16 tokens.
        width: Columns of head_dim of a program, a power of two.
        num_warps: Of a program; 1 but for "portable".
        max_registers: Of a thread; they bound the programs that fit on a multiprocessor.
    """

    kernel: Literal["portable", "sums", "mma"]
    width: int
    num_warps: int
    max_registers: int


PORTABLE = ReplayTiling("portable", width=64, num_warps=4, max_registers=128)


def choose_tiling(tokens: SSMTokens, ssm_pool: Tensor, max_tokens: int) -> ReplayTiling:
    """Return the fastest measured tiling for these shapes, this device and so many tokens per request.

    The time of sums grows with every token. That of mma is constant for few, but float32 states must be split. The
    choice does not depend on the requests: a warmup compiles each number of tokens once.
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
    return ReplayTiling("mma", width, num_warps=1, max_registers=128 if splits_states else 168)


def replays_fast(head_dim: int, d_state: int) -> bool:
    """Return True if a Gluon kernel for the current device replays states of this shape."""
    if not torch.cuda.is_available() or hopper_width(head_dim, d_state) is None:
        return False
    return has_gluon(torch.device("cuda", torch.cuda.current_device()))
