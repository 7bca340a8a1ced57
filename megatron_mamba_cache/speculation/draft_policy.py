"""Decide how many tokens each request drafts, and when drafting pauses, to maximize expected tokens per second."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..policy.requests import RunningRequest
from .acceptance import LEAST_GAIN
from .all_drafts import Offers, no_offers, within
from .drafter_acceptance import DrafterAcceptance
from .drafter_choice import Outlook, Prospect, Prospects, choices
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
FIRST_VALIDITY, LONGEST_VALIDITY = 2, 16
"""Number of steps for which the first estimate for a request is used, and most steps for any estimate."""
SAMPLED = 16
"""Number of requests that are looked up in turn, one in each step, while the drafter drafts."""
MOST_MISSES = 8
"""A request is hardly looked up after this number of lookups without a match, as long as the drafter saves time."""
USUAL_STEPS = 16
"""Effective number of recent steps whose speed is compared with that of drafts."""
HIT_WINDOW, LEAST_HIT_RATE = 64, 0.1
"""Effective number of lookups in their hit rate, and the hit rate below which new requests are hardly looked up."""
_NEVER = 1 << 62


@dataclass(slots=True)
class _Pause:
    """Pause in which these requests get no drafts. Step `end` is the first step after it."""

    request_ids: set[int]
    end: int


class DraftPolicy:
    """Decides the number of draft tokens for each request in a step; all ranks of a model make the same decision.

    The policy maximizes the expected tokens per second, given recent acceptance rates and estimated step times. If
    drafts are not expected to save time, drafting pauses for all requests, and steps may overlap: each is launched
    before the host has read the tokens of the previous step. During a pause, a drafter whose estimated time is 0 makes
    shadow drafts, and drafting resumes when these predict a gain. With other drafters, a pause ends with a trial step,
    in which each request drafts a few tokens. Trial steps take about TRIAL_SHARE of the time, and follow one another
    while most of their drafts are accepted.

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
        self._outlook: Outlook | None = None
        self._repeated: tuple[Sequence[RunningRequest], Outlook] | None = None  # for which `repeats` was True
        self._most = 1  # maximum number of draft tokens of a request so far
        self._num_empty = 0  # consecutive steps for which drafts were planned but none verified
        self._trial_from = 0  # number of the first step that may be a trial
        self._looks_up_from = 0  # number of the first step in which requests may be looked up in turn
        self._turn = 0  # index of the request that was looked up last in turn
        self._misses: dict[int, int] = {}  # request id -> consecutive lookups without a match
        self._offering: set[int] = set()  # requests with a match in the last step
        self._hit_rate = 0.5  # of recent lookups
        self._is_trial = self._has_warned = False
        self._tokens = self._spent = 0.0  # expected tokens and seconds of recent steps, if prompt lookup may draft
        self._seconds_planned, self._num_accepted = 0.0, 0  # of the current step
        self._surplus = 0  # accepted draft tokens of successful consecutive trials, minus those not accepted

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
        self.by_lookup = [False] * len(requests)
        if budget <= 0 or not any(max_counts) or self._holds(requests, self._step):
            return [0] * len(requests)
        outlook = self._outlook_of(requests, max_counts)
        return self._decide(outlook, requests, max_counts, budget, self._offered(outlook, requests, max_counts, offers))

    def repeats(self, requests: Sequence[RunningRequest], most: int, offers: Offers = no_offers) -> bool:
        """Return True if the drafter drafts as many tokens again for each request as the request has drafts now.

        The last answer for the same tuple of requests holds while the estimates are the same, and prompt lookup finds
        nothing for the request that is looked up in each step, in turn.

        Args:
            most: Maximum number of draft tokens of each request.
            offers: As in `counts`.
        """
        if self._holds(requests, self._step):
            return False
        outlook, known = self._outlook_of(requests, [most]), self._repeated
        if known is not None and known[0] is requests and known[1] is outlook:
            looks_up = self._step >= self._looks_up_from and self._may_look_up(outlook)
            if not (looks_up and self._any_in_turn(outlook, requests, most, offers)):
                return True
        max_counts = [most] * len(requests)
        offered = self._offered(outlook, requests, max_counts, offers)
        self.by_lookup = [False] * len(requests)
        counts = self._decide(outlook, requests, max_counts, sum(max_counts), offered)
        repeats = counts == [len(request.drafts) for request in requests] and not any(self.by_lookup)
        if repeats and not self._is_trial and self._outlook is not None:
            self._repeated = requests, self._outlook
        if repeats and any(offered):  # these matches change nothing
            self._looks_up_from = self._step + PATIENCE * (1 + len(requests) // 8)
        return repeats

    def _decide(
        self,
        outlook: Outlook,
        requests: Sequence[RunningRequest],
        max_counts: Sequence[int],
        budget: int,
        offered: Sequence[int],
    ) -> list[int]:
        """Return the draft counts, or begin a pause or a trial."""
        self._pause, self._is_trial, self._repeated = None, False, None
        found = self._best(outlook, requests, max_counts, offered, budget)
        may_pause = not self._waits_for_match(outlook)
        is_old = self._step - outlook.step >= PATIENCE
        if not any(found) and may_pause and is_old:  # only a recent outlook may begin a pause
            outlook = self._outlook = self._estimate(requests, self._step)
            found = self._best(outlook, requests, max_counts, offered, budget)
        if any(count and not is_lookup for count, is_lookup in zip(found, self.by_lookup, strict=True)):
            return found
        trial, end = within([min(TRIAL_DRAFTS, max_count) for max_count in max_counts], budget), _NEVER
        if not self._shadows:
            gap = self._steps_between_trials(outlook, trial) if self._acceptance[False].is_known else 0
            end = max(self._trial_from, self._drafted_at + gap)
        if self._step >= end:
            self._is_trial, self._surplus, self.by_lookup = True, max(self._surplus, 0), [False] * len(requests)
            return trial
        if not any(found) and may_pause:
            self._pause = _Pause({request.request_id for request in requests}, end)
        return found

    def decide_next(self, requests: Sequence[RunningRequest], most: int) -> None:
        """Estimate what drafts of the next step will yield, if that is due, before the current step's tokens are read.

        Args:
            requests: Requests in the running step.
            most: Maximum number of draft tokens of each request.
        """
        if requests and not self._holds(requests, self._step + 1):
            self._outlook_of(requests, [most], self._step + 1)

    def of_proposed(self, requests: Sequence[RunningRequest], proposed: Sequence[int]) -> list[int]:
        """Return how many of each request's proposed tokens to verify if some proposals are shorter than planned.

        Returns:
            `proposed`, or zeros if a step without drafts is now expected to be faster.
        """
        if self._is_trial or not any(proposed):
            return list(proposed)
        outlook, num_requests = self._outlook_of(requests, proposed), len(requests)
        plain = self._time.seconds(num_requests, 0, outlook.num_cached) + self._time.device.drafts_s
        seconds = self._time.seconds(num_requests, sum(proposed), outlook.num_cached)
        by_drafter, by_lookup = self._prospects(outlook, requests)
        is_lookup = self.by_lookup or [False] * num_requests
        pairs = zip(by_drafter, by_lookup, is_lookup, proposed, strict=True)
        num_tokens = sum([(other if looked else one).tokens[count] for one, other, looked, count in pairs])
        return list(proposed) if num_tokens / seconds > LEAST_GAIN * num_requests / plain else [0] * num_requests

    def note(
        self,
        request_ids: Sequence[int],
        num_drafted: Sequence[int],
        num_accepted: Sequence[int],
        *,
        by_lookup: bool = False,
    ) -> None:
        """Update the acceptance estimates with the outcomes of verified drafts; see `DrafterAcceptance.note`."""
        self._acceptance[by_lookup].note(request_ids, num_drafted, num_accepted)
        self._num_accepted += sum(num_accepted)
        if self._is_trial and not by_lookup:
            self._surplus += 2 * sum(num_accepted) - sum(num_drafted)

    def note_shadows(self, outcomes: Sequence[tuple[int, int, int]]) -> None:
        """Update the acceptance estimates with outcomes of shadow drafts: request id, draft length, number correct."""
        if outcomes:
            self._acceptance[self._has_lookup].note(*zip(*outcomes, strict=True))

    def note_step(self, requests: Sequence[RunningRequest], *, asked: bool, drafted: bool) -> None:
        """Record the end of a step.

        If drafts were planned but none were proposed, drafting pauses until shadow drafts predict a gain. Without
        shadow drafts, it pauses only after more than PATIENCE such steps in a row, longer each time. A trial without
        drafts, for example because no KV block is free, is repeated later, also after longer times.

        Args:
            asked: True if the drafter, and not only prompt lookup, was called for any request.
            drafted: True if the step verified drafts of the drafter for any request.
        """
        if drafted:
            self._drafted_at, self._num_empty = self._step, 0
        elif asked or self._is_trial:
            self._num_empty += 1
        self._step += 1
        if self._has_lookup:
            self._tokens += (len(requests) + self._num_accepted - self._tokens) / USUAL_STEPS
            self._spent += (self._seconds_planned - self._spent) / USUAL_STEPS
            self._num_accepted = 0
        if self._is_trial and not drafted:
            self._trial_from = self._step + min(SHORTEST_PAUSE << min(self._num_empty, 8), LONGEST_PAUSE)
        elif asked and not drafted and not self._is_patient:
            self._pause = _Pause(
                {request.request_id for request in requests}, _NEVER if self._shadows else self._end_of_patience()
            )

    def stays_paused(self, requests: Sequence[RunningRequest]) -> bool:
        """Return True if these requests, which have no drafts in this step, will have none in the next step either."""
        return not requests or self._holds(requests, self._step + 1)

    def in_turn(self, requests: Sequence[RunningRequest]) -> Sequence[RunningRequest]:
        """Return the request, among the SAMPLED oldest, that is looked up next."""
        self._turn = (self._turn + 1) % min(len(requests), SAMPLED)
        return requests[self._turn : self._turn + 1]

    def note_offer(self, request_id: int, *, is_found: bool) -> None:
        """Record whether prompt lookup alongside the drafter found a match for a request."""
        self._hit_rate += (is_found - self._hit_rate) / HIT_WINDOW
        if is_found:
            self._misses.pop(request_id, None)
            self._offering.add(request_id)
        else:
            self._misses[request_id] = self._misses.get(request_id, 0) + 1
            self._offering.discard(request_id)

    def shadowed(self, requests: Sequence[RunningRequest]) -> list[RunningRequest]:
        """Return the paused requests among `requests` if the policy uses shadow drafts, otherwise an empty list."""
        if self._pause is None or not (self._shadows or self._has_lookup):
            return []
        return [request for request in requests if request.request_id in self._pause.request_ids]

    def resume_if_faster(self, requests: Sequence[RunningRequest], offered: Sequence[int]) -> None:
        """End the pause if drafting is now expected to be faster than a step without drafts.

        Args:
            offered: [requests] number of tokens in the request's shadow draft.
        """
        limits, by_lookup = ([0] * len(offered), offered) if self._has_lookup else (offered, ())
        if not any(offered):
            return
        outlook = self._outlook_of(requests, offered)
        if any(self._best(outlook, requests, limits, by_lookup, _NEVER, RESUME_GAIN)):
            self._pause = None

    def forget(self, request_id: int) -> None:
        """Drop the estimates for a request."""
        for acceptance in self._acceptance:
            acceptance.forget(request_id)
        self._misses.pop(request_id, None)
        self._offering.discard(request_id)
        if self._outlook is not None:
            self._outlook.forget(request_id)
        if self._pause is not None:
            self._pause.request_ids.discard(request_id)

    def _holds(self, requests: Sequence[RunningRequest], step: int) -> bool:
        """Return True if drafting is paused for all these requests at step number `step`."""
        pause = self._pause
        return pause is not None and step < pause.end and all(each.request_id in pause.request_ids for each in requests)

    def _end_of_patience(self) -> int:
        """Return the number of the step at which drafting resumes after steps without proposals."""
        num_pauses = min(self._num_empty - PATIENCE, LONGEST_PAUSE)
        return self._step + (min(SHORTEST_PAUSE << (num_pauses - 1), LONGEST_PAUSE) if num_pauses > 0 else 0)

    def _outlook_of(
        self, requests: Sequence[RunningRequest], max_counts: Sequence[int], step: int | None = None
    ) -> Outlook:
        """Return the outlook for these requests, estimated again if it is due."""
        step, longest = self._step if step is None else step, max(max_counts)
        if longest > self._most:
            self._most, self._outlook = longest, None
        if self._outlook is None or self._outlook.is_due(requests, step):
            self._outlook = self._estimate(requests, step)
        return self._outlook

    def _estimate(self, requests: Sequence[RunningRequest], step: int) -> Outlook:
        """Estimate what drafts yield; the longer these requests have run, the longer this is valid."""
        num_cached, num_requests = sum(request.computed for request in requests), len(requests)
        request_ids, before, known = [request.request_id for request in requests], self._outlook, self._acceptance
        seconds = partial(self._seconds, num_requests, num_requests, num_cached)
        drafter = lookup = Prospects.estimate(known[False], request_ids, self._most, set(), seconds)
        if self._has_lookup:
            free = partial(self._time.seconds, num_requests, num_cached=num_cached)
            lookup = Prospects.estimate(
                known[True], request_ids, self._most, self._offering, lambda num_drafts, _most: free(num_drafts)
            )
        validity = FIRST_VALIDITY
        if before is not None:
            validity += 2 * before.validity * before.num_known(requests) // num_requests
        return Outlook(
            requests if isinstance(requests, tuple) else (),
            step,
            min(validity, LONGEST_VALIDITY),
            num_cached,
            drafter,
            lookup,
            {one for one, prospect in lookup.by_request.items() if prospect.best >= drafter.by_request[one].best},
            new_may_win=lookup.of_new.best >= drafter.of_new.best,
            pays=drafter.rate > LEAST_GAIN * num_requests / self._time.seconds(num_requests, 0, num_cached),
        )

    def _prospects(self, outlook: Outlook, requests: Sequence[RunningRequest]) -> tuple[list[Prospect], list[Prospect]]:
        """Return the prospect of each request with the drafter and with prompt lookup."""
        request_ids = [request.request_id for request in requests]
        by_drafter = outlook.drafter.of_requests(request_ids)
        return by_drafter, outlook.lookup.of_requests(request_ids) if self._has_lookup else by_drafter

    def _offered(
        self, outlook: Outlook, requests: Sequence[RunningRequest], max_counts: Sequence[int], offers: Offers
    ) -> Sequence[int]:
        """Look up the requests for which prompt lookup may be better than the drafter; return the lengths it offers."""
        if not self._may_look_up(outlook):
            return ()
        wanted = max_counts
        if outlook.pays:
            wanted = [
                max_count if outlook.may_win(request.request_id) and self._may_find(request.request_id) else 0
                for request, max_count in zip(requests, max_counts, strict=True)
            ]
        if not any(wanted):
            return ()
        offered = offers(requests, wanted)
        for request, most, found in zip(requests, wanted, offered, strict=True):
            if most:
                self.note_offer(request.request_id, is_found=found > 0)
        return offered

    def _may_look_up(self, outlook: Outlook) -> bool:
        """Return True if prompt lookup may be better than the drafter for any request."""
        return self._has_lookup and not (outlook.pays and not outlook.winners and not outlook.new_may_win)

    def _any_in_turn(self, outlook: Outlook, requests: Sequence[RunningRequest], most: int, offers: Offers) -> bool:
        """Look up one request, in turn, like `_offered`; return True if a match was found."""
        return any(self._offered(outlook, self.in_turn(requests), [most], offers))

    def _waits_for_match(self, outlook: Outlook) -> bool:
        """Return True if a step without drafts may only mean that prompt lookup, the faster drafter, found no match."""
        return self._has_lookup and outlook.pays and self._hit_rate > LEAST_HIT_RATE

    def _may_find(self, request_id: int) -> bool:
        """Return True unless the last lookups of a request found nothing, or those of all if it is new."""
        return self._misses.get(request_id, 0 if self._hit_rate > LEAST_HIT_RATE else MOST_MISSES) < MOST_MISSES

    def _best(
        self,
        outlook: Outlook,
        requests: Sequence[RunningRequest],
        max_counts: Sequence[int],
        offered: Sequence[int],
        budget: int,
        least_gain: float = LEAST_GAIN,
    ) -> list[int]:
        """Return the draft counts with the highest expected gain, the drafter's time included.

        The gain is the number of tokens, minus those of steps without drafts in the same time. If both prompt lookup
        and the drafter save time, it is minus those of recent steps: the drafter should not draft tokens slowly that
        prompt lookup would draft fast in one of the next steps. Drafting then never pauses, so each step waits for the
        host.

        Sets `by_lookup`: no request, all requests, or those for which its draft is expected to yield more tokens.
        """
        num_requests, num_cached = len(requests), outlook.num_cached
        best, plain = [0] * num_requests, self._time.seconds(num_requests, 0, num_cached)
        self._rate = usual = num_requests / plain
        if self._waits_for_match(outlook):
            plain += self._time.device.drafts_s
            usual = max(usual, self._tokens / self._spent if self._spent else 0.0)
        self._seconds_planned = plain
        best_gain = least_gain * num_requests - usual * plain
        for choice in choices(*self._prospects(outlook, requests), max_counts, offered, budget):
            if not any(choice.counts):
                continue
            num_drafting, num_drafts = choice.num_drafting, sum(choice.counts)
            seconds = self._seconds(num_requests, num_drafting, num_cached, num_drafts, choice.longest)
            gain = choice.num_tokens - usual * seconds
            if gain > best_gain:
                best, best_gain, self.by_lookup = choice.counts, gain, choice.by_lookup
                self._rate, self._seconds_planned = choice.num_tokens / seconds, seconds
        return best

    def _seconds(self, num_requests: int, num_drafting: int, num_cached: int, num_drafts: int, most: int) -> float:
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
        return self._time.seconds(num_requests, num_drafts, num_cached) + (of_drafter if of_drafter >= 0 else math.inf)

    def _steps_between_trials(self, outlook: Outlook, trial: Sequence[int]) -> int:
        num_requests, num_cached = len(trial), outlook.num_cached
        plain = self._time.seconds(num_requests, 0, num_cached)
        waits = 2 * self._time.device.drafts_s  # host latency before and after the trial step
        seconds = self._seconds(num_requests, num_requests, num_cached, sum(trial), max(trial))
        if self._surplus > 0 and (num_requests + sum(trial)) / seconds > LEAST_GAIN * self._rate:
            return 0
        cost = seconds + waits - num_requests / self._rate
        return math.ceil(min(max(cost / plain / TRIAL_SHARE, SHORTEST_PAUSE), LONGEST_PAUSE))
