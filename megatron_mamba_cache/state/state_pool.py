"""The one pool of Mamba states: live, reserved and cached slots are rows of the same tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.reference import copy_slots_ref, zero_slots_ref
from .layout import StateLayout


@dataclass(frozen=True, slots=True)
class LayerStates:
    """One layer's view of the pool."""

    conv: Tensor  # [slots, window, conv_dim]
    ssm: Tensor  # [slots, heads, d_state, head_dim]


class StatePool:
    """Conv windows and SSM states of all slots and layers, at fixed addresses for the pool's life."""

    def __init__(self, layout: StateLayout, num_slots: int, device: torch.device | int | str) -> None:
        self.layout = layout
        self.num_slots = num_slots
        lead = (layout.num_layers, num_slots)
        self.conv = torch.zeros(lead + layout.conv_shape, dtype=layout.conv_dtype, device=device)
        self.ssm = torch.zeros(lead + layout.ssm_shape, dtype=layout.ssm_dtype, device=device)

    def layer(self, index: int) -> LayerStates:
        """Return the states of Mamba layer `index` (counted over this rank's Mamba layers)."""
        return LayerStates(self.conv[index], self.ssm[index])

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Copy whole slots, all layers and state types, in place.

        Args:
            src, dst: [n] int32 slot numbers on the pool's device; see `copy_slots_ref`.
        """
        copy_slots_ref((self.conv, self.ssm), src, dst)

    def settle(self, live: int, column: int, offset: int, window_len: int) -> None:
        """Make slot `live`, column 0 of a draft window, the state that another column holds, all layers, in place.

        Args:
            column: Slot with the SSM state.
            offset: Where its conv window of `window_len` inputs begins among those in slot `live`.
        """
        self.ssm[:, live].copy_(self.ssm[:, column])
        self.conv[:, live, :window_len].copy_(self.conv[:, live, offset : offset + window_len].clone())

    def zero(self, slots: Tensor) -> None:
        """Zero whole slots, all layers and state types, in place."""
        zero_slots_ref((self.conv, self.ssm), slots)
