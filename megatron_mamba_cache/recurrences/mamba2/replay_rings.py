"""The rings of replayed states: the scan inputs of each running request's tokens that its checkpoint does not hold.

Beside a ring lie the conv inputs of its request's drafts, so that a slot takes the same bytes with any number of them.
"""

from dataclasses import dataclass

import torch

from ..cached_form import StoredStates
from .replay_drafts import ReplayStorage
from .replay_rows import ReplayRing

_STEP_VALUES = 2  # dt, and dt * A


@dataclass(frozen=True, slots=True)
class RingLayout:
    """One request's ring over the Mamba layers of this rank.

    Args:
        capacity, x_capacity: Positions of a ring, and of x in it; see `least_capacity`.
        dtype: That of the convolution's outputs.
        conv_dim, conv_dtype: Of the convolution's inputs.
        num_drafts: The most drafts of a step.
    """

    num_layers: int
    capacity: int
    x_capacity: int
    heads: int
    head_dim: int
    groups: int
    d_state: int
    dtype: torch.dtype
    conv_dim: int
    conv_dtype: torch.dtype
    num_drafts: int

    @property
    def steps_dtype(self) -> torch.dtype:
        """The dtype of time steps: float32, or float64 where the model is."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def num_bytes(self) -> int:
        """Bytes of a ring and its drafts' conv inputs over all layers."""
        of_x = self.x_capacity * self.heads * self.head_dim * self.dtype.itemsize
        keys = self.groups * self.d_state * self.dtype.itemsize
        steps = _STEP_VALUES * self.heads * self.steps_dtype.itemsize
        of_drafts = self.num_drafts * self.conv_dim * self.conv_dtype.itemsize
        return self.num_layers * (of_x + self.capacity * (keys + steps) + of_drafts)

    def zeros(self, num_rings: int, device: torch.device | int | str) -> ReplayRing:
        """Return rings [layers, rings, capacity, ...], all zero."""
        lead, of_x = (self.num_layers, num_rings, self.capacity), (self.num_layers, num_rings, self.x_capacity)
        return ReplayRing(
            x=torch.zeros((*of_x, self.heads, self.head_dim), dtype=self.dtype, device=device),
            B=torch.zeros((*lead, self.groups, self.d_state), dtype=self.dtype, device=device),
            steps=torch.zeros((*lead, _STEP_VALUES, self.heads), dtype=self.steps_dtype, device=device),
        )

    def draft_inputs(self, num_rings: int, device: torch.device | int | str) -> torch.Tensor | None:
        """Return the inputs of `DraftInputs`, [layers, rings, drafts, conv_dim], all zero; None without drafts."""
        shape = (self.num_layers, num_rings, self.num_drafts, self.conv_dim)
        return torch.zeros(shape, dtype=self.conv_dtype, device=device) if self.num_drafts else None

    def storage(self, live: StoredStates, num_requests: int, fold_len: int) -> ReplayStorage:
        """Return draft states with rings for so many requests, all zero."""
        device = live.device
        return ReplayStorage(
            live, self.zeros(num_requests, device), fold_len, self.draft_inputs(num_requests, device)
        )
