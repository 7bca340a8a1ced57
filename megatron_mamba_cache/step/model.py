"""The model as a step needs it."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Address:
    """Address and layout of a tensor, as a captured kernel knows them."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class WeightAddresses:
    """Addresses of all parameters and buffers of a model, by name; tied ones under each of their names."""

    addresses: dict[str, _Address]

    @classmethod
    def of(cls, model: Any) -> Self:
        """Read the addresses from the model, without waiting for the device."""
        tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        return cls(
            {
                name: _Address(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
                for name, tensor in tensors
            }
        )

    def first_change(self, now: Self) -> str | None:
        """Return which weight is the first that has moved or changed its form; None if none has."""
        before, after = self.addresses, now.addresses
        for name in [*before, *(name for name in after if name not in before)]:
            if name not in after:
                return f"{name} is gone"
            if name not in before:
                return f"{name} is new"
            if before[name] != after[name]:
                is_moved = before[name].shape == after[name].shape and before[name].dtype == after[name].dtype
                return f"{name} has moved" if is_moved else f"{name} has another shape or dtype"
        return None


class StepModel(Protocol):
    """A model, or one pipeline stage of it, that reads from its context the step that the runner shows."""

    def compute_step(self) -> Tensor:
        """Return the last stage's logits, [1, n, vocab]; on another, the hidden states [tokens, 1, hidden] it sent."""

    def compute_part(self) -> Tensor:
        """Do as `compute_step`, without transfers from and to other stages: `receive` and `send` make them."""

    def receive(self, num_tokens: int) -> None:
        """Write the previous stage's hidden states to where `compute_part` reads; do nothing on the first stage."""

    def send(self, output: Tensor) -> None:
        """Send what `compute_part` returned to the next stage; do nothing on the last one."""

    def logits_of(self, hidden_states: Tensor) -> Tensor:
        """Return the logits, [n, vocab], of the last layer's outputs, [n, hidden]; on the last stage only."""

    def resuming_exchanges(self) -> AbstractContextManager[bool]:
        """Let a forward in the block skip the expert exchanges that a failed one made; yield whether there are any."""

    def weight_addresses(self) -> WeightAddresses:
        """Return where the weights are now, without waiting for the device."""

    def tables_read(self) -> AbstractContextManager[list[Tensor]]:
        """Keep alive the tensors other than weights that forwards in the block read."""
