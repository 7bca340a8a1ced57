"""Decode steps of a model that exists only as what its steps read, with drafts that are right by chance."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.speculation.draft_policy import AllDrafts, DraftPolicy
from megatron_mamba_cache.speculation.step_time import GPU, StepReads, StepTime
from tests.speculation.running_requests import row_of

MOST = 4
"""Drafts of a row."""
NO_LIMIT = 1 << 30
REPLY = 128
"""Tokens of a request, after which another takes its place."""

DENSE_8B = StepReads(
    num_layers=52,
    weights=16_200_000_000,
    expert=0,
    num_experts=0,
    chosen=0.0,
    num_expert_ranks=1,
    row=100_000_000,
    draft=0,
    cached_token=16_384,
    products=8_100_000_000,
)
NANO_30B = StepReads(
    num_layers=52,
    weights=5_000_000_000,
    expert=459_000_000,
    num_experts=128,
    chosen=6 / 128,
    num_expert_ranks=1,
    row=48_000_000,
    draft=0,
    cached_token=6144,
    products=3_500_000_000,
)
MODELS = {"8b": DENSE_8B, "nano": NANO_30B}


def time_of(reads: StepReads, most: int = MOST) -> StepTime:
    """Return the times of a model's steps on an H200."""
    return StepTime(reads, GPU, 1 + most)


@dataclass(frozen=True, slots=True)
class Simulated:
    """What some steps brought, and how long they took."""

    num_tokens: int
    seconds: float
    num_drafted: int

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds


def simulate(
    policy: DraftPolicy | AllDrafts,
    time: StepTime,
    num_rows: int,
    chance: Callable[[int], float],
    *,
    num_steps: int,
    offers: float = 1.0,
    seed: int = 0,
) -> Simulated:
    """Run steps of `num_rows` requests at once.

    A step whose rows all rested before it is launched ahead; others wait for the host, drafts or not, and so does one
    that a request joins.

    Args:
        chance: Returns how likely the drafts of a request are right.
        offers: Share of the rows for which there is a draft at all.
    """
    drawn = random.Random(seed)
    numbers, watched = count(), _Watched(policy, chance, offers, drawn)
    rows = [_request(next(numbers)) for _ in range(num_rows)]
    num_tokens, seconds, num_drafted = 0, 0.0, 0
    joined = True
    for _ in range(num_steps):
        waits = not joined and not policy.rests(rows)
        wanted = policy.counts(rows, [MOST] * num_rows, NO_LIMIT)
        proposed = [found if drawn.random() < offers else 0 for found in wanted]
        counts = policy.of_proposed(rows, proposed)
        num_cached = sum(row.computed for row in rows)
        seconds += time.seconds(num_rows, sum(counts), num_cached)
        seconds += time.device.drafts_s if waits and not any(counts) else 0.0
        policy.foresee(rows, MOST)
        for row, drafted in zip(rows, counts, strict=True):
            kept = _num_kept(drawn, chance(row.request_id), drafted)
            if drafted:
                policy.note(row.request_id, drafted, kept)
            row.computed += 1 + kept
            num_tokens += 1 + kept
        num_drafted += sum(counts)
        policy.note_step(rows, asked=any(wanted), drafted=any(counts))
        watched.compare(rows)
        before, rows = rows, list(_with_new(rows, policy, numbers))
        joined = rows != before
    return Simulated(num_tokens, seconds, num_drafted)


class _Watched:
    """Drafts of rows that rest, which end as many steps later as they have right tokens."""

    def __init__(
        self, policy: DraftPolicy | AllDrafts, chance: Callable[[int], float], offers: float, drawn: random.Random
    ) -> None:
        self._policy, self._chance, self._offers, self._drawn = policy, chance, offers, drawn
        self._begun: dict[int, tuple[int, int]] = {}  # request -> right tokens, steps left

    def compare(self, rows: Sequence[RunningRequest]) -> None:
        """Do what a planner does once a step has landed."""
        watched = self._policy.watched(rows)
        for row in watched:
            right, left = self._begun.pop(row.request_id, (0, 0))
            if left > 1:
                self._begun[row.request_id] = right, left - 1
                continue
            if left:
                self._policy.note(row.request_id, MOST, right)
            if self._drawn.random() < self._offers:
                right = _num_kept(self._drawn, self._chance(row.request_id), MOST)
                self._begun[row.request_id] = right, min(right + 1, MOST)
        self._policy.reconsider(watched, [MOST * (row.request_id in self._begun) for row in watched])


def plain_steps(time: StepTime, num_rows: int, num_steps: int) -> Simulated:
    """Run steps without drafts."""
    return simulate(NoDraftPolicy(time), time, num_rows, lambda _id: 0.0, num_steps=num_steps)


class NoDraftPolicy(DraftPolicy):
    """Rests for ever."""

    def counts(self, rows: Sequence[RunningRequest], rooms: Sequence[int], budget: int) -> list[int]:
        return [0] * len(rows)

    def rests(self, rows: Sequence[RunningRequest]) -> bool:
        return True


class FixedCounts(AllDrafts):
    """Drafts the same number in every step."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def counts(self, rows: Sequence[RunningRequest], rooms: Sequence[int], budget: int) -> list[int]:
        return [min(self._num_drafts, room) for room in rooms]


def wider(time: StepTime, num_ranks: int) -> StepTime:
    """Return the times of a rank that shares a model's experts with others."""
    reads = replace(time.reads, num_experts=time.reads.num_experts // num_ranks, num_expert_ranks=num_ranks)
    return replace(time, reads=reads)


def _request(request_id: int) -> RunningRequest:
    row = row_of([0] * 8, request_id=request_id)
    row.computed = 300 + 37 * request_id % REPLY
    return row


def _num_kept(drawn: random.Random, chance: float, num_drafted: int) -> int:
    kept = 0
    while kept < num_drafted and drawn.random() < chance:
        kept += 1
    return kept


def _with_new(
    rows: Sequence[RunningRequest], policy: DraftPolicy | AllDrafts, numbers: Iterator[int]
) -> Iterator[RunningRequest]:
    """Yield the rows, each that has ended replaced by another request."""
    for row in rows:
        if row.computed < 300 + REPLY:
            yield row
        else:
            policy.forget(row.request_id)
            started = _request(next(numbers))
            started.computed = 300
            yield started
