"""Simulated decode steps, with step times estimated from a model's reads, and randomly accepted drafts."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.speculation.all_drafts import AllDrafts
from megatron_mamba_cache.speculation.draft_policy import DraftPolicy
from megatron_mamba_cache.speculation.step_time import GPU, StepReads, StepTime
from tests.speculation.running_requests import request_of

MOST = 4
"""Most drafts of a request."""
NO_LIMIT = 1 << 30
REPLY = 128
"""Tokens of a request, after which another one replaces it."""

DENSE_8B = StepReads(
    num_layers=52,
    weights=16_200_000_000,
    expert=0,
    num_experts=0,
    chosen=0.0,
    num_expert_ranks=1,
    state=100_000_000,
    draft=0,
    cached_token=16_384,
    macs=8_100_000_000,
)
NANO_30B = StepReads(
    num_layers=52,
    weights=5_000_000_000,
    expert=459_000_000,
    num_experts=128,
    chosen=6 / 128,
    num_expert_ranks=1,
    state=48_000_000,
    draft=0,
    cached_token=6144,
    macs=3_500_000_000,
)
MODELS = {"8b": DENSE_8B, "nano": NANO_30B}


def time_of(reads: StepReads, most: int = MOST) -> StepTime:
    """Return the estimated step times of a model on an H200."""
    return StepTime(reads, GPU, 1 + most)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Number of tokens, number of drafts, and time of the simulated steps."""

    num_tokens: int
    seconds: float
    num_drafted: int

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


def simulate(
    policy: DraftPolicy | AllDrafts,
    time: StepTime,
    num_requests: int,
    probability: Callable[[int], float],
    *,
    num_steps: int,
    offers: float = 1.0,
    seed: int = 0,
) -> Simulated:
    """Simulate steps with `num_requests` concurrent requests.

    A step is overlapped if drafting was paused for all its requests before it, and no request joins. Other steps wait
    for the host, with or without drafts.

    Args:
        probability: Function from a request id to the acceptance probability of its draft tokens.
        offers: Fraction of the requests for which the drafter proposes tokens.
    """
    rng = random.Random(seed)
    numbers, shadowed = count(), _ShadowDrafts(policy, probability, offers, rng)
    requests = [_request(next(numbers)) for _ in range(num_requests)]
    num_tokens, seconds, num_drafted = 0, 0.0, 0
    joined = True
    for _ in range(num_steps):
        waits = not joined and not policy.stays_paused(requests)
        wanted = policy.counts(requests, [MOST] * num_requests, NO_LIMIT)
        proposed = [found if rng.random() < offers else 0 for found in wanted]
        counts = policy.of_proposed(requests, proposed)
        num_cached = sum(request.computed for request in requests)
        seconds += time.seconds(num_requests, sum(counts), num_cached)
        seconds += time.device.drafts_s if waits and not any(counts) else 0.0
        policy.decide_next(requests, MOST)
        for request, drafted in zip(requests, counts, strict=True):
            kept = _num_kept(rng, probability(request.request_id), drafted)
            if drafted:
                policy.note([request.request_id], [drafted], [kept])
            request.computed += 1 + kept
            num_tokens += 1 + kept
        num_drafted += sum(counts)
        policy.note_step(requests, asked=any(wanted), drafted=any(counts))
        shadowed.compare(requests)
        before, requests = requests, list(_with_new(requests, policy, numbers))
        joined = requests != before
    return Simulated(num_tokens, seconds, num_drafted)


class _ShadowDrafts:
    """Simulated shadow drafts of paused requests; each is evaluated once its outcome is known."""

    def __init__(
        self, policy: DraftPolicy | AllDrafts, probability: Callable[[int], float], offers: float, rng: random.Random
    ) -> None:
        self._policy, self._probability, self._offers, self._rng = policy, probability, offers, rng
        self._begun: dict[int, tuple[int, int]] = {}  # request id -> (number correct, steps until it is known)

    def compare(self, requests: Sequence[RunningRequest]) -> None:
        """Update the policy as the planner does after a step."""
        shadowed = self._policy.shadowed(requests)
        for request in shadowed:
            right, left = self._begun.pop(request.request_id, (0, 0))
            if left > 1:
                self._begun[request.request_id] = right, left - 1
                continue
            if left:
                self._policy.note_shadows([(request.request_id, MOST, right)])
            if self._rng.random() < self._offers:
                right = _num_kept(self._rng, self._probability(request.request_id), MOST)
                self._begun[request.request_id] = right, min(right + 1, MOST)
        self._policy.resume_if_faster(shadowed, [MOST * (request.request_id in self._begun) for request in shadowed])


def plain_steps(time: StepTime, num_requests: int, num_steps: int) -> Simulated:
    """Simulate steps without drafts."""
    return simulate(NoDraftPolicy(time), time, num_requests, lambda _id: 0.0, num_steps=num_steps)


class NoDraftPolicy(DraftPolicy):
    """Policy that never drafts."""

    def counts(self, requests: Sequence[RunningRequest], max_counts: Sequence[int], budget: int) -> list[int]:
        return [0] * len(requests)

    def stays_paused(self, requests: Sequence[RunningRequest]) -> bool:
        return True


class FixedCounts(AllDrafts):
    """Policy that drafts the same number of tokens in every step."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def counts(self, requests: Sequence[RunningRequest], max_counts: Sequence[int], budget: int) -> list[int]:
        return [min(self._num_drafts, room) for room in max_counts]


def wider(time: StepTime, num_ranks: int) -> StepTime:
    """Return the step times of a rank of a model whose experts are split across `num_ranks` ranks."""
    reads = replace(time.reads, num_experts=time.reads.num_experts // num_ranks, num_expert_ranks=num_ranks)
    return replace(time, reads=reads)


def _request(request_id: int) -> RunningRequest:
    request = request_of([0] * 8, request_id=request_id)
    request.computed = 300 + 37 * request_id % REPLY
    return request


def _num_kept(rng: random.Random, probability: float, num_drafted: int) -> int:
    kept = 0
    while kept < num_drafted and rng.random() < probability:
        kept += 1
    return kept


def _with_new(
    requests: Sequence[RunningRequest], policy: DraftPolicy | AllDrafts, numbers: Iterator[int]
) -> Iterator[RunningRequest]:
    """Yield the requests, with a new request in place of each that has ended."""
    for request in requests:
        if request.computed < 300 + REPLY:
            yield request
        else:
            policy.forget(request.request_id)
            started = _request(next(numbers))
            started.computed = 300
            yield started
