"""The addresses of a model's weights: captured graphs read them there, whatever the modules point to later."""

from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Place:
    """What a captured kernel knows of a tensor."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class WeightPlaces:
    """Places of all parameters and buffers of a model, by name; tied ones under each of their names."""

    places: dict[str, _Place]

    @classmethod
    def of(cls, model: Any) -> Self:
        """Read the places from the model, without waiting for the device."""
        tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        return cls({name: _place_of(tensor) for name, tensor in tensors})

    def first_change(self, now: Self) -> str | None:
        """Return which weight is the first that has moved or changed its form; None if none has."""
        before, after = self.places, now.places
        for name in [*before, *(name for name in after if name not in before)]:
            if name not in after:
                return f"{name} is gone"
            if name not in before:
                return f"{name} is new"
            if before[name] != after[name]:
                is_moved = before[name].shape == after[name].shape and before[name].dtype == after[name].dtype
                return f"{name} has moved" if is_moved else f"{name} has another shape or dtype"
        return None


def _place_of(tensor: Tensor) -> _Place:
    return _Place(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
