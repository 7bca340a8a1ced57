"""The engine: Megatron's dynamic engine with a scheduler that knows about prefix hits, and requests that fail alone."""

import asyncio
from dataclasses import dataclass
from typing import Any

from megatron.core.inference.contexts.dynamic_context import ContextOverflowError
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine, RequestEntry
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord, Status
from megatron.core.inference.sampling_params import SamplingParams

from ..policy.requests import Candidate, RequestSpec
from .context import MambaCacheContext
from .controller import MambaCacheController
from .hit_rate_hint import HitRateHint
from .request_spec import contradiction_in, fault_of, is_encodable, spec_of
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
        if not (isinstance(request_id, int) and 0 <= request_id < 2**63):
            raise ValueError(f"request id is {request_id!r}; it must be an int from 0 to 2**63 - 1")
        own_seed = self._default_seed(request_id) if seed is None else seed
        if not isinstance(own_seed, int) or not is_encodable(tenant):
            raise ValueError(f"seed is {seed!r}, tenant {tenant!r}; seed must be an int or None, tenant Unicode text")
        self._states[request_id] = _RequestState(own_seed, tenant)
        try:
            return super().add_request(request_id, prompt, sampling_params or SamplingParams())
        except BaseException:  # for instance a prompt that is no token ids: leave no trace of it
            self._states.pop(request_id, None)
            self.requests.pop(request_id, None)
            if request_id in self.waiting_request_ids:
                self.waiting_request_ids.remove(request_id)
            raise

    def _add_request(self, request: Any) -> asyncio.Future:
        """Validate a request and put it at the end of the queue, or fail it alone."""
        request_id, sampling = request.request_id, request.sampling_params
        self._states.setdefault(request_id, _RequestState(self._default_seed(request_id)))
        fault = contradiction_in(sampling, self.context.materialize_only_last_token_logits)
        if fault is not None:
            return self._refuse(request, fault)
        future = super()._add_request(request)
        sampling.num_tokens_total = None  # folded into num_tokens_to_generate; both at once is an error on resuming
        spec = self._spec_of(request)
        num_blocks = self.context.max_blocks_of_a_request
        fault = fault_of(spec, self.context.cache_config, self.context.shape.vocab_size, num_blocks)
        if fault is not None or request.status is Status.FAILED:
            return self._refuse(request, fault or "Megatron refuses it")
        self._hint.note_prompt(spec.prompt_len)
        return future

    def reset(self) -> None:
        """Drop all requests; what is cached stays."""
        self._states.clear()
        super().reset()

    def has_unfinished_requests(self) -> bool:
        """Whether a request runs, waits, or has failed and is to be reported by the next step."""
        return super().has_unfinished_requests() or bool(self.failed_request_ids)

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

    def suspend(self) -> None:
        """Drop the context's memory; running requests start again after `resume`, oldest first, and lose no token."""
        if self.is_suspended:
            return
        running = [row.request_id for row in sorted(self.context.rows, key=lambda row: row.age)]
        waiting = list(self.waiting_request_ids)
        super().suspend()
        for request_id in self.requests.keys() - set(waiting):
            self.requests[request_id].record.requests.pop()  # Megatron's checkpoint, made even where nothing is new
        for request_id in running:
            self._restart(request_id)
        self.resume_request_ids = [*running, *waiting]

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

    async def async_bookkeep(self, step_result: Any, *args: Any, **settings: Any) -> Any:
        """Report the step; a request whose caller has cancelled its future ends as any other."""
        ending = list(self.failed_request_ids)
        if step_result is not None:
            ending += step_result["finished_request_ids"].tolist()
        for request_id in ending:
            if self.requests[request_id].future.done():
                self.requests[request_id].future = self._loop.create_future()
        return await super().async_bookkeep(step_result, *args, **settings)

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
        """Put requests back at the head of the queue, in the given order."""
        for request_id in reversed(request_ids):
            self._restart(request_id)
            if request_id in self.waiting_request_ids:
                self.waiting_request_ids.remove(request_id)
            self.waiting_request_ids.appendleft(request_id)

    def _restart(self, request_id: int) -> None:
        """Make a request that lost its memory ready to be prefilled, what it generated included."""
        record = self.requests[request_id].record
        self._states[request_id].candidate = None
        if record[-1].generated_tokens:
            record.checkpoint()
            record[-1].status = Status.ACTIVE_AND_GENERATING_TOKENS
            record[-1].stop_word_ids = record[0].stop_word_ids
            # The record's first request has the prompt's log-probs.
            without_prompt = {"return_prompt_top_n_logprobs": False, "skip_prompt_log_probs": True}
            record[-1].sampling_params.add_attributes(without_prompt)
        else:
            record[-1].prompt_log_probs = record[-1].generated_log_probs = None
            record[-1].prompt_top_n_logprobs = record[-1].generated_top_n_logprobs = None

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
            state.candidate = self.context.candidate(self._spec_of(self.get_request(request_id)))
        return state.candidate

    def _spec_of(self, request: Any) -> RequestSpec:
        state = self._states[request.request_id]
        original = self.requests[request.request_id].record[0]
        num_replayed = len(request.prompt_tokens) - len(original.prompt_tokens)
        return spec_of(request, seed=state.seed, tenant=state.tenant, num_replayed=num_replayed)

    def _refuse(self, request: Any, reason: str) -> asyncio.Future:
        """Fail a request alone; the next step reports it."""
        request_id = request.request_id
        if request_id not in self.requests:
            record = DynamicInferenceRequestRecord.from_request(request)
            self.requests[request_id] = RequestEntry(record=record, future=self._loop.create_future())
        if request_id in self.waiting_request_ids:
            self.waiting_request_ids.remove(request_id)
        if request_id not in self.failed_request_ids:
            self.failed_request_ids.append(request_id)
        self._forget(request_id)
        request.tpot = request.tpot or []
        request.status = Status.FAILED
        request.events.clear()
        request.add_event_error_nontransient(ContextOverflowError(request_id, reason, is_transient=False))
        return self.requests[request_id].future


def failure_reason(request: Any) -> str | None:
    """Return why a request FAILED; None if it did not."""
    if request.status is not Status.FAILED:
        return None
    errors = [event.payload for event in request.events if event.payload is not None]
    return str(getattr(errors[-1], "message", None) or errors[-1]) if errors else "failed without a reason"
