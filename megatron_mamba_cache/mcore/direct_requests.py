"""Megatron's own calls on a context, for callers without an engine: one request at a time, one token a row."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from megatron.core.inference.contexts.dynamic_context import TensorStateDeallocatedError
from torch import Tensor

from ..config import CacheConfig
from ..policy.admission import Refusal
from ..policy.requests import Candidate, KeptTokens, RequestSpec, RunningRequest
from .host_tensors import ints
from .overflow_errors import overflow_error
from .request_spec import spec_of, valid_spec_of
from .step_reader import StepReader


class DirectRequests(StepReader):
    """The part of `MambaCacheContext` that the engine does not use."""

    cache_config: CacheConfig

    @abstractmethod
    def candidate(self, spec: RequestSpec) -> Candidate:
        """Return a request ready for `admit`."""

    @abstractmethod
    def admit(self, candidate: Candidate, budget: int, age: int | None = None) -> RunningRequest | Refusal:
        """Admit a request with its first prefill chunk in this step, or return why not."""

    @abstractmethod
    def finish_step(self, kept: Sequence[KeptTokens]) -> dict[str, Tensor | None]:
        """Advance the step's rows by what was computed and kept."""

    def add_request(self, req: Any, chunk_length: int | None = None) -> None:
        """Admit a Megatron request, its sampling parameters complete; `chunk_length` limits its first prefill chunk.

        Raises:
            ValueError: If the request can never run, or its id is in use.
            ContextOverflowError: If the request does not fit now; of the subclass that says why, where there is one.
        """
        if not self.is_tensor_state_allocated:
            raise TensorStateDeallocatedError(req.request_id)
        if any(row.request_id == req.request_id for row in self.rows):
            raise ValueError(f"request id {req.request_id} is in use; give each request an id of its own")
        spec = valid_spec_of(
            req,
            self.cache_config,
            self.shape.vocab_size,
            self.max_blocks_of_a_request,
            self.materialize_only_last_token_logits,
        )
        budget = self.max_tokens - self.active_token_count
        outcome = self.admit(self.candidate(spec), budget if chunk_length is None else chunk_length)
        if isinstance(outcome, Refusal):
            raise overflow_error(outcome, req.request_id)

    def check_availability(self, req: Any) -> tuple[bool, bool, bool]:
        """Return whether there are a row, tokens in the step and KV blocks for a Megatron request."""
        plan = self.cache.plan(self.candidate(spec_of(req)), self.max_tokens - self.active_token_count)
        has_row = len(self.rows) < self.max_requests and not self.paused_request_count
        return has_row, plan is not Refusal.NO_TOKENS, plan is not Refusal.NO_BLOCKS

    def update_requests(self, active_requests_mask: Tensor | Sequence[int], new_tokens: Tensor | Sequence[int]) -> Any:
        """Finish a step of one token a row; see `finish_step`.

        Args:
            active_requests_mask: [rows] 0 where the request ends with its new token.
            new_tokens: [rows] sampled tokens; that of a row in mid-prefill is ignored.
        """
        entries = zip(self.step.rows, ints(active_requests_mask), ints(new_tokens), strict=True)
        kept = [
            KeptTokens((token,), ends=not goes_on) if row.samples_this_step else KeptTokens()
            for row, goes_on, token in entries
        ]
        return self.finish_step(kept)
