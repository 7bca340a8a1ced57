"""The engine: Megatron's dynamic engine with a scheduler that knows about prefix hits, and requests that fail alone."""

import asyncio
from dataclasses import dataclass
from typing import Any

from megatron.core.inference.contexts.dynamic_context import ContextOverflowError, MaxSequenceLengthOverflowError
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron.core.inference.inference_request import Status
from megatron.core.inference.sampling_params import SamplingParams

from ..policy.requests import Candidate
from .context import MambaCacheContext
from .controller import MambaCacheController
from .hit_rate_hint import HitRateHint
from .request_spec import fault_of, spec_of
from .scheduler import StepScheduler

_REMEMBERED_REQUESTS = 65_536


@dataclass(slots=True)
class _RequestState:
    """What the engine keeps of a request beside Megatron's record."""

    seed: int
    tenant: str = ""
    candidate: Candidate | None = None  # of the record's newest request; rebuilt after an eviction
    age: int | None = None  # order of its first admission
    cached_tokens: int | None = None  # prompt tokens skipped at its first admission


class MambaCacheEngine(DynamicInferenceEngine):
    """Serves requests over a `MambaCacheContext`; use it as Megatron's engine.

    A request that cannot run ends as FAILED with the reason in its events; the others are not affected. A step that
    raises gives back what it reserved; its requests wait again and lose no token.
    """

    def __init__(self, controller: MambaCacheController, context: MambaCacheContext, random_seed: int = 0) -> None:
        self.scheduler = StepScheduler(context)
        self._states: dict[int, _RequestState] = {}
        self._cached_tokens: dict[int, int] = {}  # of requests that have left, oldest first
        self._hint = HitRateHint(context.cache_config)
        super().__init__(
            controller, context, random_seed=random_seed, enable_chunked_prefill=context.cache_config.chunked_prefill
        )
        # Rows know their stop words, so a stop word ends its request in the step that completes it.
        controller.set_stop_word_finished_ids_callback(None)

    def add_request(
        self,
        request_id: int,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        tenant: str = "",
    ) -> asyncio.Future:
        """Add a request; see Megatron's engine.

        Args:
            seed: Of the request's random numbers; None derives one from the engine's seed and the request id.
            tenant: Requests of different tenants never share a prefix.

        Raises:
            ValueError: If a request of this id is in the engine already.
        """
        if request_id in self.requests:
            raise ValueError(f"request id {request_id} is in use; give each request an id of its own")
        self._states[request_id] = _RequestState(self._default_seed(request_id) if seed is None else seed, tenant)
        return super().add_request(request_id, prompt, sampling_params or SamplingParams())

    def _add_request(self, request: Any) -> asyncio.Future:
        """Validate a request and put it at the end of the queue, or fail it alone."""
        request_id = request.request_id
        state = self._states.setdefault(request_id, _RequestState(self._default_seed(request_id)))
        future = super()._add_request(request)
        request.sampling_params.num_tokens_total = None  # folded into num_tokens_to_generate; both is an error later
        if request.status is Status.FAILED:
            self._explain_length_failure(request)
            return future
        spec = spec_of(request, seed=state.seed, tenant=state.tenant)
        num_blocks = self.context.block_allocator.total_count - 1
        fault = fault_of(spec, self.context.cache_config, self.context.shape.vocab_size, num_blocks)
        if fault is None:
            state.candidate = self.context.candidate(spec)
            self._hint.note_prompt(spec.prompt_len)
            return future
        self.waiting_request_ids.remove(request_id)
        self._fail(request, fault)
        return future

    def cached_tokens(self, request_id: int) -> int:
        """Return the prompt tokens that were skipped when the request was first admitted; 0 before that.

        Known of the newest 65,536 requests that have left.
        """
        if request_id in self._states:
            return self._states[request_id].cached_tokens or 0
        return self._cached_tokens.get(request_id, 0)

    def flush(self, weights_version: str | None = None) -> None:
        """Make all cached prefixes unreachable; see `MambaCacheContext.flush`."""
        self.context.flush(weights_version)

    def schedule_waiting_requests(self) -> None:
        """Schedule the next step, instead of Megatron's two schedulers."""
        scheduled = self.scheduler.fill_step(
            self.waiting_request_ids, self._candidate_of, lambda request_id: self._states[request_id].age
        )
        self.context.chunked_prefill_request_id = scheduled.unfinished_prefill_id
        for row in scheduled.admitted:
            state = self._states[row.request_id]
            if state.cached_tokens is None:
                state.cached_tokens = row.computed
            state.age = row.age
            self.waiting_request_ids.remove(row.request_id)
            self.get_request(row.request_id).add_event_add()
        if scheduled.admitted:
            self._loop.call_soon_threadsafe(self._loop.create_task, self._notify_cond_for_new_request())

    async def async_forward(self) -> Any:
        """Run one step; if it raises, give back what it reserved and queue its requests again."""
        try:
            return await super().async_forward()
        except BaseException:
            if not self.is_suspended:
                self._queue_again([row.request_id for row in self.context.abort_step()])
            raise

    def post_process_requests(
        self, request_ids: Any, finished_request_ids: Any, evict_request_ids: Any, *args: Any, **settings: Any
    ) -> Any:
        """Append the step's tokens to their requests; evicted ones go back to the head of the queue."""
        outcome = super().post_process_requests(request_ids, finished_request_ids, None, *args, **settings)
        if evict_request_ids is not None:
            evicted = evict_request_ids.tolist()
            self.evicted_request_count += len(evicted)
            self._queue_again(list(reversed(evicted)))
            for request_id in evicted:
                self.get_request(request_id).add_event_evict()
        for request_id in finished_request_ids.tolist():
            self._forget(request_id)
        return outcome

    def _check_stop_words_for_request_post_append(self, request: Any) -> bool:
        """Return False: a stop word has ended its request already."""
        return False

    def _queue_again(self, request_ids: list[int]) -> None:
        """Put requests back at the head of the queue, in the given order, with what they generated as prompt."""
        for request_id in reversed(request_ids):
            self.requests[request_id].record.checkpoint()
            request = self.get_request(request_id)
            request.status = Status.ACTIVE_AND_GENERATING_TOKENS
            request.stop_word_ids = self.requests[request_id].record[0].stop_word_ids
            self._states[request_id].candidate = None
            self.waiting_request_ids.appendleft(request_id)

    def _default_seed(self, request_id: int) -> int:
        return (self.random_seed << 32) + request_id

    def _forget(self, request_id: int) -> None:
        state = self._states.pop(request_id)
        self._cached_tokens[request_id] = state.cached_tokens or 0
        while len(self._cached_tokens) > _REMEMBERED_REQUESTS:
            del self._cached_tokens[next(iter(self._cached_tokens))]

    def _candidate_of(self, request_id: int) -> Candidate:
        state = self._states[request_id]
        if state.candidate is None:
            request = self.get_request(request_id)
            state.candidate = self.context.candidate(spec_of(request, seed=state.seed, tenant=state.tenant))
        return state.candidate

    def _explain_length_failure(self, request: Any) -> None:
        limit, sampling = self.context.max_sequence_length, request.sampling_params
        self._forget(request.request_id)
        request.events.clear()
        request.add_event_error_nontransient(
            MaxSequenceLengthOverflowError(
                request.request_id,
                f"{len(request.prompt_tokens)} prompt tokens and {sampling.num_tokens_to_generate} to generate do not "
                f"fit max_sequence_length={limit} or max_tokens={self.context.max_tokens}",
            )
        )

    def _fail(self, request: Any, reason: str) -> None:
        self._forget(request.request_id)
        request.status = Status.FAILED
        request.add_event_error_nontransient(ContextOverflowError(request.request_id, reason, is_transient=False))
        self.failed_request_ids.append(request.request_id)


def failure_reason(request: Any) -> str | None:
    """Return why a request FAILED; None if it did not."""
    if request.status is not Status.FAILED:
        return None
    errors = [event.payload for event in request.events if event.payload is not None]
    return str(getattr(errors[-1], "message", None) or errors[-1]) if errors else "failed without a reason"


