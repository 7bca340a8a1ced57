"""The running requests of one prefix cache: admission, growth and removal."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from .admission import Refusal
from .block_growth import GrowthOutcome, grow_requests, resume_requests
from .prefix_cache import PrefixCache
from .requests import Candidate, RunningRequest


class RequestCounts(NamedTuple):
    """Number of running requests, and number of tokens that they compute in the next step.

    Args:
        paused: Number of requests that compute nothing in the next step: prompts in mid-prefill that get no tokens, and
            requests that lack a KV block.
        prefilling: Number of requests that compute prompt tokens.
        tokens: Number of tokens to compute, without drafts.
    """

    requests: int = 0
    paused: int = 0
    prefilling: int = 0
    tokens: int = 0


class RunningRequests:
    """Running and paused requests of one prefix cache, in order of admission.

    Args:
        max_requests: Maximum number of running and paused requests.
        max_tokens: Maximum number of tokens per step.
        max_mixed_prompt_tokens: Maximum number of prompt tokens in a step with decode requests; None for no limit.
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
        """True if `max_requests` requests are running or paused."""
        return len(self._requests) >= self._max_requests

    @property
    def num_free(self) -> int:
        """Number of requests that can join before `max_requests` is reached."""
        return max(self._max_requests - len(self._requests), 0)

    @property
    def oldest_first(self) -> Sequence[RunningRequest]:
        """All requests, in order of admission."""
        return self._requests

    @property
    def decoding(self) -> list[RunningRequest]:
        """Requests that decode in the next step, in order."""
        return [request for request in self._requests if not request.is_paused and not request.is_prefilling]

    @property
    def prefilling(self) -> list[RunningRequest]:
        """Requests with prompt tokens left to compute."""
        return [request for request in self._requests if request.is_prefilling]

    @property
    def any_paused(self) -> bool:
        """True if a request waits for a KV block."""
        return any(request.is_paused for request in self._requests)

    @property
    def counts(self) -> RequestCounts:
        """Request and token counts of the next step, without drafts."""
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
        """Number of tokens that the next step may still compute."""
        return self._max_tokens - self.counts.tokens

    @property
    def prompt_budget(self) -> int:
        """Number of prompt tokens that the next step may still compute."""
        counts = self.counts
        num_decoding = counts.requests - counts.paused - counts.prefilling
        budget = self._max_tokens - counts.tokens
        return min(budget, self._max_mixed_prompt_tokens - (counts.tokens - num_decoding)) if num_decoding else budget

    def admit(self, candidate: Candidate, budget: int, following: Iterable[Candidate] = ()) -> RunningRequest | Refusal:
        """Admit a request and schedule its first prefill chunk, or return why it cannot be admitted.

        Args:
            budget: Maximum number of this request's tokens in the step.
            following: Next requests in the queue. The admitted request caches states where their prompts diverge from
                its own.
        """
        if self.is_full:
            return Refusal.TOO_MANY_REQUESTS
        follows_prompts = self.counts.prefilling > 0
        plan = self.cache.plan(candidate, budget, follows_prompts=follows_prompts)
        # Without running requests, only restores for other waiting requests can free memory.
        while plan in (Refusal.NO_BLOCKS, Refusal.NO_SLOT) and not self._requests:
            if not self.cache.tiers.make_room(candidate.request_id):
                break
            plan = self.cache.plan(candidate, budget, follows_prompts=follows_prompts)
        if isinstance(plan, Refusal):
            self.cache.counters.admissions_deferred += plan is Refusal.WAITS_FOR_PREFIX
            return plan
        request = self.cache.admit(candidate, plan, self.cache.branches(candidate, following))
        self._requests.append(request)
        return request

    def drop(self, requests: Collection[RunningRequest]) -> None:
        """Remove requests; their published blocks and states stay cached. If one raises, the rest stay."""
        for request in list(requests):
            self._release(request)

    def grow(self, paused_capacity: int) -> GrowthOutcome:
        """Give decode requests their next KV blocks; if needed, first release blocks restored for waiting requests."""
        if self.cache.tiers.takes_room and self.cache.kv.num_available < len(self._requests):
            self.cache.tiers.make_room()
        return grow_requests(list(self._requests), self.cache, paused_capacity, self._release)

    def resume(self) -> None:
        """Resume paused requests, in order, while KV blocks are available."""
        resume_requests(self._requests, self.cache)

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless requests, blocks and slots agree."""
        self.cache.check_integrity(self._requests)

    def _release(self, request: RunningRequest) -> None:
        self.cache.release(request)
        self._requests.remove(request)
