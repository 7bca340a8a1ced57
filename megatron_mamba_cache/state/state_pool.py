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

    def zero(self, slots: Tensor) -> None:
        """Zero whole slots, all layers and state types, in place."""
        zero_slots_ref((self.conv, self.ssm), slots)
