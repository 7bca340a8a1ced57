"""A server without a model: conversations go through the real prefix cache, step by step, on a simulated clock.

Admission, prefill chunks, publishing, decode checkpoints, growth and eviction are those of an engine; only the forward
is missing, and tokens are synthetic. Decode steps in which no row reaches a block boundary change nothing in the cache,
so runs of them are taken at once.
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
    """The simulated server: limits of a step, and how long one takes."""

    max_requests: int = 16
    max_tokens: int = 8192
    decode_step_s: float = 0.008
    prefill_token_s: float = 25e-6
    vocab_size: int = 100_000


@dataclass(slots=True)
class Tally:
    """Prompt tokens at every turn's first admission, and how many of them were skipped."""

    requests: int = 0
    prompt_tokens: int = 0
    skipped_tokens: int = 0
    computed_tokens: int = 0  # in prefill, after evictions of running requests too

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were skipped."""
        return self.skipped_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Observer:
    """Is notified of what requests hold and hit; this base class ignores it."""

    def admitted(self, row: RunningRequest) -> None:
        """A row was admitted."""

    def released(self, row: RunningRequest) -> None:
        """A row is about to give back what it holds."""

    def stepped(self, cache: PrefixCache) -> None:
        """A step has ended."""


@dataclass(slots=True)
class _Visit:
    """The progress of a conversation: the turn that waits or runs, and the text before its reply."""

    session: Conversation
    turn: int = 0
    history: Text = field(default_factory=lambda: np.empty(0, np.int64))
    reply: Text = field(default_factory=lambda: np.empty(0, np.int64))


class ServedLoad:
    """Serves conversations through a cache."""

    def __init__(
        self, cache: PrefixCache, server: Server, sessions: Sequence[Conversation], observer: Observer, seed: int = 0
    ) -> None:
        self.tally = Tally()
        self._cache = cache
        self._server = server
        self._observer = observer
        self._replies = np.random.default_rng(seed)
        self._now = 0.0
        self._rows: list[RunningRequest] = []
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
        while self._arrivals or self._waiting or self._rows:
            if not self._rows and not self._waiting:
                self._now = max(self._now, self._arrivals[0][0])
            self._receive()
            self._fill_step()
            if not self._rows:
                raise RuntimeError("need room for the oldest request in an empty server, found none")
            self._step()

    def _reply_lengths(self, session: Conversation) -> list[Text]:
        # Drawn beforehand: what a reply says must not depend on when it is served.
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
        budget = self._server.max_tokens - sum(not row.is_prefilling for row in self._rows)
        for row in self._rows:
            if row.is_prefilling:
                self._cache.schedule_chunk(row, min(row.computed + budget, row.spec.prompt_len))
                budget -= row.scheduled
        passed_over: list[Candidate] = []
        if any(row.is_paused for row in self._rows):
            return
        while self._waiting and len(self._rows) < self._server.max_requests and budget > 0:
            candidate = self._waiting.popleft()
            plan = self._cache.plan(candidate, budget)
            if isinstance(plan, AdmissionPlan):
                is_new = candidate.age is None
                row = self._cache.admit(candidate, plan)
                budget -= row.scheduled
                self._count_admission(row, is_new=is_new)
                continue
            passed_over.append(candidate)
            if plan is not Refusal.WAITS_FOR_PREFIX:
                break
        self._waiting.extendleft(reversed(passed_over))

    def _count_admission(self, row: RunningRequest, *, is_new: bool) -> None:
        self._rows.append(row)
        self._observer.admitted(row)
        if is_new:
            self.tally.requests += 1
            self.tally.prompt_tokens += row.spec.prompt_len
            self.tally.skipped_tokens += row.computed

    def _step(self) -> None:
        running = [row for row in self._rows if not row.is_paused]
        num_prefill = sum(row.scheduled for row in running)
        self.tally.computed_tokens += num_prefill
        steps = 1 if num_prefill else self._skip_quiet_steps(running)
        self._now += steps * self._server.decode_step_s + num_prefill * self._server.prefill_token_s
        for row in running:
            if not row.is_prefilling:
                self._cache.schedule_decode(row)
        for row in running:
            if row.is_prefilling:
                self._cache.publish(row, row.scheduled)
        ended = [row for row in running if self._advance(row)]
        for row in ended:
            self._leave(row)
        outcome = grow_requests(self._rows, self._cache, self._cache.kv.num_blocks // 4)
        for row in outcome.evicted:
            self._rows.remove(row)
            prompt = np.array([*row.spec.prompt.tolist(), *row.generated], np.int64)
            replayed = row.spec.num_replayed + len(row.generated)
            self._wait(row.request_id, prompt, row.spec.max_len, replayed, row.age)
        self._observer.stepped(self._cache)

    def _skip_quiet_steps(self, running: Sequence[RunningRequest]) -> int:
        """Take all but the last of the decode steps in which nothing happens; return how many there are with it."""
        block = self._cache.block_size
        quiet = min(min(block - row.computed % block, row.spec.max_len - row.length) for row in running) - 1
        if self._arrivals and len(self._rows) < self._server.max_requests:
            until = int((self._arrivals[0][0] - self._now) / self._server.decode_step_s)
            quiet = min(quiet, max(until, 0))
        for row in running if quiet > 0 else ():
            row.generated.extend(self._next_tokens(row, quiet))
            row.computed += quiet
        return max(quiet, 0) + 1

    def _next_tokens(self, row: RunningRequest, count: int) -> list[int]:
        visit = self._visits[row.request_id]
        start = row.length - len(visit.history)
        return visit.reply[start : start + count].tolist()

    def _advance(self, row: RunningRequest) -> bool:
        """End the row's step; return whether it was its last."""
        samples, is_prefilling = row.samples_this_step, row.is_prefilling
        if samples:
            row.generated.extend(self._next_tokens(row, 1))
        if not is_prefilling:
            self._cache.publish(row, row.scheduled)
        self._cache.advance(row, row.scheduled)
        return samples and row.length >= row.spec.max_len

    def _leave(self, row: RunningRequest) -> None:
        self._observer.released(row)
        self._cache.release(row)
        self._rows.remove(row)
        visit = self._visits[row.request_id]
        visit.history = np.concatenate([visit.history, visit.reply])
        visit.turn += 1
        if visit.turn < len(visit.session.turns):
            arrival = self._now + visit.session.turns[visit.turn].think_s
            heapq.heappush(self._arrivals, (arrival, row.request_id))
