"""How the scan on Hopper GPUs is split over the device."""

from dataclasses import dataclass, replace

from ...kernels.kernel_launches import num_multiprocessors
from .ssm_inputs import SSMTokens

_CHANNELS = 64  # of a head that four warps scan


@dataclass(frozen=True, slots=True)
class HopperTiling:
    """One way to split the scan; every one gives the same bits.

    Args:
        heads: Heads of a program, 1 or 2; two share their group's tiles of B and C.
        channels: Channels of a head that a program takes, a power of two from 16 on.
        num_stages: Tiles in a program's ring, at least 2.
    """

    heads: int
    channels: int
    num_stages: int

    def within(self, width: int) -> "HopperTiling":
        """Return the tiling for a slice of `width` channels."""
        return replace(self, channels=min(self.channels, width))


def choose_tiling(tokens: SSMTokens, num_rows: int) -> HopperTiling:
    """Return the fastest tiling for `num_rows` rows: few rows must be spread, many share what they read.

    A head of more than 64 channels is split in any case: the tiles and states of two such heads outgrow shared memory.
    """
    num_heads, head_dim = tokens.x.shape[1:]
    num_groups = tokens.B.shape[1]
    multiprocessors = num_multiprocessors(tokens.x.device)
    num_parts = num_rows * num_heads * (head_dim // _CHANNELS)  # narrower slices have fewer
    if num_parts >= 2 * multiprocessors and num_heads // num_groups % 2 == 0:
        return HopperTiling(heads=2, channels=_CHANNELS, num_stages=2)
    if 2 * num_parts <= multiprocessors:
        return HopperTiling(heads=1, channels=_CHANNELS // 2, num_stages=3)
    return HopperTiling(heads=1, channels=_CHANNELS, num_stages=3)
