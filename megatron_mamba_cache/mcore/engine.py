"""Megatron's dynamic engine with a prefix-aware scheduler and isolation of failing requests."""

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from megatron.core.inference.contexts.dynamic_context import ContextOverflowError
from megatron.core.inference.engines.dynamic_engine import RequestEntry
from megatron.core.inference.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord, Status
from megatron.core.inference.sampling_params import SamplingParams
from typing_extensions import override

from ..policy.admission import HitRateHint
from ..policy.request_settings import RequestSpec
from ..policy.requests import Candidate
from ..policy.scheduler import FailedSteps, StepScheduler, refusal_reason
from ..policy.tiers.cache_tiers import PREFETCH_WINDOW
from ..ranks.agreement import known_to_any
from ..step.padding_steps import complete_failed_step
from .context import MambaCacheContext
from .controller import MambaCacheController
from .cpu import WallClockEvent
from .engine_loop import EngineLoop
from .generated_tokens import append_tokens, is_reported, join_texts
from .pausable_engine import PausableEngine
from .request_spec import SpecParams, check_identity, ended_by, error_of_end, prompt_ids, spec_of
from .request_states import (
    DraftCounts,
    RequestCounts,
    RequestRecord,
    RequestState,
    RequestStates,
    TierTokens,
    VersionStart,
    complete_parts,
)
from .step_report import StepReport


class MambaCacheEngine(PausableEngine):
    """Drop-in replacement for Megatron's engine that serves requests with a `MambaCacheContext`.

    A request that cannot run ends as FAILED with the reason in its events. If a step raises, its requests are queued
    again and keep their tokens. A request that repeatedly makes steps raise then runs alone, so only it fails.
    """

    def __init__(self, controller: MambaCacheController, context: MambaCacheContext, random_seed: int = 0) -> None:
        self.scheduler = StepScheduler()
        self._looked_at: tuple[int, ...] = ()  # head of the queue when prefetches last started
        self._runs_in = EngineLoop()
        self._states = RequestStates()
        self._random_seed = random_seed
        self._failed_steps = FailedSteps()
        self._step_ended = 0.0
        self._new_tokens: Sequence[Sequence[int]] = ()  # tokens of each request in the step that is being reported
        self._unreported: list[DynamicInferenceRequestRecord] = []  # requests that ended in a step whose report raised
        self._hint = HitRateHint(context.cache_config)
        super().__init__(controller, context, random_seed=random_seed, enable_chunked_prefill=True)
        context.grammars.read(controller.tokenizer)
        self._states.weights_version = context.weights_version
        # The step runner checks stop words, so a request ends in the step that completes its stop word.
        controller.set_stop_word_finished_ids_callback(None)

    @override
    def add_request(
        self,
        request_id: int,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        tenant: str = "",
    ) -> asyncio.Future:
        """Queue a request and return a future for its record; see Megatron's engine. `prompt_tokens` stay on the host.

        Args:
            seed: Seed of the request's random numbers; None derives one from the engine's seed and the request id.
            tenant: Name of the request's tenant; requests of different tenants never share a cached prefix.

        Raises:
            ValueError: If a request with this id is in the engine, or the id, seed or tenant is invalid.
            TypeError: If the prompt is neither text nor a sequence of token ids.
        """
        return self._runs_in.call(lambda: self._begin_request(request_id, prompt, sampling_params, seed, tenant))

    def submit(self, spec: RequestSpec) -> asyncio.Future:
        """Queue a request that satisfies the context's `request_rules`; return and raise like `add_request`."""
        if spec.request_id in self.requests:
            raise _in_use(spec.request_id)
        spec = ended_by(spec, self.controller.tokenizer)
        request = DynamicInferenceRequest(request_id=spec.request_id, sampling_params=SpecParams(spec))
        request.prompt_tokens = request.remaining_prompt_tokens = torch.from_numpy(spec.prompt)
        return self._enter(request, spec)

    def _begin_request(
        self, request_id: int, prompt: Any, sampling_params: SamplingParams | None, seed: int | None, tenant: str
    ) -> asyncio.Future:
        """Validate a request; queue it, or mark it as failed."""
        if request_id in self.requests:
            raise _in_use(request_id)
        check_identity(request_id, seed, tenant)
        request = self._new_request(request_id, prompt, sampling_params or SamplingParams())
        tokenize = partial(self.controller.tokenize_prompt, add_BOS=False)
        stop_words = [*map(tokenize, request.sampling_params.stop_words or ())]
        try:
            spec = spec_of(
                request,
                stop_words=stop_words,
                longest=self.context.max_sequence_length,
                seed=seed,
                default_seed=(self._random_seed << 32) + request_id,
                tenant=tenant,
            )
        except ValueError as error:
            return self._refuse(request, str(error))
        problem = self.context.request_rules.error_of(spec)
        if problem is not None:
            return self._refuse(request, problem)
        return self._enter(request, ended_by(spec, self.controller.tokenizer))

    def _new_request(self, request_id: int, prompt: Any, sampling: SamplingParams) -> DynamicInferenceRequest:
        """Return Megatron's request with its tokens on the host; each step copies the tokens it needs to the device."""
        text, token_ids = None, prompt
        if isinstance(prompt, str):
            text, token_ids = prompt, self.controller.tokenize_prompt(prompt, sampling.add_BOS)
        request = DynamicInferenceRequest(request_id=request_id, prompt=text, sampling_params=sampling)
        # No step reads `remaining_prompt_tokens`, which only Megatron's scheduler uses, so do not copy the prompt.
        request.prompt_tokens = request.remaining_prompt_tokens = torch.from_numpy(prompt_ids(token_ids))
        return request

    def _enter(self, request: DynamicInferenceRequest, spec: RequestSpec) -> asyncio.Future:
        """Queue a request; fail it instead if its grammar or end tokens are unusable."""
        grammar, params = spec.sampling.grammar, request.sampling_params
        problem = self.context.grammars.error_of(grammar) if grammar else None
        problem = problem or error_of_end(spec, self.controller.tokenizer)
        if problem is not None:
            return self._refuse(request, problem)
        params.num_tokens_to_generate, params.num_tokens_total = spec.max_tokens, None
        params.termination_id = spec.sampling.termination_id
        request.status = Status.ACTIVE_AND_GENERATING_TOKENS
        self._states[spec.request_id] = state = RequestState(Candidate(spec))
        self.requests[spec.request_id] = self._entry_of(request, state)
        self._hint.note_prompt(spec.prompt_len)
        return self._add_request(request)

    def _entry_of(self, request: DynamicInferenceRequest, state: RequestState | None = None) -> RequestEntry:
        record = RequestRecord(requests=[request], state=state)
        return RequestEntry(record=record, future=self._loop.create_future())

    @override
    def _add_request(self, request: Any) -> asyncio.Future:
        """Queue a request; when the engine resumes, Megatron calls this method for every request."""
        self.waiting_request_ids.append(request.request_id)
        self.context.note_arrival()
        return self.requests[request.request_id].future

    @override
    def reset(self) -> None:
        """Drop all requests but keep the cache."""
        self._states.clear()
        self._failed_steps.clear()
        self._unreported.clear()
        super().reset()
        self.step_start_event, self.step_end_event = WallClockEvent(), WallClockEvent()

    @override
    def has_unfinished_requests(self) -> bool:
        """Return whether any request is running, waiting, or ended but not yet reported."""
        return super().has_unfinished_requests() or bool(self.failed_request_ids or self._unreported)

    @property
    def has_idle_copies(self) -> bool:
        """True if copies between tiers are in flight, but no step will complete them because there are no requests."""
        is_idle = not (self.context.running_requests or self.waiting_request_ids)
        return is_idle and self.context.is_tensor_state_allocated and self.context.memory.below.has_copies

    def land_idle_copies(self) -> None:
        """Process finished copies between tiers, which may start further copies; all ranks must call this."""
        if self.has_idle_copies and self.context.memory.below.land(wait=False):
            self.context.runner.queue.note_change()

    def counts_of(self, request_id: int) -> RequestCounts:
        """Return the counts for a request so far; zeros for an unknown id, or after 65,536 later requests have left."""
        return self._states.counts_of(request_id)

    def cached_tokens(self, request_id: int) -> int:
        """Return the number of prompt tokens that needed no prefill at the first admission; 0 before it."""
        return self.counts_of(request_id).cached_tokens

    def tier_tokens(self, request_id: int) -> TierTokens:
        """Return how many of a request's `cached_tokens` were restored from the host and the disk."""
        return self.counts_of(request_id).tiers

    def written_tokens(self, request_id: int) -> int:
        """Return how many prompt tokens the request has newly cached; a repeated prefill may count them twice."""
        return self.counts_of(request_id).num_written

    def weights_versions(self, request_id: int) -> tuple[VersionStart, ...]:
        """Return which versions of the weights generated a request's tokens, each with the index of its first token.

        A step has the version with which it was launched. The record of a request that has ended has the same value in
        its first part, as the sampling parameter `weights_versions`.
        """
        return self.counts_of(request_id).versions

    def draft_counts(self, request_id: int) -> DraftCounts:
        """Return how many of the request's draft tokens have been verified and how many accepted so far."""
        return self.counts_of(request_id).drafts

    @override
    def schedule_waiting_requests(self) -> None:
        """Schedule the next step unless it has been launched already; replaces both of Megatron's schedulers."""
        if not (self.context.is_tensor_state_allocated or self.waiting_request_ids):
            return
        self._refuse_failed_grammars()
        runner = self.context.runner
        if runner.memory.below.land(wait=not runner.requests):
            runner.queue.note_change()
            self._looked_at = ()
        awaits_copy, is_full = runner.memory.below.tiers.awaits, runner.requests.is_full
        runner.queue.note_waiting(has_waiting=not is_full and not all(map(awaits_copy, self.waiting_request_ids)))
        if runner.sharing.is_fixed:  # the ranks have already agreed on this step, so new requests wait for the next one
            runner.queue.note_scheduled(is_settled=(is_full or not self.waiting_request_ids) and self._is_at_rest())
        if runner.sharing.is_fixed or runner.overlapped_steps.launched is not None:
            self._prefetch()
            return
        scheduled = runner.step_requests.schedule(self.scheduler, self._candidates(self._admissible()))
        self.context.chunked_prefill_request_id = scheduled.unfinished_prefill_id
        runner.queue.note_scheduled(is_settled=not scheduled.admitted and self._is_at_rest())
        for request in scheduled.admitted:
            self._states[request.request_id].admit(request)
            self.waiting_request_ids.remove(request.request_id)
            self.get_request(request.request_id).add_event_add()
        if scheduled.admitted:
            self._loop.call_soon_threadsafe(self._loop.create_task, self._notify_cond_for_new_request())

    @override
    async def async_forward(self) -> Any:
        """Run one step; if it raises, release its reservations and queue its requests again.

        If the engine is suspended, its requests stay unchanged; if it is closed, they fail.
        """
        was_launched = self.context.overlapped_step is not None
        before_ended, counters = self._step_ended, self.context.counters
        num_before = counters.prefill_tokens_computed, counters.decode_tokens_computed
        if self.context.is_tensor_state_allocated:
            self.context.runner.sharing.begin()
            if not self.is_suspended:  # the weights may be unavailable while suspended
                self.context.planner.capture_if_wanted(self.context.runner.memory.below.drain)
        try:
            result, state, seconds, number = await super().async_forward()
            self._step_ended = time.perf_counter()
            is_prefill = counters.decode_tokens_computed == num_before[1]
            if is_prefill and not was_launched and self.context.is_tensor_state_allocated:
                num_tokens = counters.prefill_tokens_computed - num_before[0]
                self.context.memory.below.note_prefill(num_tokens, seconds)
            return result, state, self._step_ended - before_ended if was_launched else seconds, number
        except BaseException as error:
            if not self.is_suspended:
                if self.context.is_tensor_state_allocated:
                    self._drop_failed_step(error)
                self._recover(error)
            raise

    @override
    async def async_bookkeep(self, step_result: Any, *args: Any, **settings: Any) -> Any:
        """Report the results of a step, also for requests whose future has been cancelled.

        If this raises, the next step reports the requests that have ended, and requests that lack a token are queued
        again.
        """
        step = StepReport(step_result, self.requests, self._states)
        try:
            for entry in step.mark_leaving(self.failed_request_ids):
                if entry.future.done():
                    entry.future = self._loop.create_future()
            step.append(self.controller.tokenizer.detokenize)
            step_result = step.rest()
            self._new_tokens = () if step_result is None else step_result["kept_tokens"]
            self._before_report(step_result)
            report = await super().async_bookkeep(step_result, *args, **settings)
            for record in () if self.use_coordinator else report["finished_request_records"]:
                join_texts(record, self.controller.tokenizer.detokenize)
        except BaseException as error:
            for record in step.ended(None if self.use_coordinator else self.controller.tokenizer.detokenize):
                self._unreported.append(record)
                self._forget(record.request_id)
            step.take_back(self.context.running_requests, self.failed_request_ids)
            self._recover(error)
            raise
        report["finished_request_records"][:0] = self._unreported
        self._unreported.clear()
        for record in report["finished_request_records"]:
            record[0].sampling_params.weights_versions = self.weights_versions(record.request_id)
        if step_result is not None:
            self._change_version()  # a step launched earlier has been reported
        return report

    @override
    def post_process_requests(
        self, request_ids: Any, finished_request_ids: Any, evict_request_ids: Any, step_time: float, *args: Any
    ) -> Any:
        """Append the step's tokens to the requests; move evicted requests to the head of the queue."""
        numbers: list[int] = request_ids.tolist()
        in_prefill = self.context.chunked_prefill_request_id != -1  # the request in prefill gets no token
        all_continue = not len(finished_request_ids) and evict_request_ids is None
        if all_continue and not (in_prefill or self._failed_steps):
            append_tokens(self.requests, numbers, self._new_tokens, [step_time])
            return numbers, []
        append_tokens(self.requests, numbers, [new[:-1] for new in self._new_tokens], [])
        outcome = super().post_process_requests(request_ids, finished_request_ids, None, step_time, *args)
        for request_id in numbers if self._failed_steps else ():
            if request_id not in self.requests or self.get_request(request_id).generated_tokens:
                self._failed_steps.forget(request_id)
        if evict_request_ids is not None:
            evicted = evict_request_ids.tolist()
            self.evicted_request_count += len(evicted)
            self._queue_again(list(reversed(evicted)))
            for request_id in evicted:
                self.get_request(request_id).add_event_evict()
        for request_id in finished_request_ids.tolist():
            self._forget(request_id)
        return outcome

    @override
    def _check_stop_words_for_request_post_append(self, request: Any) -> bool:
        """Return False: a request that has generated a stop string has already ended."""
        return False

    def _refuse_failed_grammars(self) -> None:
        """Fail the requests whose grammar does not allow any further token."""
        failures, ranks = self.context.grammars.take_failures(), self.context.ranks
        if ranks.num_stages > 1:  # only the last stage computes token masks
            requests = self.context.running_requests
            with_grammar = {request.request_id for request in requests if request.spec.sampling.grammar}
            found = {request_id: reason for request_id, reason in failures.items() if request_id in with_grammar}
            failures = known_to_any(found, ranks) if with_grammar else {}
        for request_id, reason in failures.items():
            if request_id in self.requests and request_id not in self.failed_request_ids:
                self.context.drop_requests([request_id])
                self._refuse(self.get_request(request_id), reason)

    def _prefetch(self) -> None:
        """Start prefetches for the head of the queue while steps overlap."""
        head = tuple(islice(self.waiting_request_ids, PREFETCH_WINDOW))
        if head != self._looked_at:
            self._looked_at = head
            self.context.runner.step_requests.prefetch(self.scheduler, [*self._candidates(head)])

    def _is_at_rest(self) -> bool:
        """Return whether the next step may be launched early: no request waits to run alone, and nothing pauses."""
        return not (self._failed_steps or self.is_paused)

    def _admissible(self) -> Iterable[int]:
        """Return the ids of waiting requests that may join the step; to run one alone, queue all others again."""
        isolated = self._failed_steps.next_isolated()
        if isolated is None:
            return self.waiting_request_ids
        self._send_back(
            [request.request_id for request in self.context.running_requests if request.request_id != isolated]
        )
        return [isolated] if isolated in self.waiting_request_ids else []

    def _before_report(self, step_result: Any) -> None:
        """Hook for subclasses, called after drafts are counted and before the step is reported; it may raise."""

    def _drop_failed_step(self, error: BaseException) -> None:
        """Drop a failed step; if the engine continues, take part in the collectives that other ranks wait for."""
        runner = self.context.runner
        runner.drop_failed_step()
        if isinstance(error, Exception | asyncio.CancelledError):
            complete_failed_step(self.controller.inference_wrapped_model, runner)

    def _recover(self, error: BaseException) -> None:
        """After a failed step, queue requests again if the context dropped them or their record lacks a result."""
        self.failed_request_ids = [request_id for request_id in self.failed_request_ids if request_id in self.requests]
        self._note_version()
        suspended = self.resume_request_ids if self.is_suspended else ()
        elsewhere = {*self.waiting_request_ids, *self.failed_request_ids, *suspended}
        requests = {request.request_id: request for request in self.context.running_requests}
        astray = [
            request_id
            for request_id, entry in self.requests.items()
            if request_id not in elsewhere
            and not (request_id in requests and is_reported(requests[request_id], entry.record[-1]))
        ]
        self._send_back(astray)
        in_hand = self.scheduler.take_in_hand()
        if not isinstance(error, Exception):  # the process is stopping; no request caused this
            return
        if not (self.context.is_tensor_state_allocated or self.is_suspended):  # a closed engine runs no request again
            in_hand = next(iter(self._admissible()), None)
        refused = self._failed_steps.count(astray if in_hand is None else [in_hand])
        self.context.drop_requests(refused)
        for request_id in refused:
            self._refuse(self.get_request(request_id), refusal_reason(error))

    def _send_back(self, request_ids: Sequence[int]) -> None:
        """Stop admitted requests and move them to the head of the queue, oldest first."""
        self.context.drop_requests(request_ids)
        self._queue_again(sorted(request_ids, key=self._age_of))

    def _age_of(self, request_id: int) -> float:
        age = self._states[request_id].age
        return math.inf if age is None else age  # a request that was never admitted sorts last

    def _queue_again(self, request_ids: list[int]) -> None:
        """Insert requests at the head of the queue in the given order."""
        self.context.note_change()
        for request_id in reversed(request_ids):
            self._restart(request_id)
            if request_id in self.waiting_request_ids:
                self.waiting_request_ids.remove(request_id)
            self.waiting_request_ids.appendleft(request_id)

    def _forget(self, request_id: int) -> None:
        self._failed_steps.forget(request_id)
        if self.context.is_tensor_state_allocated:
            self.context.cache.tiers.forget(request_id)
        super()._forget(request_id)

    def _candidates(self, request_ids: Iterable[int]) -> Iterator[Candidate]:
        return (self._states[request_id].candidate for request_id in request_ids)

    def _refuse(self, request: Any, reason: str) -> asyncio.Future:
        """Mark a request as failed; the next step reports it."""
        request_id = request.request_id
        if request_id not in self.requests:
            self.requests[request_id] = self._entry_of(request)
        if request_id in self.waiting_request_ids:
            self.waiting_request_ids.remove(request_id)
        if request_id not in self.failed_request_ids:
            self.failed_request_ids.append(request_id)
        self._forget(request_id)
        complete_parts(self.requests[request_id].record)
        request.status = Status.FAILED
        request.events.clear()
        request.add_event_error_nontransient(ContextOverflowError(request_id, reason, is_transient=False))
        return self.requests[request_id].future


def _in_use(request_id: int) -> ValueError:
    return ValueError(f"request id {request_id} is in use; give each request a different id")
