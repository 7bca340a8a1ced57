"""Scheduler that fills a step within its token budget: requests in mid-prefill first, then waiting requests."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from .admission import BRANCH_WINDOW, Refusal
from .requests import Candidate, RunningRequest
from .running_requests import RunningRequests
from .tiers.cache_tiers import PREFETCH_WINDOW

FAILURES_BEFORE_ISOLATION = 2
FAILURES_BEFORE_REFUSAL = 4


class FailedSteps:
    """Number of failed steps of each request since its last generated token.

    A failure may be transient or caused by another request in the step. After `FAILURES_BEFORE_ISOLATION` failures, a
    request therefore runs alone until it generates a token, and is refused after `FAILURES_BEFORE_REFUSAL` failures.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def count(self, request_ids: Iterable[int]) -> list[int]:
        """Count a failed step for each request in it; return the ids of the requests to refuse."""
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._counts[request_id] = self._counts.get(request_id, 0) + 1
        return [request_id for request_id in request_ids if self._counts[request_id] >= FAILURES_BEFORE_REFUSAL]

    def forget(self, request_id: int) -> None:
        """Reset a request's count, because it has generated a token or has left."""
        self._counts.pop(request_id, None)

    def clear(self) -> None:
        """Reset the counts of all requests."""
        self._counts.clear()

    def next_isolated(self) -> int | None:
        """Return the id of a request that must run alone, the same until its count is reset; None if there is none."""
        suspects = (request_id for request_id, count in self._counts.items() if count >= FAILURES_BEFORE_ISOLATION)
        return next(suspects, None)


def refusal_reason(error: Exception) -> str:
    """Return a message that explains why a request whose last step raised `error` is refused."""
    return (
        f"its steps failed {FAILURES_BEFORE_REFUSAL} times since its last token; in the last step, the request ran "
        f"alone, and the error was {error!r}"
    )


MOST_PASSED_OVER = 64
"""Maximum number of requests waiting for a prefix that are passed over in one step."""


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """Newly admitted requests, and the id of the request whose prefill continues in the next step (-1: none)."""

    admitted: tuple[RunningRequest, ...]
    unfinished_prefill_id: int


@dataclass(slots=True)
class QueueState:
    """State of the queue after the last scheduling.

    Args:
        has_waiting: True if a request waits only for memory, and not for a copy or for another request to end.
        is_settled: True if the last scheduling found no request that can join, and nothing has changed since then.
    """

    has_waiting: bool = False
    is_settled: bool = False

    def note_waiting(self, *, has_waiting: bool) -> None:
        """Record whether a request waits only for memory. A request that has begun to may join the next step."""
        if has_waiting is not self.has_waiting:
            self.has_waiting, self.is_settled = has_waiting, self.is_settled and not has_waiting

    def note_scheduled(self, *, is_settled: bool) -> None:
        """Record whether the scheduler found no request that can join the next step."""
        self.is_settled = is_settled

    def note_change(self) -> None:
        """Record that a waiting request may be able to join the next step."""
        self.is_settled = False


class StepScheduler:
    """Schedules the prefill of each step and admits waiting requests, oldest first.

    Only computed tokens count against a step's budget; cached prefixes do not. At most one request stays in
    mid-prefill, and no request is admitted while a request is paused for lack of blocks. Up to `MOST_PASSED_OVER`
    requests that wait for another request or a copy to provide their prefix may be overtaken in the queue; a request
    that lacks memory may not. An admitted request caches a state where the prompts of the next `BRANCH_WINDOW` requests
    diverge from its prompt, so that shared prefixes are computed once.
    """

    def __init__(self) -> None:
        self._in_hand: int | None = None

    def take_in_hand(self) -> int | None:
        """Return and clear the id of the request whose scheduling raised an error; None if there is none."""
        request_id, self._in_hand = self._in_hand, None
        return request_id

    def fill_step(self, requests: RunningRequests, waiting: Iterable[Candidate]) -> ScheduledStep:
        """Schedule prefill for the next step; each decode request uses one token of the budget."""
        unfinished = self._continue_prefills(requests)
        admitted, num_passed_over, budget = [], 0, requests.prompt_budget
        most_considered = requests.num_free + MOST_PASSED_OVER + 1
        queue = [] if requests.any_paused else list(islice(waiting, most_considered + BRANCH_WINDOW))
        self.prefetch(requests, queue)
        for index, candidate in enumerate(queue):
            if unfinished is not None or num_passed_over == MOST_PASSED_OVER:
                break
            self._in_hand = candidate.request_id
            following = self._in_turn(queue[index + 1 : index + 1 + BRANCH_WINDOW], candidate.request_id)
            outcome = requests.admit(candidate, budget, following)
            if isinstance(outcome, RunningRequest):
                admitted.append(outcome)
                budget = requests.prompt_budget
                unfinished = outcome if _is_unfinished(outcome) else None
            elif outcome in (Refusal.WAITS_FOR_PREFIX, Refusal.WAITS_FOR_COPY):
                num_passed_over += 1
            else:
                break
        self._in_hand = None
        return ScheduledStep(tuple(admitted), -1 if unfinished is None else unfinished.request_id)

    def prefetch(self, requests: RunningRequests, queue: Sequence[Candidate]) -> None:
        """Start to restore the prefixes of the next queued requests from lower tiers."""
        requests.cache.prefetch(self._in_turn(queue[:PREFETCH_WINDOW], None))

    def _in_turn(self, candidates: Sequence[Candidate], in_hand: int | None) -> Iterator[Candidate]:
        """Yield the candidates, and record which of them the caller is processing."""
        for candidate in candidates:
            self._in_hand = candidate.request_id
            yield candidate
        self._in_hand = in_hand

    def _continue_prefills(self, requests: RunningRequests) -> RunningRequest | None:
        """Schedule the next chunks of requests in mid-prefill; return a request that stays in mid-prefill, or None."""
        unfinished = None
        for request in requests.prefilling:
            if requests.prompt_budget > 0:
                self._in_hand = request.request_id
                requests.cache.continue_prefill(
                    request, requests.prompt_budget, follows_prompts=requests.counts.prefilling > 0
                )
            if _is_unfinished(request):
                unfinished = request
        return unfinished


def _is_unfinished(request: RunningRequest) -> bool:
    return request.is_prefilling and request.computed + request.scheduled < request.spec.prompt_len
