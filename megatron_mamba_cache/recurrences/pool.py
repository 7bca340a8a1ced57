"""State pool: the tensors that hold all state slots of all recurrent layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .cached_form import StoredStates
from .hidden_states import HIDDEN
from .interface import DraftStorage, LayerStates, StateGroup
from .layout import SlotLayout, state_tensors
from .stochastic_rounding import rounding_seed
from .window import WindowStorage


class StatePool:
    """State tensors for all slots and layers, at addresses that do not change.

    Args:
        groups: Groups of the recurrent layers on this rank.
        tensors: One tensor [layers, slots, ...] per `StateTensor` of the groups; each layer of a slot is contiguous.
        cached: Tensors for cached states in a quantized format; None: cached states are in `tensors`.

    Attributes:
        live, cached, drafts: Storage of live, cached and draft states.
    """

    def __init__(
        self, groups: Sequence[StateGroup], tensors: Sequence[Tensor], cached: Sequence[Tensor] | None = None
    ) -> None:
        self.groups = tuple(groups)
        self.tensors = tuple(tensors)
        self.live = StoredStates(self.groups, self.tensors, None)
        self.cached = self.live if cached is None else StoredStates(self.groups, self.tensors, cached)
        self.drafts: DraftStorage = WindowStorage(self.live)
        self._layers = self._views()

    @staticmethod
    def zeros(groups: Sequence[StateGroup], num_slots: int, device: torch.device | int | str) -> "StatePool":
        """Allocate a pool filled with zeros."""
        return StatePool(groups, state_tensors(SlotLayout.of(groups), num_slots, device))

    def keep_drafts_in(self, drafts: DraftStorage) -> None:
        """Store draft states in `drafts` from now on."""
        self.drafts = drafts
        self._layers = self._views()

    @property
    def hidden_states(self) -> LayerStates:
        """Hidden states of last tokens, under the name `HIDDEN`; only for models with a head."""
        index = len(self.tensors) - 1
        live = {HIDDEN: self.tensors[index][0]}
        return LayerStates(live, live if self.cached.is_live else {HIDDEN: self.cached.layer(index, 0)})

    @property
    def device(self) -> torch.device:
        """Device of the state tensors."""
        return self.live.device

    def layer(self, index: int) -> LayerStates:
        """Return the states of a recurrent layer; `index` counts the recurrent layers on this rank."""
        return self._layers[index]

    def tensor(self, name: str, group: int = 0) -> Tensor:
        """Return the tensor [layers, slots, ...] with this name in a group.

        Raises:
            ValueError: If the group has no tensor of this name.
        """
        names = [tensor.name for tensor in self.groups[group].tensors]
        if name not in names:
            raise ValueError(f"the model's states have no tensor {name!r}, only {names}")
        return self.tensors[sum(len(before.tensors) for before in self.groups[:group]) + names.index(name)]

    def _views(self) -> list[LayerStates]:
        found: dict[int, LayerStates] = {}
        first = 0  # index of the group's first tensor, counted over all groups
        for group in self.groups:
            for number, layer in enumerate(group.layers):
                indices = [
                    (tensor.name, first + index, number if tensor.per == "layer" else 0)
                    for index, tensor in enumerate(group.tensors)
                ]
                live = {name: self.tensors[index][at] for name, index, at in indices}
                cached = live if self.cached.is_live else {name: self.cached.layer(*at) for name, *at in indices}
                dtypes = [tensor.dtype for tensor in group.tensors if tensor.is_matrix]
                seed = rounding_seed(dtypes[0], number) if dtypes else None
                found[layer] = LayerStates(live, cached, self.drafts.layer(layer), seed)
            first += len(group.tensors)
        return [found[layer] for layer in range(len(found))]
