"""The interface of a recurrence: its state tensors, its grain, and where the states after drafts are kept.

A recurrence is a value with the sizes of its layers on this rank. Layers of one recurrence and equal sizes are a group.
A slot of the state pool holds the tensors of all groups.
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
        motion: "whole" if each token replaces the tensor, "window" if each token moves it on by one input.
        per: "slot" if all layers of the group share the tensor.
        is_matrix: True for [heads, rows, channels]: forms of cached states with fewer bits scale each channel. All
            other tensors are cached as they are.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    motion: Literal["whole", "window"] = "whole"
    per: Literal["layer", "slot"] = "layer"
    is_matrix: bool = False


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers that share a recurrence and its sizes.

    Args:
        layers: Which of the recurrent layers of this rank, counted from 0.
    """

    layers: tuple[int, ...]
    tensors: tuple[StateTensor, ...]

    def num_layers_of(self, tensor: StateTensor) -> int:
        """Return how many layers of a tensor a slot holds."""
        return len(self.layers) if tensor.per == "layer" else min(len(self.layers), 1)


@dataclass(frozen=True, slots=True)
class StateDtypes:
    """The dtypes that settings choose for states.

    Args:
        model: Of the parameters.
        window, whole: Of tensors by their motion.
    """

    model: torch.dtype
    window: torch.dtype
    whole: torch.dtype


@dataclass(frozen=True, slots=True)
class LayerStates:
    """One layer's view of the state pool.

    Args:
        live: [slots, ...] each, by name: where live states are read and written.
        cached: Where the states at boundaries are written, by name; `live` itself unless cached states have a form of
            their own. A quantized tensor is a `QuantizedStates`.
        drafts: What the draft states keep for the layer; None if states after drafts have slots.
    """

    live: Mapping[str, Tensor]
    cached: Mapping[str, Any]
    drafts: Any = None


class Recurrence(Protocol):
    """The sizes of a recurrence on this rank."""

    @property
    def name(self) -> str:
        """The name of its folder."""

    @property
    def grain(self) -> int:
        """Tokens; a block of the cache is a multiple of it."""

    def tensors(self, dtypes: StateDtypes) -> tuple[StateTensor, ...]:
        """Return the tensors of a layer's state."""


class BufferLayout(Protocol):
    """The layout of what draft states keep for each running request."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one request's buffer, over all layers of this rank."""

    def storage(self, live: Any, num_requests: int, fold_len: int) -> "DraftStorage":
        """Return draft states with buffers for so many requests, all zero.

        Args:
            live: The `StoredStates` of the live pool.
            fold_len: Tokens after which a replayed state is written.
        """


@runtime_checkable
class ReplayedRecurrence(Recurrence, Protocol):
    """A recurrence whose states can be replayed from the inputs of their latest tokens."""

    @property
    def replays_fast(self) -> bool:
        """True if a kernel for the current device replays states of these sizes."""

    def buffers(self, num_layers: int, dtypes: StateDtypes, fold_len: int, num_drafts: int) -> BufferLayout:
        """Return the layout of a request's buffer.

        Args:
            num_layers: Of this rank.
            fold_len: Tokens after which a replayed state is written.
        """


class LiveState(NamedTuple):
    """Where the live state of a decoding request is between two steps.

    Args:
        slot: The live slot.
        accepted_slot: The slot of the accepted column of its draft window; the live slot if it has none.
        accepted: Tokens that the last step kept.
        buffer: Index of the buffer that `DraftStorage` keeps for the request, if it keeps one for each.
        folded, computed: Tokens that the state in the live slot holds, where that may be fewer than are computed.
    """

    slot: int
    accepted_slot: int
    accepted: int
    buffer: int = 0
    folded: int = 0
    computed: int = 0

    @property
    def is_unsettled(self) -> bool:
        """True if the live slot does not hold the state after all computed tokens."""
        return self.accepted > 1 or self.folded < self.computed


class DraftStorage(Protocol):
    """How the states after drafts are kept until it is known how many are accepted."""

    def layer(self, index: int) -> Any:
        """Return what the decode rows of a recurrent layer read and write; None if that is slots alone."""

    def cache_boundaries(self, stored: Any, replay: Any, rows: AlignBatch, block_size: int) -> None:
        """Cache the states at the boundaries that rows reached, decided on the device; see `align_copy`.

        Args:
            stored: A `StoredStates`: where cached states are.
            replay: The step's rows as their states were replayed; None if they were not.
        """

    def settle(self, states: Sequence[LiveState]) -> None:
        """Bring the state after all computed tokens into each live slot, in place."""
