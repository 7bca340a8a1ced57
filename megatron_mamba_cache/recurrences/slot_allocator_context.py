"""Protocols of what a slot allocator needs from its context, each naming exactly what is read."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class LiveStateIndex(Protocol):
    """Where the live state of each request is."""

    @property
    def request_to_mamba_state_idx(self) -> Sequence[int] | Tensor:
        """[requests] live slot of each request."""


class SlotAllocatorContext(Protocol):
    """All that a slot allocator reads of an inference context."""

    block_size_tokens: int
    max_tokens: int

    @property
    def mamba_conv_states(self) -> Tensor:
        """[layers, live slots, *conv_states_shape]."""

    @property
    def mamba_ssm_states(self) -> Tensor:
        """[layers, live slots, *ssm_states_shape]."""

    @property
    def mamba_metadata(self) -> LiveStateIndex:
        """The live slot of each request."""

    @property
    def request_to_kv_block_ids(self) -> Sequence[Sequence[int]] | Tensor:
        """[requests][block index] KV block ids."""


class PromptRequest(Protocol):
    """All that `compute_and_store_offsets` reads of a request."""

    prompt_tokens: Sequence[int] | Tensor
    finished_chunk_token_count: int


class StepReservations(Protocol):
    """Boundaries that an engine itself reserved for the running step."""

    def boundary_offsets(self) -> list[list[int]]:
        """Return, for each prefill row, its boundaries relative to the row's first token of this step."""

    def publish_prompts(self) -> None:
        """Publish what the step wrote for prompts."""


class NoReservations:
    """The null object without an engine: all reservations come through `compute_and_store_offsets`."""

    def boundary_offsets(self) -> list[list[int]]:
        """Return no rows."""
        return []

    def publish_prompts(self) -> None:
        """Do nothing."""
