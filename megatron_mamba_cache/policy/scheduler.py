"""Fill a step within its token budget: first requests in mid-prefill, then waiting requests in order."""

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
    """Count, for each request, the failed steps since its last token.

    One failure may be transient. After `FAILURES_BEFORE_ISOLATION` a request runs isolated until it generates a token,
    so that the failures that bring it to `FAILURES_BEFORE_REFUSAL` are its own.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def count(self, request_ids: Iterable[int]) -> list[int]:
        """Count a failed step for each of its requests; return the requests to refuse."""
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._counts[request_id] = self._counts.get(request_id, 0) + 1
        return [request_id for request_id in request_ids if self._counts[request_id] >= FAILURES_BEFORE_REFUSAL]

    def forget(self, request_id: int) -> None:
        """Reset a request's count, because it has generated a token or has left."""
        self._counts.pop(request_id, None)

    def clear(self) -> None:
        """Clear every request."""
        self._counts.clear()

    def next_isolated(self) -> int | None:
        """Return the request to run alone next, the same one until its count is reset; None if there is none."""
        suspects = (request_id for request_id, count in self._counts.items() if count >= FAILURES_BEFORE_ISOLATION)
        return next(suspects, None)


def refusal_reason(error: Exception) -> str:
    """Return why a request whose last step raised `error` is refused."""
    return (
        f"its steps failed {FAILURES_BEFORE_REFUSAL} times since its last token, the last time isolated, with {error!r}"
    )


MOST_PASSED_OVER = 64
"""The most requests waiting for a prefix that a step skips, however many are queued after them."""


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """Newly admitted requests, and the id of the request whose prefill continues in the next step, or -1."""

    admitted: tuple[RunningRequest, ...]
    unfinished_prefill_id: int


@dataclass(slots=True)
class QueueState:
    """State of the queue after the last scheduling.

    Args:
        has_waiting: True if a request waits only for memory, not for a copy or because max_requests are running.
        is_settled: True if no waiting request could join the next step, and nothing has changed since.
    """

    has_waiting: bool = False
    is_settled: bool = False

    def note_waiting(self, *, has_waiting: bool) -> None:
        """Note whether requests wait only for memory; the first of them may fit by now."""
        if has_waiting is not self.has_waiting:
            self.has_waiting, self.is_settled = has_waiting, self.is_settled and not has_waiting

    def note_scheduled(self, *, is_settled: bool) -> None:
        """Note whether the scheduler found no request that can join the next step."""
        self.is_settled = is_settled

    def note_change(self) -> None:
        """Note that a waiting request may be able to join the next step now."""
        self.is_settled = False


class StepScheduler:
    """Admit waiting requests, oldest first.

    Only tokens that will be computed count against a step's budget, not those that a prefix hit skips. At most one
    request is left in mid-prefill, and no request is admitted while a request is paused for lack of blocks. Up to
    `MOST_PASSED_OVER` requests that wait for a prefix, which another computes or a copy brings, do not block those
    after them; a request that finds no room does. An admitted request keeps a state where the `BRANCH_WINDOW` requests
    after it part from its prompt, so that what they share is computed once.
    """

    def __init__(self) -> None:
        self._in_hand: int | None = None

    def take_in_hand(self) -> int | None:
        """Return the request whose scheduling raised an error, and forget it; None if there is none."""
        request_id, self._in_hand = self._in_hand, None
        return request_id

    def fill_step(self, requests: RunningRequests, waiting: Iterable[Candidate]) -> ScheduledStep:
        """Schedule the prefill of the next step; each decode request takes one token of the budget."""
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
        """Yield candidates; while the keys of one are computed, it is `in_hand`."""
        for candidate in candidates:
            self._in_hand = candidate.request_id
            yield candidate
        self._in_hand = in_hand

    def _continue_prefills(self, requests: RunningRequests) -> RunningRequest | None:
        """Schedule the next chunk of requests in mid-prefill; return one that stays in mid-prefill, if any."""
        unfinished = None
        for request in requests.prefilling:
            if requests.prompt_budget > 0:
                self._in_hand = request.request_id
                requests.cache.continue_prefill(request, requests.prompt_budget)
            if _is_unfinished(request):
                unfinished = request
        return unfinished


def _is_unfinished(request: RunningRequest) -> bool:
    return request.is_prefilling and request.computed + request.scheduled < request.spec.prompt_len
