"""The running requests, and every change of which ones those are."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from .admission import Refusal
from .block_growth import GrowthOutcome, grow_requests, resume_requests
from .prefix_cache import PrefixCache
from .requests import Candidate, RunningRequest


class RequestCounts(NamedTuple):
    """Counts of running requests and of the tokens that they compute in the next step.

    Args:
        paused: Requests that compute nothing: those without a KV block for their next token, and prompts that wait.
        prefilling: Requests that compute prompt tokens.
        tokens: Tokens to compute, without drafts.
    """

    requests: int = 0
    paused: int = 0
    prefilling: int = 0
    tokens: int = 0


class RunningRequests:
    """Requests over one prefix cache, oldest admission first, paused ones included.

    Args:
        max_requests: Most requests at a time.
        max_tokens: Most tokens of a step.
        max_mixed_prompt_tokens: Most prompt tokens of a step in which requests decode; None: as many as fit.
    """

    def __init__(
        self, cache: PrefixCache, max_requests: int, max_tokens: int, max_mixed_prompt_tokens: int | None = None
    ) -> None:
        self.cache = cache
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._max_mixed_prompt_tokens = max_tokens if max_mixed_prompt_tokens is None else max_mixed_prompt_tokens
        self._requests: list[RunningRequest] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(self._requests)

    @property
    def is_full(self) -> bool:
        """True when no request can join before another ends, whatever memory there is."""
        return len(self._requests) >= self._max_requests

    @property
    def num_free(self) -> int:
        """Number of requests that can join before another ends."""
        return max(self._max_requests - len(self._requests), 0)

    @property
    def oldest_first(self) -> Sequence[RunningRequest]:
        """All requests, in order."""
        return self._requests

    @property
    def decoding(self) -> list[RunningRequest]:
        """Requests that decode in the next step."""
        return [request for request in self._requests if not request.is_paused and not request.is_prefilling]

    @property
    def prefilling(self) -> list[RunningRequest]:
        """Requests with prompt tokens left to compute."""
        return [request for request in self._requests if request.is_prefilling]

    @property
    def any_paused(self) -> bool:
        """True when a request waits for a KV block."""
        return any(request.is_paused for request in self._requests)

    @property
    def counts(self) -> RequestCounts:
        """Counts of the next step, without drafts."""
        num_decoding = num_prefilling = num_prompt_tokens = 0
        for request in self._requests:
            if request.is_prefilling:
                num_prefilling += request.scheduled > 0
                num_prompt_tokens += request.scheduled
            elif not request.is_paused:
                num_decoding += 1
        return RequestCounts(
            requests=len(self._requests),
            paused=len(self._requests) - num_prefilling - num_decoding,
            prefilling=num_prefilling,
            tokens=num_decoding + num_prompt_tokens,
        )

    @property
    def budget(self) -> int:
        """Tokens that the next step may still compute."""
        return self._max_tokens - self.counts.tokens

    @property
    def prompt_budget(self) -> int:
        """Prompt tokens that the next step may still compute."""
        counts = self.counts
        num_decoding = counts.requests - counts.paused - counts.prefilling
        budget = self._max_tokens - counts.tokens
        return min(budget, self._max_mixed_prompt_tokens - (counts.tokens - num_decoding)) if num_decoding else budget

    def admit(self, candidate: Candidate, budget: int, following: Iterable[Candidate] = ()) -> RunningRequest | Refusal:
        """Admit a request with its first prefill chunk in the next step, or return why not.

        Args:
            budget: Tokens of this request that the step may compute.
            following: Requests that wait after it: where they part from its prompt, it keeps a state for them.
        """
        if self.is_full:
            return Refusal.TOO_MANY_REQUESTS
        plan = self.cache.plan(candidate, budget)
        while plan in (Refusal.NO_BLOCKS, Refusal.NO_SLOT) and not self._requests:  # no request will make room
            if not self.cache.tiers.make_room(candidate.request_id):
                break
            plan = self.cache.plan(candidate, budget)
        if isinstance(plan, Refusal):
            self.cache.counters.admissions_deferred += plan is Refusal.WAITS_FOR_PREFIX
            return plan
        request = self.cache.admit(candidate, plan, self.cache.branches(candidate, following))
        self._requests.append(request)
        return request

    def drop(self, requests: Collection[RunningRequest]) -> None:
        """Drop requests; what they published stays findable. If releasing one raises, it and those after it stay."""
        for request in list(requests):
            self._release(request)

    def grow(self, paused_capacity: int) -> GrowthOutcome:
        """Give decoding requests their next KV blocks; what is held for waiting requests makes room first."""
        if self.cache.tiers.takes_room and self.cache.kv.num_available < len(self._requests):
            self.cache.tiers.make_room()
        return grow_requests(list(self._requests), self.cache, paused_capacity, self._release)

    def resume(self) -> None:
        """Resume paused requests while KV blocks last, after others left between steps."""
        resume_requests(self._requests, self.cache)

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless requests, blocks and slots agree."""
        self.cache.check_integrity(self._requests)

    def _release(self, request: RunningRequest) -> None:
        self.cache.release(request)
        self._requests.remove(request)
