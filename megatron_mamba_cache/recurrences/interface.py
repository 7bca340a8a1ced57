"""The interface of a recurrence: its state tensors, its grain, and how the states of drafts are kept.

A slot of the state pool holds the tensors of all groups of layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from .batches import AlignBatch


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a state.

    Args:
        name: Unique within its group.
        shape: What one cached state keeps of one layer. The first dimension of a window is time, oldest input first.
        motion: "whole" if each token replaces the tensor, "window" if each token shifts it by one input.
        per: "slot" if all layers of the group share the tensor.
        is_matrix: True for [heads, rows, channels]: quantized forms scale each channel. All other tensors are cached
            unchanged.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    motion: Literal["whole", "window"] = "whole"
    per: Literal["layer", "slot"] = "layer"
    is_matrix: bool = False


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers of a recurrence with equal sizes; `layers` are indices among the recurrent layers of this rank."""

    layers: tuple[int, ...]
    tensors: tuple[StateTensor, ...]

    def num_layers_of(self, tensor: StateTensor) -> int:
        """Return how many layers of a tensor a slot holds."""
        return len(self.layers) if tensor.per == "layer" else min(len(self.layers), 1)


@dataclass(frozen=True, slots=True)
class StateDtypes:
    """The configured dtypes of the parameters (`model`), and of state tensors by their motion."""

    model: torch.dtype
    window: torch.dtype
    whole: torch.dtype


@dataclass(frozen=True, slots=True)
class LayerStates:
    """One layer's view of the state pool.

    Args:
        live: [slots, ...] each, by name: the live states.
        cached: Storage of the states at boundaries, by name; `live` itself unless the cached form is another. A
            quantized tensor is a `QuantizedStates`.
        drafts: The layer's draft storage; None if the states of drafts are in slots.
    """

    live: Mapping[str, Tensor]
    cached: Mapping[str, Any]
    drafts: Any = None


class Recurrence(Protocol):
    """The sizes of a recurrence on this rank."""

    @property
    def name(self) -> str:
        """Name of its folder."""

    @property
    def grain(self) -> int:
        """Tokens; the block size is a multiple of it."""

    def tensors(self, dtypes: StateDtypes) -> tuple[StateTensor, ...]:
        """Return the tensors of a layer's state."""

    def chunk_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that the scan allocates for a chunk of any length, besides those of its tokens."""


class BufferLayout(Protocol):
    """The layout of the draft storage of each running request."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one request's buffer, over all layers of this rank."""

    def storage(self, live: Any, num_requests: int, fold_len: int) -> "DraftStorage":
        """Return draft storage for so many requests, all zero.

        Args:
            live: The `StoredStates` of the live pool.
            fold_len: Tokens after which a replayed state is written.
        """


@runtime_checkable
class ReplayedRecurrence(Recurrence, Protocol):
    """A recurrence that can replay states from the inputs of their latest tokens."""

    @property
    def replays_fast(self) -> bool:
        """True if the current device has a kernel for states of these sizes."""

    @property
    def folds_within_steps(self) -> bool:
        """True if a step's tokens read the stored state at the last fold before them, even one of that step."""

    def buffers(self, num_layers: int, dtypes: StateDtypes, fold_len: int, num_drafts: int) -> BufferLayout:
        """Return the layout of a request's buffer, for the layers of this rank."""


class LiveState(NamedTuple):
    """The live state of a decoding request between two steps.

    Args:
        slot: The live slot.
        accepted_slot: Slot of the accepted column of its draft window; the live slot if it has none.
        accepted: Tokens that the last step kept.
        buffer: Index of the request's buffer in `DraftStorage`, if it has one.
        folded, computed: Tokens in the live slot's state, and computed tokens; the first may be fewer.
    """

    slot: int
    accepted_slot: int
    accepted: int
    buffer: int = 0
    folded: int = 0
    computed: int = 0

    @property
    def is_unresolved(self) -> bool:
        """True if the live slot does not hold the state after all computed tokens."""
        return self.accepted > 1 or self.folded < self.computed


class DraftStorage(Protocol):
    """How the states of drafts are kept until it is known how many are accepted."""

    def layer(self, index: int) -> Any:
        """Return the draft storage of a recurrent layer; None if slots alone hold its states."""

    def cache_boundaries(self, stored: Any, replay: Any, rows: AlignBatch, block_size: int) -> None:
        """Cache the states at the boundaries that requests reached, decided on the device.

        Args:
            stored: A `StoredStates`: where cached states are.
            replay: The step's `ReplayBatch`; None if states were not replayed.
        """

    def resolve(self, states: Sequence[LiveState]) -> None:
        """Write the state after all computed tokens into each live slot, in place."""
