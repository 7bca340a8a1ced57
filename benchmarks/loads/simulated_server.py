"""Simulated server without a model: requests use the real scheduler, cache and tiers on a simulated clock.

Admission, prefill chunks, published states, block growth, eviction and copies between tiers are those of the engine.
Only the forward pass is missing; it takes a given time. Decode steps without events are simulated at once, up to the
next arrival, end of a copy, block boundary or end of a request.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from megatron_mamba_cache.planning.plan import BlockText, RecordedKeys, block_texts
from megatron_mamba_cache.planning.recorded_load import RecordedLoad
from megatron_mamba_cache.policy.admission import Refusal
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from megatron_mamba_cache.policy.request_settings import RequestSpec, SamplingSettings
from megatron_mamba_cache.policy.requests import Candidate, RunningRequest
from megatron_mamba_cache.policy.running_requests import RunningRequests
from megatron_mamba_cache.policy.scheduler import StepScheduler
from megatron_mamba_cache.policy.tiers.cache_tiers import HostTier

from .timed_copies import Clock, TimedCopies

_ANY_TOKEN = 0


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request and its arrival.

    Args:
        after: Index of the request whose end this request waits for; None: it arrives relative to the start of the
            load.
        delay_s: Seconds from that end, or from the start of the load, to the arrival.
    """

    text: BlockText
    after: int | None
    delay_s: float


def open_loop(load: RecordedLoad, block_size: int) -> list[TimedRequest]:
    """Return the requests with their recorded arrival times, independent of the server."""
    texts = block_texts(load, block_size)
    return [TimedRequest(text, None, request.arrival_s) for request, text in zip(load.requests, texts, strict=True)]


def closed_loop(load: RecordedLoad, block_size: int) -> list[TimedRequest]:
    """Return the requests so that each request of an agent arrives after the preceding reply.

    The time from the end of a request to the arrival of the agent's next request equals the recorded time between their
    arrivals. The first request of a sub-agent follows the preceding request of its session; the first request of a
    session arrives at its recorded time.
    """
    last: dict[tuple[int, int], int] = {}  # index of the last request by (session, agent)
    timed = []
    texts: Sequence[BlockText] = block_texts(load, block_size)
    for index, (request, text) in enumerate(zip(load.requests, texts, strict=True)):
        agent = request.session, request.agent
        after = last.get(agent, last.get((request.session, 0)))
        start = 0.0 if after is None else load.requests[after].arrival_s
        timed.append(TimedRequest(text, after, request.arrival_s - start))
        last[agent] = index
    return timed


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits of a step, and its simulated duration.

    Args:
        decode_rows, decode_steps_s: Numbers of decoding requests, and the seconds that their steps take; times for
            other numbers are interpolated linearly.
        prompt_token_s: Seconds that each prompt token adds to a step.
    """

    max_requests: int
    max_tokens: int
    decode_rows: tuple[int, ...]
    decode_steps_s: tuple[float, ...]
    prompt_token_s: float

    def step_s(self, num_decoding: int, num_prompt_tokens: int) -> float:
        """Return the duration of a step in seconds."""
        prompt_s = num_prompt_tokens * self.prompt_token_s
        if not num_decoding:
            return prompt_s
        return prompt_s + float(np.interp(num_decoding, self.decode_rows, self.decode_steps_s))


@dataclass(slots=True)
class ServedRequest:
    """Outcome of a request: numbers of prompt tokens, and times in seconds since the start of the load.

    Args:
        skipped: Prompt tokens that needed no prefill at the first admission.
        restored: Number of skipped tokens that were restored from the host.
        copy_wait_s: Seconds that the request waited for a copy before it could be admitted.
    """

    prompt_len: int
    arrived_s: float
    skipped: int = 0
    restored: int = 0
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0
    copy_wait_s: float = 0.0

    @property
    def time_to_first_token(self) -> float:
        """Seconds from the arrival to the first token."""
        return self.first_token_s - self.arrived_s


class SimulatedServer:
    """Serves timed requests once.

    Args:
        copies: Simulated copies between GPU and host; unused without a tier.
        tier: Host tier of the cache; None: no host tier.
    """

    def __init__(
        self,
        requests: Sequence[TimedRequest],
        cache: PrefixCache,
        settings: ServerSettings,
        clock: Clock,
        copies: TimedCopies,
        tier: HostTier | None = None,
    ) -> None:
        self.served: dict[int, ServedRequest] = {}
        self.num_preempted = 0
        self._requests = requests
        self._cache = cache
        self._settings = settings
        self._clock = clock
        self._copies = copies
        self._tier = tier
        self._scheduler = StepScheduler()
        self._running = _ObservedRequests(cache, settings.max_requests, settings.max_tokens)
        self._queue: list[int] = []
        self._candidates: dict[int, Candidate] = {}
        self._followers: dict[int | None, list[int]] = {}
        for number, request in enumerate(requests):
            self._followers.setdefault(request.after, []).append(number)
        self._arrivals: list[tuple[float, int]] = []
        self._expect_followers(None)

    def run(self) -> list[ServedRequest]:
        """Serve all requests; return their outcomes in the order of the requests.

        Raises:
            RuntimeError: If a request does not fit into an empty cache.
        """
        while self._arrivals or self._queue or self._running:
            self._receive()
            if self._tier is not None:
                self._tier.land()
            self._schedule()
            self._start_copies()
            if self._running:
                self._step()
            else:
                self._idle()
        return [self.served[number] for number in range(len(self._requests))]

    def _expect_followers(self, number: int | None) -> None:
        for follower in self._followers.get(number, ()):
            heapq.heappush(self._arrivals, (self._clock.now + self._requests[follower].delay_s, follower))

    def _receive(self) -> None:
        while self._arrivals and self._arrivals[0][0] <= self._clock.now:
            arrived_s, number = heapq.heappop(self._arrivals)
            text = self._requests[number].text
            self.served[number] = ServedRequest(text.prompt_len, arrived_s)
            self._candidates[number] = self._candidate(number, text)
            self._queue.append(number)

    def _candidate(self, number: int, text: BlockText, num_replayed: int = 0, age: int | None = None) -> Candidate:
        prompt = np.broadcast_to(np.int64(_ANY_TOKEN), text.prompt_len)  # takes no memory
        most = max(text.length, text.prompt_len + 1)
        spec = RequestSpec(number, prompt, most, SamplingSettings(), num_replayed=num_replayed)
        return Candidate(spec, age, RecordedKeys(text, self._cache.block_size), self._cache.epoch)

    def _schedule(self) -> None:
        self._running.waiting_for_copy.clear()
        waiting = [self._candidates[number] for number in self._queue]
        new = {candidate.request_id for candidate in waiting if candidate.age is None}
        step = self._scheduler.fill_step(self._running, waiting)
        for request in step.admitted:
            number = request.request_id
            self._queue.remove(number)
            if number in new:
                served = self.served[number]
                served.skipped, served.restored = request.computed, request.from_host
                served.admitted_s = self._clock.now

    def _start_copies(self) -> None:
        if self._tier is not None:
            self._tier.start()

    def _idle(self) -> None:
        events = [self._copies.next_end(), *(arrival for arrival, _ in self._arrivals[:1])]
        if min(events) == inf:
            raise RuntimeError(f"every request must fit into an empty cache, but request {self._queue[0]} does not")
        self._pass_time_until(min(events))

    def _step(self) -> None:
        decoding = self._running.decoding
        prefilling = [request for request in self._running.prefilling if request.scheduled]
        num_tokens = sum(request.scheduled for request in prefilling)
        step_s = self._settings.step_s(len(decoding), num_tokens)
        num_quiet = 0 if prefilling else self._take_quiet_steps(decoding, step_s)
        for request in decoding:
            self._cache.schedule_decode(request)
        for request in prefilling:
            self._cache.publish(request, request.scheduled)
        self._pass_time_until(self._clock.now + step_s * (num_quiet + 1))
        ended = [request for request in (*decoding, *prefilling) if self._advance(request)]
        self._running.drop(ended)
        for request in ended:
            self.served[request.request_id].ended_s = self._clock.now
            del self._candidates[request.request_id]
            self._expect_followers(request.request_id)
        self._grow()
        self._start_copies()

    def _take_quiet_steps(self, decoding: Sequence[RunningRequest], step_s: float) -> int:
        """Simulate decode steps until the next event, except the last; return their number."""
        block = self._cache.block_size
        quiet = (
            min(min(block - request.computed % block, request.spec.max_len - request.length) for request in decoding)
            - 1
        )
        next_event = min(self._copies.next_end(), self._arrivals[0][0] if self._arrivals else inf)
        if next_event < inf:
            quiet = min(quiet, max(ceil((next_event - self._clock.now) / step_s) - 1, 0))
        for request in decoding if quiet else ():
            request.append([_ANY_TOKEN] * quiet)
            request.advance(quiet)
        return quiet

    def _advance(self, request: RunningRequest) -> bool:
        """Advance the request by one step; return True if this was its last step."""
        samples, is_prefilling = request.samples_this_step, request.is_prefilling
        if samples:
            request.append([_ANY_TOKEN])
        if not is_prefilling:
            self._cache.publish(request, request.scheduled)
        elif samples and not request.spec.num_replayed:
            self.served[request.request_id].first_token_s = self._clock.now
        self._cache.advance(request, request.scheduled)
        return samples and request.length >= request.spec.max_len

    def _grow(self) -> None:
        evicted = self._running.grow(self._cache.kv.num_blocks // 4).evicted
        self.num_preempted += len(evicted)
        for request in evicted:
            text = self._requests[request.request_id].text
            longer = BlockText(text.keys, request.length, text.length)
            num_replayed = request.spec.num_replayed + len(request.generated)
            self._candidates[request.request_id] = self._candidate(
                request.request_id, longer, num_replayed, request.age
            )
            self._queue.insert(0, request.request_id)

    def _pass_time_until(self, now: float) -> None:
        for number in self._running.waiting_for_copy:
            self.served[number].copy_wait_s += now - self._clock.now
        self._clock.now = now


class _ObservedRequests(RunningRequests):
    """Records which requests are not admitted because their prefix is still being copied.

    Attributes:
        waiting_for_copy: Requests that waited for a copy in the current step.
    """

    def __init__(self, cache: PrefixCache, max_requests: int, max_tokens: int) -> None:
        super().__init__(cache, max_requests, max_tokens)
        self.waiting_for_copy: list[int] = []

    def admit(self, candidate: Candidate, budget: int, following: Iterable[Candidate] = ()) -> RunningRequest | Refusal:
        outcome = super().admit(candidate, budget, following)
        if outcome is Refusal.WAITS_FOR_COPY:
            self.waiting_for_copy.append(candidate.spec.request_id)
        return outcome
