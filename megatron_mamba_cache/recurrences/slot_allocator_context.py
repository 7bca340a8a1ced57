"""Protocols of the context that a slot allocator needs, naming exactly what is read."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class LiveStateIndex(Protocol):
    """The live slot of each request."""

    @property
    def request_to_mamba_state_idx(self) -> Sequence[int] | Tensor:
        """[requests] live slot of each request."""


class SlotAllocatorContext(Protocol):
    """The attributes of an inference context that a slot allocator reads."""

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
    """The attributes of a request that `compute_and_store_offsets` reads."""

    prompt_tokens: Sequence[int] | Tensor
    finished_chunk_token_count: int


class StepReservations(Protocol):
    """Boundaries that an engine itself reserved for the running step."""

    def boundary_offsets(self) -> list[list[int]]:
        """Return each prefill's boundaries, relative to its first token of this step."""

    def publish_prompts(self) -> None:
        """Publish the states that the step wrote for prompts."""


class NoReservations:
    """The reservations of an allocator without an engine: none."""

    def boundary_offsets(self) -> list[list[int]]:
        """Return no boundaries."""
        return []

    def publish_prompts(self) -> None:
        """Do nothing."""
