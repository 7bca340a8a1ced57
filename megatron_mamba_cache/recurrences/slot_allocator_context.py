"""Protocols for the objects that a slot allocator reads, limited to the attributes that it uses."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class LiveStateIndex(Protocol):
    """Protocol for the mapping from requests to live slots."""

    @property
    def request_to_mamba_state_idx(self) -> Sequence[int] | Tensor:
        """[requests] live slot of each request."""


class SlotAllocatorContext(Protocol):
    """Protocol for an inference context, limited to what a slot allocator reads."""

    block_size_tokens: int
    max_tokens: int

    @property
    def mamba_conv_states(self) -> Tensor:
        """Conv states, [layers, live slots, *conv_states_shape]."""

    @property
    def mamba_ssm_states(self) -> Tensor:
        """SSM states, [layers, live slots, *ssm_states_shape]."""

    @property
    def mamba_metadata(self) -> LiveStateIndex:
        """Mapping from requests to live slots."""

    @property
    def request_to_kv_block_ids(self) -> Sequence[Sequence[int]] | Tensor:
        """KV block ids, [requests][block index]."""


class PromptRequest(Protocol):
    """Protocol for a request, limited to what `compute_and_store_offsets` reads."""

    prompt_tokens: Sequence[int] | Tensor
    finished_chunk_token_count: int


class StepReservations(Protocol):
    """Protocol for the boundaries that an engine reserved for the current step."""

    def boundary_offsets(self) -> list[list[int]]:
        """Return the boundaries of each prefill request, relative to its first token in this step."""

    def publish_prompts(self) -> None:
        """Publish the states that the step wrote for prompts."""


class NoReservations:
    """`StepReservations` for an allocator without an engine; always empty."""

    def boundary_offsets(self) -> list[list[int]]:
        """Return an empty list."""
        return []

    def publish_prompts(self) -> None:
        """Do nothing."""
