"""Decide when requests draft, and how much: expected gain against the time that drafts take."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..policy.requests import RunningRequest
from .acceptance import DRAFTER_WINDOW, LEAST_GAIN, REQUEST_WINDOW, Acceptance, best_counts
from .step_time import StepTime

_LOG = logging.getLogger(__name__)

FIRST_CHANCE = 0.7
"""Acceptance of a draft before any was verified."""
NUM_TRIED, NUM_WRONG = 16, 4
"""Drafts, or wrong drafts, to try at any cost before a drafter is known."""
TRIAL_DRAFTS = 4
TRIAL_SHARE = 0.0075
"""Share of the time that trial steps may take."""
RESUME_GAIN = 1.1
"""Hysteresis: minimum expected speedup before paused requests draft again."""
SHORTEST_PAUSE, LONGEST_PAUSE = 8, 256
PATIENCE = 4
"""Consecutive steps without a proposal before drafting pauses."""
_REQUEST_WEIGHT, _DRAFTER_WEIGHT = 3.0, 2.0
_NEVER = 1 << 62


class AllDrafts:
    """A `DraftPolicy` that fills each request's room, whatever the gain."""

    def counts(self, requests: Sequence[RunningRequest], rooms: Sequence[int], budget: int) -> list[int]:
        """Return the rooms, as far as the budget allows."""
        return _within(rooms, budget)

    def decide_next(self, requests: Sequence[RunningRequest], most: int) -> None:
        """Do nothing."""

    def of_proposed(self, requests: Sequence[RunningRequest], proposed: Sequence[int]) -> list[int]:
        """Return what was proposed."""
        return list(proposed)

    def note(self, request_id: int, num_drafted: int, num_accepted: int) -> None:
        """Do nothing."""

    def note_step(self, requests: Sequence[RunningRequest], *, asked: bool, drafted: bool) -> None:
        """Do nothing."""

    def stays_paused(self, requests: Sequence[RunningRequest]) -> bool:
        """Return False, unless there are no requests."""
        return not requests

    def shadowed(self, requests: Sequence[RunningRequest]) -> list[RunningRequest]:
        """Return no request."""
        return []

    def resume_if_paying(self, requests: Sequence[RunningRequest], offered: Sequence[int]) -> None:
        """Do nothing."""

    def forget(self, request_id: int) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Pause:
    """No drafts for these requests before step `end`."""

    request_ids: set[int]
    end: int


@dataclass(frozen=True, slots=True)
class _NextCounts:
    """Draft counts decided ahead for a step, if each request has room for `most`."""

    step: int
    request_ids: list[int]
    most: int
    counts: list[int]


class DraftPolicy:
    """Decides how many drafts each request of a step gets; the same on all ranks of a model.

    A step gets the drafts that should yield most tokens per second, by recent acceptance and estimated step times. If
    none pay, drafting pauses for all requests, and steps may be launched before their tokens are read. Meanwhile a
    drafter that takes no time makes shadow drafts; drafting resumes when they seem to pay. For other drafters, a trial
    step ends the pause: every request drafts a few tokens. Trials take about TRIAL_SHARE of the time.

    Args:
        time: Estimates step times.
        drafter_seconds: Estimates the drafter's time, from the number of requests and the most drafts of one.
        shadows: True to use shadow drafts instead of trial steps.
        is_patient: True if missing proposals do not pause drafting: a draft model may be prefilling prompts, which only
            goes on while it is called.
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
        self._step = 0  # steps that have landed
        self._drafted_at = 0  # the last of them planned with drafts
        self._pause: _Pause | None = None
        self._next_counts: _NextCounts | None = None
        self._num_empty = 0  # consecutive steps planned with drafts that had none
        self._is_trial = self._has_warned = False

    def counts(self, requests: Sequence[RunningRequest], rooms: Sequence[int], budget: int) -> list[int]:
        """Return how many drafts each request of the next step should get; learns nothing.

        Args:
            rooms: [requests] the most drafts of each. Nothing is decided if all are 0.
            budget: The most drafts of all requests; older requests go first.
        """
        none = [0] * len(requests)
        if budget <= 0 or not any(rooms) or self._holds(requests, self._step):
            return none
        self._pause, self._is_trial = None, False
        found = self._found_ahead(requests, rooms)
        if not any(found):  # outdated estimates must not pause drafting
            found = self._best(requests, rooms)
        if sum(found) > budget:
            found = self._best(requests, _within(found, budget))
        if any(found):
            return found
        trial, end = _within([min(TRIAL_DRAFTS, room) for room in rooms], budget), _NEVER
        if not self._shadows:
            is_known = self._overall.is_known(NUM_TRIED, NUM_WRONG)
            end = self._drafted_at + self._steps_between_trials(requests, trial) if is_known else self._step
        if self._step >= end:
            self._is_trial = True
            return trial
        self._pause = _Pause({request.request_id for request in requests}, end)
        return none

    def decide_next(self, requests: Sequence[RunningRequest], most: int) -> None:
        """Decide the drafts of the next step before this one's tokens are read.

        Args:
            requests: The running step's; for others, or with less room, `counts` decides.
            most: Drafts that each has room for.
        """
        step, request_ids = self._step + 1, [request.request_id for request in requests]
        if not self._holds(requests, step):
            self._next_counts = _NextCounts(step, request_ids, most, self._best(requests, [most] * len(requests)))

    def of_proposed(self, requests: Sequence[RunningRequest], proposed: Sequence[int]) -> list[int]:
        """Return how many of its proposed drafts each request should get, if the drafter proposed too few."""
        if self._is_trial or not any(proposed):
            return list(proposed)
        num_cached = _num_cached(requests)
        plain = self._time.seconds(len(requests), 0, num_cached) + self._time.device.drafts_s
        return best_counts(
            self._chances(requests),
            proposed,
            lambda count, _most: self._time.seconds(len(requests), count, num_cached),
            plain,
        )

    def note(self, request_id: int, num_drafted: int, num_accepted: int) -> None:
        """Learn from a request's verified or shadow drafts."""
        if request_id not in self._of_requests:
            self._of_requests[request_id] = Acceptance(REQUEST_WINDOW, _REQUEST_WEIGHT)
        self._of_requests[request_id].note(num_drafted, num_accepted)
        self._overall.note(num_drafted, num_accepted)

    def note_step(self, requests: Sequence[RunningRequest], *, asked: bool, drafted: bool) -> None:
        """Count a step that has landed, once.

        If drafts were planned but there were none, drafting pauses: until shadow drafts pay, or after the first
        PATIENCE times for longer each time.

        Args:
            asked: True if drafts were planned for any request.
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
        """Return True if the requests of a step without drafts, if any, get none in the next step either."""
        return not requests or self._holds(requests, self._step + 1)

    def shadowed(self, requests: Sequence[RunningRequest]) -> list[RunningRequest]:
        """Return the paused requests, if they get shadow drafts; `note` their outcomes."""
        paused = self._pause.request_ids if self._pause is not None and self._shadows else ()
        return [request for request in requests if request.request_id in paused]

    def resume_if_paying(self, requests: Sequence[RunningRequest], offered: Sequence[int]) -> None:
        """End the pause if drafts seem to pay by now.

        Args:
            offered: [requests] available drafts of each.
        """
        if any(offered) and any(self._best(requests, offered, RESUME_GAIN)):
            self._pause = None

    def forget(self, request_id: int) -> None:
        """Drop what is known of a request."""
        self._of_requests.pop(request_id, None)
        self._next_counts = None  # for the others too, in case the request returns
        if self._pause is not None:
            self._pause.request_ids.discard(request_id)

    def _holds(self, requests: Sequence[RunningRequest], step: int) -> bool:
        """Return True if the requests are paused in a step."""
        pause = self._pause
        return pause is not None and step < pause.end and all(each.request_id in pause.request_ids for each in requests)

    def _found_ahead(self, requests: Sequence[RunningRequest], rooms: Sequence[int]) -> list[int]:
        """Return the counts decided ahead for a step of these requests; empty if there are none."""
        known = self._next_counts
        if known is None or known.step != self._step or any(room != known.most for room in rooms):
            return []
        return known.counts if known.request_ids == [request.request_id for request in requests] else []

    def _end_of_patience(self) -> int:
        """Return the step at which drafts are next planned."""
        num_pauses = min(self._num_empty - PATIENCE, LONGEST_PAUSE)
        return self._step + (min(SHORTEST_PAUSE << (num_pauses - 1), LONGEST_PAUSE) if num_pauses > 0 else 0)

    def _best(
        self, requests: Sequence[RunningRequest], rooms: Sequence[int], least_gain: float = LEAST_GAIN
    ) -> list[int]:
        """Return the drafts of each request that are likely to pay, if the drafter is called now."""
        num_cached = _num_cached(requests)
        plain = self._time.seconds(len(requests), 0, num_cached)
        return best_counts(
            self._chances(requests),
            rooms,
            lambda count, most: self._seconds(requests, count, most, num_cached),
            plain,
            least_gain,
        )

    def _seconds(self, requests: Sequence[RunningRequest], num_drafts: int, most: int, num_cached: int) -> float:
        """Estimate the time of a step with its drafter; infinite if the drafter gives no estimate."""
        try:
            of_drafter = float(self._drafter_seconds(len(requests), most))
        except Exception as error:  # a drafter is user code, and its failure must not fail a request
            if not self._has_warned:
                _LOG.warning("draft_seconds() of a drafter failed; drafts are now tried only occasionally: %r", error)
            self._has_warned, of_drafter = True, math.inf
        return self._time.seconds(len(requests), num_drafts, num_cached) + (of_drafter if of_drafter >= 0 else math.inf)

    def _steps_between_trials(self, requests: Sequence[RunningRequest], trial: Sequence[int]) -> int:
        num_cached = _num_cached(requests)
        plain = self._time.seconds(len(requests), 0, num_cached)
        waits = 2 * self._time.device.drafts_s  # before the step and after it
        cost = self._seconds(requests, sum(trial), max(trial), num_cached) + waits - plain
        return math.ceil(min(max(cost / plain / TRIAL_SHARE, SHORTEST_PAUSE), LONGEST_PAUSE))

    def _chances(self, requests: Sequence[RunningRequest]) -> list[float]:
        expected, found = self._overall.chance(FIRST_CHANCE), []
        for request in requests:
            known = self._of_requests.get(request.request_id)
            found.append(expected if known is None else known.optimistic_chance(expected))
        return found


def _within(counts: Sequence[int], budget: int) -> list[int]:
    """Cut draft counts to a budget; the first requests go first."""
    found = []
    for count in counts:
        found.append(max(0, min(count, budget)))
        budget -= found[-1]
    return found


def _num_cached(requests: Sequence[RunningRequest]) -> int:
    return sum(request.computed for request in requests)
