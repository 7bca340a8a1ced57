"""The rings of replayed states: the scan inputs of each running request's tokens that its checkpoint does not hold."""

from dataclasses import dataclass

import torch

from ..kernels.ssm.replay_rows import ReplayRing

_STEP_VALUES = 2  # dt, and dt * A


@dataclass(frozen=True, slots=True)
class RingLayout:
    """One request's ring over the Mamba layers of this rank.

    Args:
        capacity: Positions of a ring; see `least_capacity`.
        dtype: That of the convolution's outputs.
    """

    num_layers: int
    capacity: int
    heads: int
    head_dim: int
    groups: int
    d_state: int
    dtype: torch.dtype

    @property
    def steps_dtype(self) -> torch.dtype:
        """The dtype of time steps: float32, or float64 where the model is."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def ring_bytes(self) -> int:
        """Bytes of a ring over all layers."""
        inputs = (self.heads * self.head_dim + self.groups * self.d_state) * self.dtype.itemsize
        steps = _STEP_VALUES * self.heads * self.steps_dtype.itemsize
        return self.num_layers * self.capacity * (inputs + steps)

    def zeros(self, num_rings: int, device: torch.device | int | str) -> ReplayRing:
        """Return rings [layers, rings, capacity, ...], all zero."""
        lead = (self.num_layers, num_rings, self.capacity)
        return ReplayRing(
            x=torch.zeros((*lead, self.heads, self.head_dim), dtype=self.dtype, device=device),
            B=torch.zeros((*lead, self.groups, self.d_state), dtype=self.dtype, device=device),
            steps=torch.zeros((*lead, _STEP_VALUES, self.heads), dtype=self.steps_dtype, device=device),
        )
