"""Interface through which engine steps call the model."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Address:
    """Address and layout of a tensor that a captured graph reads."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Return the address and layout of a tensor."""
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


@dataclass(frozen=True, slots=True)
class WeightAddresses:
    """Addresses of all parameters and buffers of a model by name; tied weights appear under each name."""

    addresses: dict[str, _Address]

    @classmethod
    def of(cls, model: Any, head: Any = None) -> Self:
        """Return the current weight addresses of a model and its head, without waiting for the device."""
        found: dict[str, _Address] = {}
        for prefix, module in (("", model), ("mtp.", head)):
            if module is not None:
                named = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
                found |= {f"{prefix}{name}": _Address.of(tensor) for name, tensor in chain(*named)}
        return cls(found)

    def first_change(self, now: Self) -> str | None:
        """Return a message about the first weight whose address or layout differs in `now`; None if all are equal."""
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
    """Model or pipeline stage that computes the runner's current step, whose inputs it reads from the context."""

    def compute_step(self) -> Tensor:
        """Run the forward pass; return logits, [1, n, vocab], or hidden states to send on, [tokens, 1, hidden]."""

    def compute_part(self) -> Tensor:
        """Run the forward pass without transfers between stages; call `receive` before it and `send` after it."""

    def receive(self, num_tokens: int) -> None:
        """Receive the previous stage's hidden states as input for `compute_part`; do nothing on the first stage."""

    def send(self, output: Tensor) -> None:
        """Send the output of `compute_part` to the next stage; do nothing on the last stage."""

    def logits_of(self, hidden_states: Tensor) -> Tensor:
        """Return the logits, [n, vocab], for last-layer outputs, [n, hidden]. Call this only on the last stage."""

    def resuming_exchanges(self) -> AbstractContextManager[bool]:
        """Context manager that skips exchanges made by the failed forward pass; yields True if there are any."""

    def weight_addresses(self) -> WeightAddresses:
        """Return the current addresses of the weights, without waiting for the device."""

    def tables_read(self) -> AbstractContextManager[list[Tensor]]:
        """Context manager that collects the non-weight tensors read by forward passes in its body."""
