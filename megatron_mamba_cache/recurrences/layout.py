"""Shapes and sizes of one slot of the state pool."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from .slab_shape import aligned

_SCALE = torch.float32


@dataclass(frozen=True, slots=True)
class SlotPart:
    """What a slot holds of one layer, of one kind.

    Args:
        shape: Of one layer.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one layer."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def aligned_bytes(self) -> int:
        """Bytes from one layer's to the next layer's, where a slot's bytes lie together."""
        return aligned(self.num_bytes)


class SlotLayout(ABC):
    """One slot over the Mamba layers of this rank.

    Attributes:
        num_layers: Mamba layers of this rank.
    """

    num_layers: int

    @property
    @abstractmethod
    def parts(self) -> tuple[SlotPart, ...]:
        """What a slot holds; where its bytes lie together, all layers of the first part come first."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers and parts."""
        return self.num_layers * sum(part.num_bytes for part in self.parts)

    @property
    def aligned_bytes(self) -> int:
        """Bytes of a slot whose layers lie together."""
        return self.num_layers * sum(part.aligned_bytes for part in self.parts)

    def num_slots_in(self, budget_gb: float, num_live: int, num_drafts: int = 0, *, beside_bytes: int = 0) -> int:
        """Return a pool's number of slots: those the budget buys for cached and draft states, and `num_live` live ones.

        Args:
            beside_bytes: What else the budget pays: draft states where they have places of their own.

        Raises:
            ValueError: If the budget buys no cached state, or fewer slots than one request's drafts take; the message
                gives the smallest sufficient budget.
        """
        bought = (int(budget_gb * 2**30) - beside_bytes) // self.slot_bytes
        needed = max(1, num_drafts)
        if bought < needed:
            needed_bytes = needed * self.slot_bytes + beside_bytes
            least = math.ceil(needed_bytes / 2**30 * 1e6) / 1e6
            use = f"{num_drafts} draft states take" if num_drafts > 1 else "one cached state takes"
            remedy = "a smaller --num-speculative-tokens" if num_drafts > 1 else "--no-prefix-caching"
            if beside_bytes:
                use = "the draft states of max_requests requests and one cached state take"
                remedy = "--draft-states replay"
            raise ValueError(
                f"prefix_caching_mamba_gb is {budget_gb:g} GiB and {use} {needed_bytes} bytes: set "
                f"--inference-dynamic-batching-prefix-caching-mamba-gb to {least:f} or more, or {remedy}"
            )
        return bought + num_live


@dataclass(frozen=True, slots=True)
class StateLayout(SlotLayout):
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
    def parts(self) -> tuple[SlotPart, ...]:
        """The conv window and the SSM state."""
        return SlotPart(self.conv_shape, self.conv_dtype), SlotPart(self.ssm_shape, self.ssm_dtype)


@dataclass(frozen=True, slots=True)
class RoundedLayout(SlotLayout):
    """One place of a cached state that is rounded to 8 bits; see `RoundedStates`.

    Args:
        num_layers: Mamba layers of this rank.
        conv_shape: (d_conv - 1, conv_dim), time-major, oldest input first.
        ssm_shape: (heads, d_state, head_dim).
        conv_dtype: Conv windows are not rounded.
    """

    num_layers: int
    conv_shape: tuple[int, ...]
    ssm_shape: tuple[int, int, int]
    conv_dtype: torch.dtype

    @property
    def parts(self) -> tuple[SlotPart, ...]:
        """The conv window, the values of the SSM state and their scales."""
        heads, _, head_dim = self.ssm_shape
        scales = SlotPart((heads, head_dim), _SCALE)
        return SlotPart(self.conv_shape, self.conv_dtype), SlotPart(self.ssm_shape, torch.int8), scales
