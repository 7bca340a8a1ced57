"""Simulated server without a model: conversations use the real prefix cache on a simulated clock.

Admission, prefill chunks, published states, block growth and eviction are those of the engine. Only the forward pass is
missing, and tokens are synthetic. A decode step in which no request reaches a block boundary does not change the cache,
so consecutive steps of this kind are simulated at once.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from loads.conversation_load import Conversation

from megatron_mamba_cache.policy.admission import AdmissionPlan, Refusal
from megatron_mamba_cache.policy.block_growth import grow_requests
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from megatron_mamba_cache.policy.request_settings import RequestSpec, SamplingSettings
from megatron_mamba_cache.policy.requests import Candidate, RunningRequest

Text = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Server:
    """Limits of a step, and its simulated duration."""

    max_requests: int = 16
    max_tokens: int = 8192
    decode_step_s: float = 0.008
    prefill_token_s: float = 25e-6
    vocab_size: int = 100_000


@dataclass(slots=True)
class Tally:
    """Numbers of prompt tokens at the first admission of every turn, and of those that were skipped."""

    requests: int = 0
    prompt_tokens: int = 0
    skipped_tokens: int = 0
    computed_tokens: int = 0  # in all prefills, including those after preemptions

    @property
    def hit_rate(self) -> float:
        """Fraction of the prompt tokens that needed no prefill."""
        return self.skipped_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Observer:
    """Observer of a simulated server; this base class does nothing."""

    def admitted(self, request: RunningRequest) -> None:
        """Called after a request was admitted."""

    def released(self, request: RunningRequest) -> None:
        """Called before a request is released."""

    def stepped(self, cache: PrefixCache) -> None:
        """Called after each step."""


@dataclass(slots=True)
class _Visit:
    """Progress of a conversation: its waiting or running turn, and the text before the reply of this turn."""

    session: Conversation
    turn: int = 0
    history: Text = field(default_factory=lambda: np.empty(0, np.int64))
    reply: Text = field(default_factory=lambda: np.empty(0, np.int64))


class ServedLoad:
    """Serves conversations on a simulated server with a real prefix cache."""

    def __init__(
        self, cache: PrefixCache, server: Server, sessions: Sequence[Conversation], observer: Observer, seed: int = 0
    ) -> None:
        self.tally = Tally()
        self._cache = cache
        self._server = server
        self._observer = observer
        self._replies = np.random.default_rng(seed)
        self._now = 0.0
        self._requests: list[RunningRequest] = []
        self._waiting: deque[Candidate] = deque()
        self._visits = [_Visit(session, history=np.array(session.prefix, np.int64)) for session in sessions]
        self._replies_of = [self._reply_lengths(session) for session in sessions]
        self._arrivals = [(s.arrival_s + s.turns[0].think_s, number) for number, s in enumerate(sessions)]
        heapq.heapify(self._arrivals)

    def run(self) -> None:
        """Serve until every conversation has ended.

        Raises:
            RuntimeError: If the memory is too small for a single request.
        """
        while self._arrivals or self._waiting or self._requests:
            if not self._requests and not self._waiting:
                self._now = max(self._now, self._arrivals[0][0])
            self._receive()
            self._fill_step()
            if not self._requests:
                raise RuntimeError("the oldest request does not fit in the cache, even without other requests")
            self._step()

    def _reply_lengths(self, session: Conversation) -> list[Text]:
        # Sampled in advance, because the text of a reply must not depend on when it is served.
        return [self._replies.integers(self._server.vocab_size, size=turn.num_reply) for turn in session.turns]

    def _receive(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._now:
            number = heapq.heappop(self._arrivals)[1]
            visit = self._visits[number]
            new_tokens = np.array(visit.session.turns[visit.turn].new_tokens, np.int64)
            visit.history = np.concatenate([visit.history, new_tokens])
            visit.reply = self._replies_of[number][visit.turn]
            self._wait(number, visit.history, len(visit.history) + len(visit.reply), 0)

    def _wait(self, number: int, prompt: Text, max_len: int, num_replayed: int, age: int | None = None) -> None:
        spec = RequestSpec(number, prompt, max_len, SamplingSettings(), num_replayed=num_replayed)
        if age is None:
            self._waiting.append(Candidate(spec))
        else:
            self._waiting.appendleft(Candidate(spec, age))

    def _fill_step(self) -> None:
        budget = self._server.max_tokens - sum(not request.is_prefilling for request in self._requests)
        for request in self._requests:
            if request.is_prefilling:
                self._cache.schedule_chunk(request, min(request.computed + budget, request.spec.prompt_len))
                budget -= request.scheduled
        passed_over: list[Candidate] = []
        if any(request.is_paused for request in self._requests):
            return
        while self._waiting and len(self._requests) < self._server.max_requests and budget > 0:
            candidate = self._waiting.popleft()
            plan = self._cache.plan(candidate, budget)
            if isinstance(plan, AdmissionPlan):
                is_new = candidate.age is None
                request = self._cache.admit(candidate, plan)
                budget -= request.scheduled
                self._count_admission(request, is_new=is_new)
                continue
            passed_over.append(candidate)
            if plan is not Refusal.WAITS_FOR_PREFIX:
                break
        self._waiting.extendleft(reversed(passed_over))

    def _count_admission(self, request: RunningRequest, *, is_new: bool) -> None:
        self._requests.append(request)
        self._observer.admitted(request)
        if is_new:
            self.tally.requests += 1
            self.tally.prompt_tokens += request.spec.prompt_len
            self.tally.skipped_tokens += request.computed

    def _step(self) -> None:
        running = [request for request in self._requests if not request.is_paused]
        num_prefill = sum(request.scheduled for request in running)
        self.tally.computed_tokens += num_prefill
        steps = 1 if num_prefill else self._skip_quiet_steps(running)
        self._now += steps * self._server.decode_step_s + num_prefill * self._server.prefill_token_s
        for request in running:
            if not request.is_prefilling:
                self._cache.schedule_decode(request)
        for request in running:
            if request.is_prefilling:
                self._cache.publish(request, request.scheduled)
        ended = [request for request in running if self._advance(request)]
        for request in ended:
            self._leave(request)
        outcome = grow_requests(self._requests, self._cache, self._cache.kv.num_blocks // 4)
        for request in outcome.evicted:
            self._requests.remove(request)
            prompt = np.array([*request.spec.prompt.tolist(), *request.generated], np.int64)
            replayed = request.spec.num_replayed + len(request.generated)
            self._wait(request.request_id, prompt, request.spec.max_len, replayed, request.age)
        self._observer.stepped(self._cache)

    def _skip_quiet_steps(self, running: Sequence[RunningRequest]) -> int:
        """Simulate decode steps without events, except the last; return their number, including the last."""
        block = self._cache.block_size
        quiet = (
            min(min(block - request.computed % block, request.spec.max_len - request.length) for request in running) - 1
        )
        if self._arrivals and len(self._requests) < self._server.max_requests:
            until = int((self._arrivals[0][0] - self._now) / self._server.decode_step_s)
            quiet = min(quiet, max(until, 0))
        for request in running if quiet > 0 else ():
            request.generated.extend(self._next_tokens(request, quiet))
            request.computed += quiet
        return max(quiet, 0) + 1

    def _next_tokens(self, request: RunningRequest, count: int) -> list[int]:
        visit = self._visits[request.request_id]
        start = request.length - len(visit.history)
        return visit.reply[start : start + count].tolist()

    def _advance(self, request: RunningRequest) -> bool:
        """Advance the request by one step; return True if this was its last step."""
        samples, is_prefilling = request.samples_this_step, request.is_prefilling
        if samples:
            request.generated.extend(self._next_tokens(request, 1))
        if not is_prefilling:
            self._cache.publish(request, request.scheduled)
        self._cache.advance(request, request.scheduled)
        return samples and request.length >= request.spec.max_len

    def _leave(self, request: RunningRequest) -> None:
        self._observer.released(request)
        self._cache.release(request)
        self._requests.remove(request)
        visit = self._visits[request.request_id]
        visit.history = np.concatenate([visit.history, visit.reply])
        visit.turn += 1
        if visit.turn < len(visit.session.turns):
            arrival = self._now + visit.session.turns[visit.turn].think_s
            heapq.heappush(self._arrivals, (arrival, request.request_id))
