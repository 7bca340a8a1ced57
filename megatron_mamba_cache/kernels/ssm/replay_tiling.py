"""How the states of a replayed step are split over programs, and by which kernel."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..kernel_launches import INTERPRETED, is_hopper
from .hopper_tiling import has_tested_gluon
from .ssm_inputs import SSMTokens

_LARGEST_TILE = 128 * 32
"""Elements of a state that one warp holds in registers."""
_ALIGNMENT = 16  # bytes of a load


@dataclass(frozen=True, slots=True)
class ReplayTiling:
    """How states are split over programs; the choice may change only the order of the sums of an output.

    Args:
        kernel: "hopper" takes heads of whole tiles, and states of a power of two; "portable" takes all.
        width: columns of head_dim of a program, a power of two.
        num_warps: warps of a program.
        max_registers: registers of a thread, which bound the programs that fit on a multiprocessor.
        programs_per_sm: programs launched for each multiprocessor where each takes several tiles.
    """

    kernel: Literal["hopper", "portable"]
    width: int
    num_warps: int
    max_registers: int
    programs_per_sm: int = 1


PORTABLE = ReplayTiling("portable", width=64, num_warps=4, max_registers=128)


def choose_tiling(tokens: SSMTokens, ssm_pool: Tensor) -> ReplayTiling:
    """Return the fastest tiling for these shapes and this device; nothing of it depends on rows or tokens."""
    head_dim, d_state = tokens.x.shape[2], tokens.B.shape[2]
    is_computed_there = ssm_pool.is_cuda and not INTERPRETED and is_hopper(ssm_pool.device) and has_tested_gluon()
    if not is_computed_there or d_state & (d_state - 1) or ssm_pool.stride(0) * ssm_pool.element_size() % _ALIGNMENT:
        return PORTABLE
    width = hopper_width(head_dim, d_state)
    return PORTABLE if width is None else ReplayTiling("hopper", width, num_warps=1, max_registers=255)


def hopper_width(head_dim: int, d_state: int) -> int | None:
    """Return the most columns that a warp of the Hopper kernel takes of a head; None if it cannot take the head."""
    widths = [width for width in (64, 32, 16) if head_dim % width == 0 and width * d_state <= _LARGEST_TILE]
    return widths[0] if widths and d_state >= 16 else None
