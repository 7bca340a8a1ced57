"""Interface of a recurrence: its state tensors, its chunk size, and the storage of draft states.

A slot of the state pool holds the state tensors of all recurrent layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from .batches import AlignBatch


@dataclass(frozen=True, slots=True)
class StateTensor:
    """Description of one tensor of a recurrent state.

    Args:
        name: Name, unique within the group.
        shape: Shape of one layer's tensor in a cached state. The first dimension of a window is time, oldest first.
        motion: "whole" if each token replaces the tensor; "window" if each token shifts it by one input.
        per: "layer" if each layer has its own tensor; "slot" if all layers of the group share one.
        is_matrix: True if the tensor is [heads, rows, channels] and may be quantized, with a scale per channel. Other
            tensors are cached unchanged.
        num_draft_inputs: Minimum number of further inputs of a window, those of drafts, for which a live slot has room.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    motion: Literal["whole", "window"] = "whole"
    per: Literal["layer", "slot"] = "layer"
    is_matrix: bool = False
    num_draft_inputs: int = 0


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Layers with the same state tensors; `layers` are indices among the recurrent layers on this rank.

    Args:
        is_of_model: True if the tensors belong to the whole model instead of layers; then there are no layers.
    """

    layers: tuple[int, ...]
    tensors: tuple[StateTensor, ...]
    is_of_model: bool = False

    def num_layers_of(self, tensor: StateTensor) -> int:
        """Return the number of copies of a tensor per slot: one for each layer, or one if layers or all share it."""
        if self.is_of_model:
            return 1
        return len(self.layers) if tensor.per == "layer" else min(len(self.layers), 1)


@dataclass(frozen=True, slots=True)
class StateDtypes:
    """Dtype of the model's parameters, and dtypes of the state tensors for each `StateTensor.motion`."""

    model: torch.dtype
    window: torch.dtype
    whole: torch.dtype


@dataclass(frozen=True, slots=True)
class LayerStates:
    """Views of one recurrent layer's states in the state pool.

    Args:
        live: Tensors [slots, ...] of live states, by name.
        cached: Tensors of cached states, by name; the same as `live` if cached states are not quantized. A quantized
            tensor is a `QuantizedStates`.
        drafts: Draft storage of the layer; None if draft states are in slots.
        seed: Seed of the layer for `stochastic_rounding`; None for other dtypes than fp16.
    """

    live: Mapping[str, Tensor]
    cached: Mapping[str, Any]
    drafts: Any = None
    seed: int | None = None


class Recurrence(Protocol):
    """Protocol for one kind of recurrent layer, with its dimensions on this rank."""

    @property
    def name(self) -> str:
        """Name of the folder that implements the recurrence."""

    @property
    def grain(self) -> int:
        """Chunk size of the scan in tokens; the block size must be a multiple of it."""

    def tensors(self, dtypes: StateDtypes) -> tuple[StateTensor, ...]:
        """Return the tensors that make up the state of a layer."""

    def chunk_bytes(self, dtype: torch.dtype) -> int:
        """Return the scratch memory in bytes that the scan needs per chunk; excludes memory needed per token."""


class BufferLayout(Protocol):
    """Protocol for the layout of a running request's replay buffer."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes of one request's buffer, over all layers on this rank."""

    def storage(self, live: Any, num_requests: int, fold_len: int) -> "DraftStorage":
        """Allocate draft storage for `num_requests` requests, filled with zeros.

        Args:
            live: The `StoredStates` of the live pool.
            fold_len: Number of buffered tokens after which a fold applies them to the state in the slot.
        """


@runtime_checkable
class ReplayedRecurrence(Recurrence, Protocol):
    """Protocol for a recurrence that can recompute a state from an older state and the inputs of later tokens."""

    @property
    def replays_fast(self) -> bool:
        """True if the current device has a replay kernel for these state dimensions."""

    @property
    def folds_within_steps(self) -> bool:
        """True if the kernel rounds a state at a fold position between a step's own tokens, so drafts may pass it."""

    def buffers(self, num_layers: int, dtypes: StateDtypes, fold_len: int, num_drafts: int) -> BufferLayout:
        """Return the layout of a request's replay buffer for the layers on this rank."""


class LiveState(NamedTuple):
    """Location of a decoding request's state between two steps, and how many tokens it includes.

    Args:
        slot: The live slot.
        accepted_slot: Slot that holds the state after the last accepted token; the live slot if drafts have no slots.
        accepted: Number of tokens accepted in the last step.
        buffer: Index of the request's replay buffer; 0 without replay.
        folded: Number of tokens that the state in the live slot includes.
        computed: Number of computed tokens, at least `folded`.
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
    """Protocol for storage that keeps draft states until the drafts are accepted or rejected."""

    def layer(self, index: int) -> Any:
        """Return the draft storage of a recurrent layer; None if all draft states are in slots."""

    def cache_boundaries(self, stored: Any, replay: Any, rows: AlignBatch, block_size: int) -> None:
        """Cache the state of each request that reached a block boundary, as computed on the device.

        Args:
            stored: The `StoredStates` that receives the states.
            replay: The `ReplayBatch` of the step; None if draft states are in slots.
        """

    def resolve(self, states: Sequence[LiveState]) -> None:
        """Update each live slot, in place, to the state after all computed tokens."""
