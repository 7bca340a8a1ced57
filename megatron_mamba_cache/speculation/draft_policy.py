"""Decide how many tokens each request drafts, and when drafting pauses, to maximize expected tokens per second."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..policy.requests import RunningRequest
from .acceptance import LEAST_GAIN, best_counts
from .all_drafts import Offers, no_offers, within
from .drafter_choice import DrafterAcceptance, choices
from .step_time import StepTime

_LOG = logging.getLogger(__name__)

TRIAL_DRAFTS = 4
TRIAL_SHARE = 0.0075
"""Fraction of the total time that trial steps may take."""
RESUME_GAIN = 1.1
"""Minimum expected speedup before paused requests draft again; larger than LEAST_GAIN for hysteresis."""
SHORTEST_PAUSE, LONGEST_PAUSE = 8, 256
PATIENCE = 4
"""Maximum number of consecutive steps without proposals before drafting pauses."""
_NEVER = 1 << 62


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

    With prompt lookup alongside a drafter that takes time, each request has an acceptance rate for either, and the
    policy chooses between them. Drafts of prompt lookup that are not verified serve as shadow drafts, so its rate is
    always known; the drafter is tried in trial steps while it is not chosen.

    Args:
        time: Estimates step times.
        drafter_seconds: Function that estimates the drafter's seconds, given the number of requests and longest draft.
        shadows: True to use shadow drafts instead of trial steps.
        is_patient: True if empty proposals do not pause drafting. A draft model proposes nothing while it prefills a
            prompt, and the prefill continues only while the model is called.
        has_lookup: True if prompt lookup may draft instead of the drafter.

    Attributes:
        by_lookup: [requests] True for each request of the last `counts` that prompt lookup drafts for.
    """

    def __init__(
        self,
        time: StepTime,
        drafter_seconds: Callable[[int, int], float] = lambda _requests, _most: 0.0,
        *,
        shadows: bool = False,
        is_patient: bool = False,
        has_lookup: bool = False,
    ) -> None:
        self.by_lookup: list[bool] = []
        self._time = time
        self._drafter_seconds = drafter_seconds
        self._shadows, self._is_patient, self._has_lookup = shadows, is_patient, has_lookup
        self._acceptance = DrafterAcceptance(), DrafterAcceptance()  # of the drafter, of prompt lookup
        self._rate = 0.0  # expected tokens per second of the last counts
        self._step = 0  # number of finished steps
        self._drafted_at = 0  # number of the last finished step that was planned with drafts
        self._pause: _Pause | None = None
        self._next_counts: _NextCounts | None = None
        self._num_empty = 0  # consecutive steps for which drafts were planned but none proposed
        self._is_trial = self._has_warned = False

    def counts(
        self,
        requests: Sequence[RunningRequest],
        max_counts: Sequence[int],
        budget: int,
        offers: Offers = no_offers,
    ) -> list[int]:
        """Return the number of draft tokens for each request in the next step.

        Args:
            max_counts: [requests] maximum number of draft tokens. If all are 0, a pause in progress continues.
            budget: Maximum total number of draft tokens; older requests have priority.
            offers: Called unless drafting is paused.
        """
        none = [0] * len(requests)
        self.by_lookup = [False] * len(requests)
        if budget <= 0 or not any(max_counts) or self._holds(requests, self._step):
            return none
        self._pause, self._is_trial = None, False
        offered, found = offers(), self._found_ahead(requests, max_counts)
        if not any(found):  # zeros decided in advance may be outdated, so decide again before pausing
            found = self._best(requests, max_counts, offered)
        if sum(found) > budget:
            fitting = within(found, budget)
            found = self._best(requests, fitting, [min(pair) for pair in zip(offered, fitting, strict=False)])
        if any(count and not is_lookup for count, is_lookup in zip(found, self.by_lookup, strict=True)):
            return found
        trial, end = within([min(TRIAL_DRAFTS, max_count) for max_count in max_counts], budget), _NEVER
        if not self._shadows:
            is_known = self._acceptance[False].is_known
            end = self._drafted_at + self._steps_between_trials(requests, trial) if is_known else self._step
        if self._step >= end:
            self._is_trial, self.by_lookup = True, [False] * len(requests)
            return trial
        if any(found):
            return found
        self._pause = _Pause({request.request_id for request in requests}, end)
        return none

    def decide_next(self, requests: Sequence[RunningRequest], most: int) -> None:
        """Decide draft counts for the next step before the tokens of the current step are read.

        Args:
            requests: Requests in the running step. If the requests or their limits change, `counts` decides again.
            most: Maximum number of draft tokens of each request.
        """
        step, request_ids = self._step + 1, [request.request_id for request in requests]
        if not self._has_lookup and not self._holds(requests, step):
            self._next_counts = _NextCounts(step, request_ids, most, self._best(requests, [most] * len(requests)))

    def of_proposed(self, requests: Sequence[RunningRequest], proposed: Sequence[int]) -> list[int]:
        """Return how many of each request's proposed tokens to verify if some proposals are shorter than planned."""
        if self._is_trial or not any(proposed):
            return list(proposed)
        num_cached, num_requests = _num_cached(requests), len(requests)
        plain = self._time.seconds(num_requests, 0, num_cached) + self._time.device.drafts_s
        by_lookup = self.by_lookup or [False] * num_requests
        reach = np.stack([acceptance.reach(requests, max(proposed)) for acceptance in self._acceptance])
        return best_counts(
            reach[np.array(by_lookup, np.int64), np.arange(num_requests)],
            proposed,
            lambda count, _most: self._time.seconds(num_requests, count, num_cached),
            LEAST_GAIN * num_requests / plain,
        )[0]

    def note(self, request_id: int, num_drafted: int, num_accepted: int, *, by_lookup: bool = False) -> None:
        """Update the acceptance estimates with the outcome of a verified draft or a shadow draft."""
        self._acceptance[by_lookup].note(request_id, num_drafted, num_accepted)

    def note_step(self, requests: Sequence[RunningRequest], *, asked: bool, drafted: bool) -> None:
        """Record the end of a step.

        If drafts were planned but none were proposed, drafting pauses until shadow drafts predict a gain. Without
        shadow drafts, it pauses only after more than PATIENCE such steps in a row, longer each time.

        Args:
            asked: True if the drafter, and not only prompt lookup, was called for any request.
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
        uses_shadows = self._shadows or self._has_lookup
        paused = self._pause.request_ids if self._pause is not None and uses_shadows else ()
        return [request for request in requests if request.request_id in paused]

    def resume_if_faster(self, requests: Sequence[RunningRequest], offered: Sequence[int]) -> None:
        """End the pause if drafting is now expected to be faster than a step without drafts.

        Args:
            offered: [requests] number of tokens in the request's shadow draft.
        """
        limits, by_lookup = ([0] * len(offered), offered) if self._has_lookup else (offered, ())
        if any(offered) and any(self._best(requests, limits, by_lookup, RESUME_GAIN)):
            self._pause = None

    def forget(self, request_id: int) -> None:
        """Drop the estimates for a request."""
        for acceptance in self._acceptance:
            acceptance.forget(request_id)
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
        self,
        requests: Sequence[RunningRequest],
        max_counts: Sequence[int],
        offered: Sequence[int] = (),
        least_gain: float = LEAST_GAIN,
    ) -> list[int]:
        """Return the draft counts with the highest expected tokens per second, the drafter's time included.

        Sets `by_lookup`: no request, all requests, or those for which its draft is expected to yield more tokens.
        """
        num_cached, num_requests = _num_cached(requests), len(requests)
        self._rate = num_requests / self._time.seconds(num_requests, 0, num_cached)
        best, least_rate = [0] * num_requests, least_gain * self._rate
        for choice in choices(*self._acceptance, requests, max_counts, offered):
            num_drafting, takes_time = num_requests, None
            if any(choice.by_lookup):
                takes_time = [not is_lookup for is_lookup in choice.by_lookup]
                num_drafting = sum(takes_time)
            seconds = partial(self._seconds, requests, num_drafting, num_cached)
            counts, rate = best_counts(choice.reach, choice.limits.tolist(), seconds, least_rate, takes_time)
            if any(counts):
                best, least_rate, self._rate, self.by_lookup = counts, rate, rate, choice.by_lookup
        return best

    def _seconds(
        self, requests: Sequence[RunningRequest], num_drafting: int, num_cached: int, num_drafts: int, most: int
    ) -> float:
        """Return the estimated seconds for a step and its drafting; infinity if the drafter's estimate is invalid.

        Args:
            num_drafting: Number of requests for which the drafter is called.
            num_drafts: Total number of draft tokens.
            most: Length of the drafter's longest draft.
        """
        try:
            of_drafter = float(self._drafter_seconds(num_drafting, most)) if most else 0.0
        except Exception as error:  # a drafter is user code, and its errors must not fail a request
            if not self._has_warned:
                _LOG.warning("a drafter's draft_seconds() failed, so drafts are tried only occasionally: %r", error)
            self._has_warned, of_drafter = True, math.inf
        return self._time.seconds(len(requests), num_drafts, num_cached) + (of_drafter if of_drafter >= 0 else math.inf)

    def _steps_between_trials(self, requests: Sequence[RunningRequest], trial: Sequence[int]) -> int:
        num_cached = _num_cached(requests)
        plain = self._time.seconds(len(requests), 0, num_cached)
        waits = 2 * self._time.device.drafts_s  # host latency before and after the trial step
        seconds = self._seconds(requests, len(requests), num_cached, sum(trial), max(trial))
        cost = seconds + waits - len(requests) / self._rate
        return math.ceil(min(max(cost / plain / TRIAL_SHARE, SHORTEST_PAUSE), LONGEST_PAUSE))


def _num_cached(requests: Sequence[RunningRequest]) -> int:
    return sum(request.computed for request in requests)
