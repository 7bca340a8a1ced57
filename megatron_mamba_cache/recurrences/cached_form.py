"""Formats in which cached states are stored: unchanged, or with matrices quantized to 8 bits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .align_copy import align_copy
from .batches import AlignBatch
from .draft_inputs import DraftInputs
from .interface import StateGroup, StateTensor
from .layout import SlotLayout, SlotPart
from .moves import StateMove
from .quantized_states import QuantizedStates, restore_states, store_quantized_ref
from .slot_copies import copy_slots


@dataclass(frozen=True, slots=True)
class CachedForm:
    """Format in which cached states are stored.

    Args:
        values: Dtype of quantized matrices, a key of `MOST_VALUES`; None: cached states are slots of the live pool.
    """

    values: torch.dtype | None = None

    def layout(self, groups: Sequence[StateGroup], live: SlotLayout) -> SlotLayout:
        """Return the layout of a slot that holds a cached state; `live` is the layout for live states."""
        if self.values is None:
            return live
        return SlotLayout(
            tuple(part for group in groups for tensor in group.tensors for part in self._parts(group, tensor))
        )

    def _parts(self, group: StateGroup, tensor: StateTensor) -> tuple[SlotPart, ...]:
        num_layers = group.num_layers_of(tensor)
        if not tensor.is_matrix or self.values is None:
            return (SlotPart(num_layers, tensor.shape, tensor.dtype),)
        heads, _, channels = tensor.shape
        values = SlotPart(num_layers, tensor.shape, self.values)
        return values, SlotPart(num_layers, (heads, channels), torch.float32)


CACHED_FORMS = {"live": CachedForm(), "int8": CachedForm(torch.int8), "fp8": CachedForm(torch.float8_e4m3fn)}
"""All formats by name; `CacheConfig.RULES` lists those that can be configured."""


class StoredStates:
    """Storage for cached states: the tensors of the live pool, or separate tensors in a quantized format.

    Args:
        live: One tensor [layers, slots, ...] per `StateTensor` of the groups.
        parts: The tensors described by `CachedForm.layout`; None: cached states are in the live tensors.
    """

    def __init__(self, groups: Sequence[StateGroup], live: Sequence[Tensor], parts: Sequence[Tensor] | None) -> None:
        self.parts = tuple(live if parts is None else parts)
        self.is_live = parts is None
        self._tensors = [tensor for group in groups for tensor in group.tensors]
        self._live = live
        self._storages = list(self.parts) if parts is None else _paired(self._tensors, parts)

    @property
    def device(self) -> torch.device:
        """Device of the states."""
        return self.parts[0].device

    def shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of one layer's state in a tensor; `index` counts the tensors of all groups."""
        storage = self._storages[index]
        return tuple((storage.values if isinstance(storage, QuantizedStates) else storage).shape[2:])

    def storage(self, index: int) -> Tensor | QuantizedStates:
        """Return the storage of one tensor for all layers; `index` counts the tensors of all groups."""
        return self._storages[index]

    def layer(self, index: int, layer: int) -> Tensor | QuantizedStates:
        """Return one layer of a tensor; `index` counts the tensors of all groups."""
        storage = self._storages[index]
        return storage.of_layer(layer) if isinstance(storage, QuantizedStates) else storage[layer]

    def align_copy(
        self,
        rows: AlignBatch,
        block_size: int,
        *,
        tails: Mapping[int, DraftInputs] | None = None,
        only_windows: bool = False,
    ) -> None:
        """Cache the states at block boundaries that requests reached; see `align_copy` in `recurrences/align_copy.py`.

        Args:
            tails: Inputs of windows that are not stored in slots, keyed by tensor index.
            only_windows: If True, copy windows only.
        """
        moves = []
        for index, (tensor, live) in enumerate(zip(self._tensors, self._live, strict=True)):
            if tensor.motion == "window":
                tail = (tails or {}).get(index)
                moves.append(StateMove(live, self._storages[index], tensor.shape[0], tail))
            elif not only_windows:
                moves.append(StateMove(live, self._storages[index]))
        align_copy(moves, rows, block_size)

    def restore(self, src: Tensor, dst: Tensor) -> None:
        """Copy cached states to live slots; do nothing if cached states are slots of the live pool.

        Args:
            src, dst: [n] int32 slot numbers on the device; pairs that contain PAD_SLOT are skipped.
        """
        if not self.is_live:
            self.restore_to(self._live, src, dst)

    def restore_to(self, live: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
        """Copy cached states to slots of `live`, whose tensors have the shapes of the live pool; see `restore`."""
        quantized, others = self._pairs(live)
        for storage, states in quantized:
            restore_states(storage, states, src, dst)
        if others:
            copy_slots([storage for storage, _ in others], [states for _, states in others], src, dst)

    def store_from(self, live: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
        """Cache the states in slots `src` of `live` by copying them to the slots `dst`; the inverse of `restore_to`.

        Args:
            src: [n] int32 slots of `live`.
            dst: [n] int32 distinct slots; none may be in `src` if both refer to the same tensors.
        """
        quantized, others = self._pairs(live)
        for storage, states in quantized:
            for layer in range(states.shape[0]):
                store_quantized_ref(storage.of_layer(layer), dst, states[layer].index_select(0, src.long()))
        if others:
            copy_slots([states for _, states in others], [storage for storage, _ in others], src, dst)

    def store_layer(self, index: int, layer: int, slot: int, state: Tensor) -> None:
        """Store one layer's state, of shape `shape(index)`, in a slot of tensor `index`."""
        storage = self._storages[index]
        if isinstance(storage, QuantizedStates):
            slots = torch.tensor([slot], dtype=torch.int32, device=self.device)
            store_quantized_ref(storage.of_layer(layer), slots, state[None].to(self.device))
        else:
            storage[layer, slot].copy_(state)

    def _pairs(
        self, live: Sequence[Tensor]
    ) -> tuple[list[tuple[QuantizedStates, Tensor]], list[tuple[Tensor, Tensor]]]:
        """Return pairs (storage, live tensor), first quantized, then others; windows include only the cached inputs."""
        quantized, others = [], []
        for tensor, storage, states in zip(self._tensors, self._storages, live, strict=True):
            if isinstance(storage, QuantizedStates):
                quantized.append((storage, states))
            else:
                is_cut = tensor.motion == "window" and not self.is_live
                others.append((storage, states[:, :, : tensor.shape[0]] if is_cut else states))
        return quantized, others


def _paired(tensors: Sequence[StateTensor], parts: Sequence[Tensor]) -> list[Any]:
    """Return the storage of each tensor: one entry of `parts`, or `QuantizedStates` made from two entries."""
    remaining = iter(parts)
    return [
        QuantizedStates(next(remaining), next(remaining)) if tensor.is_matrix else next(remaining) for tensor in tensors
    ]
