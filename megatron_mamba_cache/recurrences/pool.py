"""The pool of states: all slots are rows of the same tensors, but quantized ones have tensors of their own."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .cached_form import StoredStates
from .interface import DraftStorage, LayerStates, StateGroup
from .layout import SlotLayout, state_tensors
from .window import WindowStorage


class _Place(NamedTuple):
    """Where a recurrent layer's tensors are: indices over all tensors, and the layer inside each."""

    name: str
    tensor: int
    layer: int


class StatePool:
    """State tensors of all slots and layers, at fixed addresses for the pool's life.

    Attributes:
        tensors: A tensor for each tensor of the groups, [layers, slots, ...].
        live: The same, as copies within the pool see them.
        cached: Where cached states are.
        drafts: How states after drafts are kept.
    """

    def __init__(
        self, groups: Sequence[StateGroup], tensors: Sequence[Tensor], cached: Sequence[Tensor] | None = None
    ) -> None:
        """Take tensors over, of which a slot and layer are contiguous; see `layout.py`.

        Args:
            groups: The recurrent layers of this rank.
            cached: The tensors of cached states if those have a form of their own.
        """
        self.groups = tuple(groups)
        self.tensors = tuple(tensors)
        self.live = StoredStates(self.groups, self.tensors, None)
        self.cached = self.live if cached is None else StoredStates(self.groups, self.tensors, cached)
        self._places = _places(self.groups)
        self.drafts: DraftStorage = WindowStorage(self.live)
        self._layers = self._views()

    @staticmethod
    def zeros(groups: Sequence[StateGroup], num_slots: int, device: torch.device | int | str) -> "StatePool":
        """Return a pool with memory of its own, all zero."""
        return StatePool(groups, state_tensors(SlotLayout.of(groups), num_slots, device))

    def keep_drafts_in(self, drafts: DraftStorage) -> None:
        """Keep states after drafts otherwise than in slots."""
        self.drafts = drafts
        self._layers = self._views()

    @property
    def device(self) -> torch.device:
        """Where the pool is."""
        return self.live.device

    def layer(self, index: int) -> LayerStates:
        """Return the states of a recurrent layer, counted over those of this rank."""
        return self._layers[index]

    def tensor(self, name: str, group: int = 0) -> Tensor:
        """Return a tensor of a group by its name, [layers, slots, ...].

        Raises:
            ValueError: If the group has no tensor of this name.
        """
        names = [tensor.name for tensor in self.groups[group].tensors]
        if name not in names:
            raise ValueError(f"the model's states have no tensor {name!r}; they have {names}")
        return self.tensors[sum(len(before.tensors) for before in self.groups[:group]) + names.index(name)]

    def _views(self) -> list[LayerStates]:
        return [self._view(layer, places) for layer, places in enumerate(self._places)]

    def _view(self, layer: int, places: Sequence[_Place]) -> LayerStates:
        live = {place.name: self.tensors[place.tensor][place.layer] for place in places}
        if self.cached.is_live:
            return LayerStates(live, live, self.drafts.layer(layer))
        cached = {place.name: self.cached.layer(place.tensor, place.layer) for place in places}
        return LayerStates(live, cached, self.drafts.layer(layer))


def _places(groups: Sequence[StateGroup]) -> list[list[_Place]]:
    """Return the places of each recurrent layer's tensors."""
    found: dict[int, list[_Place]] = {}
    first = 0
    for group in groups:
        for number, layer in enumerate(group.layers):
            found[layer] = [
                _Place(tensor.name, first + index, number if tensor.per == "layer" else 0)
                for index, tensor in enumerate(group.tensors)
            ]
        first += len(group.tensors)
    return [found[layer] for layer in range(len(found))]
