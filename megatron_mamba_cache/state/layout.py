"""Shapes and sizes of one slot of the state pool."""

import math
from dataclasses import dataclass

import torch

from .slab_shape import aligned


@dataclass(frozen=True, slots=True)
class StateLayout:
    """One slot: the conv window and the SSM state of every Mamba layer of this rank.

    Args:
        num_layers: Mamba layers of this rank.
        conv_shape: (window, conv_dim), time-major, window >= d_conv - 1, oldest input first.
        ssm_shape: (heads, d_state, head_dim).
        conv_dtype, ssm_dtype: Each state type has its own.
    """

    num_layers: int
    conv_shape: tuple[int, ...]
    ssm_shape: tuple[int, ...]
    conv_dtype: torch.dtype
    ssm_dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers and state types."""
        conv = math.prod(self.conv_shape) * self.conv_dtype.itemsize
        ssm = math.prod(self.ssm_shape) * self.ssm_dtype.itemsize
        return self.num_layers * (conv + ssm)

    @property
    def conv_bytes(self) -> int:
        """Bytes from one layer's conv window of a slot to the next layer's, where a slot's bytes lie together."""
        return aligned(math.prod(self.conv_shape) * self.conv_dtype.itemsize)

    @property
    def ssm_bytes(self) -> int:
        """Bytes from one layer's SSM state of a slot to the next layer's, likewise."""
        return aligned(math.prod(self.ssm_shape) * self.ssm_dtype.itemsize)

    @property
    def aligned_bytes(self) -> int:
        """Bytes of a slot whose layers lie together: all conv windows, then all SSM states."""
        return self.num_layers * (self.conv_bytes + self.ssm_bytes)

    def num_slots_in(self, budget_gb: float, num_live: int, num_drafts: int = 0) -> int:
        """Return a pool's number of slots: those the budget buys for cached and draft states, and `num_live` live ones.

        Raises:
            ValueError: If the budget buys no cached state, or fewer slots than one request's drafts take; the message
                gives the smallest sufficient budget.
        """
        bought, needed = int(budget_gb * 2**30) // self.slot_bytes, max(1, num_drafts)
        if bought < needed:
            least = math.ceil(needed * self.slot_bytes / 2**30 * 1e6) / 1e6
            use = f"{num_drafts} draft states take" if num_drafts > 1 else "one cached state takes"
            remedy = "a smaller --num-speculative-tokens" if num_drafts > 1 else "--no-prefix-caching"
            raise ValueError(
                f"prefix_caching_mamba_gb is {budget_gb:g} GiB and {use} {needed * self.slot_bytes} bytes: set "
                f"--inference-dynamic-batching-prefix-caching-mamba-gb to {least:f} or more, or {remedy}"
            )
        return bought + num_live
