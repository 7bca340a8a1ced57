"""Decide how many tokens each request drafts, and when drafting pauses, to maximize expected tokens per second."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..policy.requests import RunningRequest
from .acceptance import DRAFTER_WINDOW, LEAST_GAIN, REQUEST_WINDOW, Acceptance, best_counts
from .step_time import StepTime

_LOG = logging.getLogger(__name__)

PRIOR_PROBABILITY = 0.7
"""Prior probability that a draft token is accepted, used before any draft has been verified."""
NUM_TRIED, NUM_REJECTED = 16, 4
"""A drafter's acceptance rate counts as known after NUM_TRIED verified or NUM_REJECTED rejected draft tokens."""
TRIAL_DRAFTS = 4
TRIAL_SHARE = 0.0075
"""Fraction of the total time that trial steps may take."""
RESUME_GAIN = 1.1
"""Minimum expected speedup before paused requests draft again; larger than LEAST_GAIN for hysteresis."""
SHORTEST_PAUSE, LONGEST_PAUSE = 8, 256
PATIENCE = 4
"""Maximum number of consecutive steps without proposals before drafting pauses."""
_REQUEST_WEIGHT, _DRAFTER_WEIGHT = 3.0, 2.0
_NEVER = 1 << 62


class AllDrafts:
    """Draft policy that always gives each request as many draft tokens as its limit and the budget allow."""

    def counts(self, requests: Sequence[RunningRequest], max_counts: Sequence[int], budget: int) -> list[int]:
        """Return `max_counts`, reduced to a sum of at most `budget`; earlier requests have priority."""
        return _within(max_counts, budget)

    def decide_next(self, requests: Sequence[RunningRequest], most: int) -> None:
        """Do nothing."""

    def of_proposed(self, requests: Sequence[RunningRequest], proposed: Sequence[int]) -> list[int]:
        """Return `proposed` unchanged."""
        return list(proposed)

    def note(self, request_id: int, num_drafted: int, num_accepted: int) -> None:
        """Do nothing."""

    def note_step(self, requests: Sequence[RunningRequest], *, asked: bool, drafted: bool) -> None:
        """Do nothing."""

    def stays_paused(self, requests: Sequence[RunningRequest]) -> bool:
        """Return True only if there are no requests."""
        return not requests

    def shadowed(self, requests: Sequence[RunningRequest]) -> list[RunningRequest]:
        """Return an empty list, because drafting never pauses."""
        return []

    def resume_if_faster(self, requests: Sequence[RunningRequest], offered: Sequence[int]) -> None:
        """Do nothing."""

    def forget(self, request_id: int) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Pause:
    """Pause in which these requests get no drafts. Step `end` is the first step after it."""

    request_ids: set[int]
    end: int


@dataclass(frozen=True, slots=True)
class _NextCounts:
    """Draft counts decided in advance for a step; valid only if each request may have `most` draft tokens."""

    step: int
    request_ids: list[int]
    most: int
    counts: list[int]


class DraftPolicy:
    """Decides the number of draft tokens for each request in a step; all ranks of a model make the same decision.

    The policy maximizes the expected tokens per second, given recent acceptance rates and estimated step times. If
    drafts are not expected to save time, drafting pauses for all requests, and steps may overlap: each is launched
    before the host has read the tokens of the previous step. During a pause, a drafter whose estimated time is 0 makes
    shadow drafts, and drafting resumes when these predict a gain. With other drafters, a pause ends with a trial step,
    in which each request drafts a few tokens. Trial steps take about TRIAL_SHARE of the time.

    Args:
        time: Estimates step times.
        drafter_seconds: Function that estimates the drafter's seconds, given the number of requests and longest draft.
        shadows: True to use shadow drafts instead of trial steps.
        is_patient: True if empty proposals do not pause drafting. A draft model proposes nothing while it prefills a
            prompt, and the prefill continues only while the model is called.
    """

    def __init__(
        self,
        time: StepTime,
        drafter_seconds: Callable[[int, int], float] = lambda _requests, _most: 0.0,
        *,
        shadows: bool = False,
        is_patient: bool = False,
    ) -> None:
        self._time = time
        self._drafter_seconds = drafter_seconds
        self._shadows, self._is_patient = shadows, is_patient
        self._overall = Acceptance(DRAFTER_WINDOW, _DRAFTER_WEIGHT)
        self._of_requests: dict[int, Acceptance] = {}
        self._step = 0  # number of finished steps
        self._drafted_at = 0  # number of the last finished step that was planned with drafts
        self._pause: _Pause | None = None
        self._next_counts: _NextCounts | None = None
        self._num_empty = 0  # consecutive steps for which drafts were planned but none proposed
        self._is_trial = self._has_warned = False

    def counts(self, requests: Sequence[RunningRequest], max_counts: Sequence[int], budget: int) -> list[int]:
        """Return the number of draft tokens for each request in the next step.

        Args:
            max_counts: [requests] maximum number of draft tokens. If all are 0, a pause in progress continues.
            budget: Maximum total number of draft tokens; older requests have priority.
        """
        none = [0] * len(requests)
        if budget <= 0 or not any(max_counts) or self._holds(requests, self._step):
            return none
        self._pause, self._is_trial = None, False
        found = self._found_ahead(requests, max_counts)
        if not any(found):  # zeros decided in advance may be outdated, so decide again before pausing
            found = self._best(requests, max_counts)
        if sum(found) > budget:
            found = self._best(requests, _within(found, budget))
        if any(found):
            return found
        trial, end = _within([min(TRIAL_DRAFTS, max_count) for max_count in max_counts], budget), _NEVER
        if not self._shadows:
            is_known = self._overall.is_known(NUM_TRIED, NUM_REJECTED)
            end = self._drafted_at + self._steps_between_trials(requests, trial) if is_known else self._step
        if self._step >= end:
            self._is_trial = True
            return trial
        self._pause = _Pause({request.request_id for request in requests}, end)
        return none

    def decide_next(self, requests: Sequence[RunningRequest], most: int) -> None:
        """Decide draft counts for the next step before the tokens of the current step are read.

        Args:
            requests: Requests in the running step. If the requests or their limits change, `counts` decides again.
            most: Maximum number of draft tokens of each request.
        """
        step, request_ids = self._step + 1, [request.request_id for request in requests]
        if not self._holds(requests, step):
            self._next_counts = _NextCounts(step, request_ids, most, self._best(requests, [most] * len(requests)))

    def of_proposed(self, requests: Sequence[RunningRequest], proposed: Sequence[int]) -> list[int]:
        """Return how many of each request's proposed tokens to verify if some proposals are shorter than planned."""
        if self._is_trial or not any(proposed):
            return list(proposed)
        num_cached = _num_cached(requests)
        plain = self._time.seconds(len(requests), 0, num_cached) + self._time.device.drafts_s
        return best_counts(
            self._probabilities(requests),
            proposed,
            lambda count, _most: self._time.seconds(len(requests), count, num_cached),
            plain,
        )

    def note(self, request_id: int, num_drafted: int, num_accepted: int) -> None:
        """Update the acceptance estimates with the outcome of a verified draft or a shadow draft."""
        if request_id not in self._of_requests:
            self._of_requests[request_id] = Acceptance(REQUEST_WINDOW, _REQUEST_WEIGHT)
        self._of_requests[request_id].note(num_drafted, num_accepted)
        self._overall.note(num_drafted, num_accepted)

    def note_step(self, requests: Sequence[RunningRequest], *, asked: bool, drafted: bool) -> None:
        """Record the end of a step.

        If drafts were planned but none were proposed, drafting pauses until shadow drafts predict a gain. Without
        shadow drafts, it pauses only after more than PATIENCE such steps in a row, longer each time.

        Args:
            asked: True if the drafter was called for any request.
            drafted: True if any request had drafts.
        """
        if asked:
            self._drafted_at = self._step
            self._num_empty = 0 if drafted else self._num_empty + 1
        self._step += 1
        if asked and not drafted and not self._is_patient:
            self._pause = _Pause(
                {request.request_id for request in requests}, _NEVER if self._shadows else self._end_of_patience()
            )

    def stays_paused(self, requests: Sequence[RunningRequest]) -> bool:
        """Return True if these requests, which have no drafts in this step, will have none in the next step either."""
        return not requests or self._holds(requests, self._step + 1)

    def shadowed(self, requests: Sequence[RunningRequest]) -> list[RunningRequest]:
        """Return the paused requests among `requests` if the policy uses shadow drafts, otherwise an empty list."""
        paused = self._pause.request_ids if self._pause is not None and self._shadows else ()
        return [request for request in requests if request.request_id in paused]

    def resume_if_faster(self, requests: Sequence[RunningRequest], offered: Sequence[int]) -> None:
        """End the pause if drafting is now expected to be faster than a step without drafts.

        Args:
            offered: [requests] number of tokens in the request's shadow draft.
        """
        if any(offered) and any(self._best(requests, offered, RESUME_GAIN)):
            self._pause = None

    def forget(self, request_id: int) -> None:
        """Drop the estimates for a request."""
        self._of_requests.pop(request_id, None)
        self._next_counts = None  # it used the dropped estimate, which a request that returns does not have
        if self._pause is not None:
            self._pause.request_ids.discard(request_id)

    def _holds(self, requests: Sequence[RunningRequest], step: int) -> bool:
        """Return True if drafting is paused for all these requests at step number `step`."""
        pause = self._pause
        return pause is not None and step < pause.end and all(each.request_id in pause.request_ids for each in requests)

    def _found_ahead(self, requests: Sequence[RunningRequest], max_counts: Sequence[int]) -> list[int]:
        """Return the counts that `decide_next` chose for these requests and limits; an empty list if there are none."""
        known = self._next_counts
        if known is None or known.step != self._step or any(max_count != known.most for max_count in max_counts):
            return []
        return known.counts if known.request_ids == [request.request_id for request in requests] else []

    def _end_of_patience(self) -> int:
        """Return the number of the step at which drafting resumes after steps without proposals."""
        num_pauses = min(self._num_empty - PATIENCE, LONGEST_PAUSE)
        return self._step + (min(SHORTEST_PAUSE << (num_pauses - 1), LONGEST_PAUSE) if num_pauses > 0 else 0)

    def _best(
        self, requests: Sequence[RunningRequest], max_counts: Sequence[int], least_gain: float = LEAST_GAIN
    ) -> list[int]:
        """Return the draft counts with the highest expected tokens per second, the drafter's time included."""
        num_cached = _num_cached(requests)
        plain = self._time.seconds(len(requests), 0, num_cached)
        return best_counts(
            self._probabilities(requests),
            max_counts,
            lambda count, most: self._seconds(requests, count, most, num_cached),
            plain,
            least_gain,
        )

    def _seconds(self, requests: Sequence[RunningRequest], num_drafts: int, most: int, num_cached: int) -> float:
        """Return the estimated seconds for a step and its drafting; infinity if the drafter's estimate is invalid."""
        try:
            of_drafter = float(self._drafter_seconds(len(requests), most))
        except Exception as error:  # a drafter is user code, and its errors must not fail a request
            if not self._has_warned:
                _LOG.warning("a drafter's draft_seconds() failed, so drafts are tried only occasionally: %r", error)
            self._has_warned, of_drafter = True, math.inf
        return self._time.seconds(len(requests), num_drafts, num_cached) + (of_drafter if of_drafter >= 0 else math.inf)

    def _steps_between_trials(self, requests: Sequence[RunningRequest], trial: Sequence[int]) -> int:
        num_cached = _num_cached(requests)
        plain = self._time.seconds(len(requests), 0, num_cached)
        waits = 2 * self._time.device.drafts_s  # host latency before and after the trial step
        cost = self._seconds(requests, sum(trial), max(trial), num_cached) + waits - plain
        return math.ceil(min(max(cost / plain / TRIAL_SHARE, SHORTEST_PAUSE), LONGEST_PAUSE))

    def _probabilities(self, requests: Sequence[RunningRequest]) -> list[float]:
        expected, found = self._overall.probability(PRIOR_PROBABILITY), []
        for request in requests:
            known = self._of_requests.get(request.request_id)
            found.append(expected if known is None else known.optimistic_probability(expected))
        return found


def _within(counts: Sequence[int], budget: int) -> list[int]:
    """Return the counts, reduced to a sum of at most `budget`; earlier requests have priority."""
    found = []
    for count in counts:
        found.append(max(0, min(count, budget)))
        budget -= found[-1]
    return found


def _num_cached(requests: Sequence[RunningRequest]) -> int:
    return sum(request.computed for request in requests)
