"""Interface of the model for engine steps."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Address:
    """Address and layout of a tensor in a captured graph."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class WeightAddresses:
    """Addresses of all parameters and buffers of a model by name; tied weights appear under each name."""

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
        """Return the name of the first weight whose address or layout has changed; None if none has."""
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
    """Model, or one pipeline stage, that computes the step which the runner exposes through its context."""

    def compute_step(self) -> Tensor:
        """Return the last stage's logits, [1, n, vocab]; on another, the hidden states [tokens, 1, hidden] it sent."""

    def compute_part(self) -> Tensor:
        """Compute as `compute_step`, without transfers between stages, which `receive` and `send` make."""

    def receive(self, num_tokens: int) -> None:
        """Receive the previous stage's hidden states as input of `compute_part`; do nothing on the first stage."""

    def send(self, output: Tensor) -> None:
        """Send the output of `compute_part` to the next stage; do nothing on the last stage."""

    def logits_of(self, hidden_states: Tensor) -> Tensor:
        """Return the logits, [n, vocab], of last-layer outputs, [n, hidden]; only on the last stage."""

    def resuming_exchanges(self) -> AbstractContextManager[bool]:
        """Context manager: skip expert exchanges that a failed forward pass has made; yield whether there are any."""

    def weight_addresses(self) -> WeightAddresses:
        """Return the current addresses of the weights, without waiting for the device."""

    def tables_read(self) -> AbstractContextManager[list[Tensor]]:
        """Context manager: collect the tensors other than weights that forward passes in its body read."""
