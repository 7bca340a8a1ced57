"""When rows draft, and how much: what drafts are likely to bring against the time that they take."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..policy.requests import RunningRequest
from .acceptance import DRAFTER_WINDOW, REQUEST_WINDOW, Acceptance
from .draft_counts import LEAST_GAIN, best_counts
from .step_time import StepTime

_LOG = logging.getLogger(__name__)

FIRST_CHANCE = 0.7
"""Of a draft, before any was verified."""
NUM_TRIED, NUM_WRONG = 16, 4
"""Drafts that are tried at first whatever they cost, or wrong ones, before a drafter is known."""
TRIAL_DRAFTS = 4
PROBE_SHARE = 0.0075
"""Of the time, what probes may take."""
RESUME_GAIN = 1.1
"""What drafts must seem to bring before a rest ends for them: more than what goes on, so that luck alone ends none."""
SHORTEST_REST, LONGEST_REST = 8, 256
PATIENCE = 4
"""Steps in a row without any drafts to be had, before rows rest for that."""
_REQUEST_WEIGHT, _DRAFTER_WEIGHT = 3.0, 2.0
_NEVER = 1 << 62


class AllDrafts:
    """Stands in for a `DraftPolicy` where every row drafts as many tokens as it has room for, whatever they bring."""

    def counts(self, rows: Sequence[RunningRequest], rooms: Sequence[int], budget: int) -> list[int]:
        """Return the rooms, as far as the budget goes."""
        return _within(rooms, budget)

    def foresee(self, rows: Sequence[RunningRequest], most: int) -> None:
        """Decide nothing ahead."""

    def of_proposed(self, rows: Sequence[RunningRequest], proposed: Sequence[int]) -> list[int]:
        """Return what was proposed."""
        return list(proposed)

    def note(self, request_id: int, num_drafted: int, num_accepted: int) -> None:
        """Learn nothing."""

    def note_step(self, rows: Sequence[RunningRequest], *, asked: bool, drafted: bool) -> None:
        """Count nothing."""

    def rests(self, rows: Sequence[RunningRequest]) -> bool:
        """Return False, unless there are no rows."""
        return not rows

    def watched(self, rows: Sequence[RunningRequest]) -> list[RunningRequest]:
        """Return no row: none rests."""
        return []

    def reconsider(self, rows: Sequence[RunningRequest], offered: Sequence[int]) -> None:
        """Do nothing."""

    def forget(self, request_id: int) -> None:
        """Forget nothing."""


@dataclass(slots=True)
class _Rest:
    """No drafts of these requests before a step."""

    request_ids: set[int]
    end: int


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """The drafts of each of these requests in a step, if each has room for `most`."""

    step: int
    request_ids: list[int]
    most: int
    counts: list[int]


class DraftPolicy:
    """Decides how many drafts each row of a step gets; the same on all ranks of a model.

    A step gets the drafts with which it is likely to bring most tokens a second, by how many drafts were accepted
    lately, of each request and of all, and by how long steps take. Where none pay, all rows rest together, and steps
    may be launched ahead of their tokens. A rest ends when drafts seem to pay again. A drafter that takes no time is
    asked meanwhile, and its drafts are compared with what the rows write. After another's rest one step probes: every
    row drafts a few tokens. Such rests are so long that probes take about PROBE_SHARE of the time.

    Args:
        time: Of steps.
        drafter_seconds: Returns how long the drafter takes, by rows and drafts of the row that gets most.
        watches: Whether drafts of rows that rest are compared, see `watched`, so that no step need probe.
        is_patient: Whether rows do not rest because there are no drafts to be had: a draft model may be reading
            prompts, and reads on only if it is asked.
    """

    def __init__(
        self,
        time: StepTime,
        drafter_seconds: Callable[[int, int], float] = lambda _rows, _most: 0.0,
        *,
        watches: bool = False,
        is_patient: bool = False,
    ) -> None:
        self._time = time
        self._drafter_seconds = drafter_seconds
        self._watches, self._is_patient = watches, is_patient
        self._overall = Acceptance(DRAFTER_WINDOW, _DRAFTER_WEIGHT)
        self._of_requests: dict[int, Acceptance] = {}
        self._step = 0  # steps that have landed
        self._drafted_at = 0  # the last of them that was to have drafts
        self._rest: _Rest | None = None
        self._foreseen: _Foreseen | None = None
        self._num_empty = 0  # steps in a row that were to have drafts and had none
        self._probes = self._has_warned = False

    def counts(self, rows: Sequence[RunningRequest], rooms: Sequence[int], budget: int) -> list[int]:
        """Return how many drafts each row of the next step should get; estimates do not change.

        Args:
            rooms: [rows] the most drafts of each. Where none has room nothing is decided.
            budget: Of all rows; older rows' drafts go first.
        """
        none = [0] * len(rows)
        if budget <= 0 or not any(rooms) or self._holds(rows, self._step):
            return none
        self._rest, self._probes = None, False
        found = self._found_ahead(rows, rooms)
        if not any(found):  # rows must not rest because of what was known a step ago
            found = self._best(rows, rooms)
        if sum(found) > budget:
            found = self._best(rows, _within(found, budget))
        if any(found):
            return found
        probe, end = _within([min(TRIAL_DRAFTS, room) for room in rooms], budget), _NEVER
        if not self._watches:
            is_known = self._overall.is_known(NUM_TRIED, NUM_WRONG)
            end = self._drafted_at + self._steps_between_probes(rows, probe) if is_known else self._step
        if self._step >= end:
            self._probes = True
            return probe
        self._rest = _Rest({row.request_id for row in rows}, end)
        return none

    def foresee(self, rows: Sequence[RunningRequest], most: int) -> None:
        """Decide the drafts of the step after the one that runs, so that its tokens need not wait for that.

        What the running step teaches counts a step later, unless no drafts seem to pay.

        Args:
            rows: Of the running step; others, or less room, are decided by `counts`.
            most: Drafts that each has room for.
        """
        step, request_ids = self._step + 1, [row.request_id for row in rows]
        if not self._holds(rows, step):
            self._foreseen = _Foreseen(step, request_ids, most, self._best(rows, [most] * len(rows)))

    def of_proposed(self, rows: Sequence[RunningRequest], proposed: Sequence[int]) -> list[int]:
        """Return how many of its proposed drafts each row should get, where fewer were proposed than asked for.

        By now the step waits for its tokens and its drafter, with drafts or without.
        """
        if self._probes or not any(proposed):
            return list(proposed)
        num_cached = _num_cached(rows)
        plain = self._time.seconds(len(rows), 0, num_cached) + self._time.device.drafts_s
        return best_counts(
            self._chances(rows),
            proposed,
            lambda count, _most: self._time.seconds(len(rows), count, num_cached),
            plain,
        )

    def note(self, request_id: int, num_drafted: int, num_accepted: int) -> None:
        """Learn from the drafts of a row that were verified or watched; none teach nothing."""
        if request_id not in self._of_requests:
            self._of_requests[request_id] = Acceptance(REQUEST_WINDOW, _REQUEST_WEIGHT)
        self._of_requests[request_id].note(num_drafted, num_accepted)
        self._overall.note(num_drafted, num_accepted)

    def note_step(self, rows: Sequence[RunningRequest], *, asked: bool, drafted: bool) -> None:
        """Count a step that has landed, once each.

        Where nothing that was asked for was to be had or paid, rows rest: until something does, if drafts are watched,
        and else longer each time, but for the first PATIENCE times.

        Args:
            asked: Whether any row was to have drafts.
            drafted: Whether any had some.
        """
        if asked:
            self._drafted_at = self._step
            self._num_empty = 0 if drafted else self._num_empty + 1
        self._step += 1
        if asked and not drafted and not self._is_patient:
            self._rest = _Rest({row.request_id for row in rows}, _NEVER if self._watches else self._end_of_patience())

    def rests(self, rows: Sequence[RunningRequest]) -> bool:
        """Return whether rows whose step has no drafts will all get none in the step after it either, as no rows do."""
        return not rows or self._holds(rows, self._step + 1)

    def watched(self, rows: Sequence[RunningRequest]) -> list[RunningRequest]:
        """Return the rows that rest, if drafts are to be compared with what they write; `note` their outcomes."""
        rest = self._rest
        return [] if rest is None or not self._watches else [row for row in rows if row.request_id in rest.request_ids]

    def reconsider(self, rows: Sequence[RunningRequest], offered: Sequence[int]) -> None:
        """End the rest of rows if drafts seem to pay by now.

        Args:
            offered: [rows] drafts that there are of each.
        """
        if any(offered) and any(self._best(rows, offered, RESUME_GAIN)):
            self._rest = None

    def forget(self, request_id: int) -> None:
        """Drop what is known of a request."""
        self._of_requests.pop(request_id, None)
        self._foreseen = None  # also of the others, should it come back
        if self._rest is not None:
            self._rest.request_ids.discard(request_id)

    def _holds(self, rows: Sequence[RunningRequest], step: int) -> bool:
        """Return whether a rest holds for rows in a step."""
        rest = self._rest
        return rest is not None and step < rest.end and all(row.request_id in rest.request_ids for row in rows)

    def _found_ahead(self, rows: Sequence[RunningRequest], rooms: Sequence[int]) -> list[int]:
        """Return what was foreseen for a step of these rows; nothing if that was not."""
        known = self._foreseen
        if known is None or known.step != self._step or any(room != known.most for room in rooms):
            return []
        return known.counts if known.request_ids == [row.request_id for row in rows] else []

    def _end_of_patience(self) -> int:
        """Return before which step nothing is asked for again."""
        num_rests = min(self._num_empty - PATIENCE, LONGEST_REST)
        return self._step + (min(SHORTEST_REST << (num_rests - 1), LONGEST_REST) if num_rests > 0 else 0)

    def _best(self, rows: Sequence[RunningRequest], rooms: Sequence[int], least_gain: float = LEAST_GAIN) -> list[int]:
        """Return the drafts of each row that are likely to pay, asked of a drafter now."""
        num_cached = _num_cached(rows)
        plain = self._time.seconds(len(rows), 0, num_cached)
        return best_counts(
            self._chances(rows),
            rooms,
            lambda count, most: self._seconds(rows, count, most, num_cached),
            plain,
            least_gain,
        )

    def _seconds(self, rows: Sequence[RunningRequest], num_drafts: int, most: int, num_cached: int) -> float:
        """Return how long a step takes with its drafter; for ever if that does not say."""
        try:
            of_drafter = float(self._drafter_seconds(len(rows), most))
        except Exception as error:  # a drafter is user code, and its failure must not fail a request
            if not self._has_warned:
                _LOG.warning("draft_seconds() of a drafter failed, so that it is tried now and then only: %r", error)
            self._has_warned, of_drafter = True, math.inf
        return self._time.seconds(len(rows), num_drafts, num_cached) + (of_drafter if of_drafter >= 0 else math.inf)

    def _steps_between_probes(self, rows: Sequence[RunningRequest], probe: Sequence[int]) -> int:
        num_cached = _num_cached(rows)
        plain = self._time.seconds(len(rows), 0, num_cached)
        waits = 2 * self._time.device.drafts_s  # of the steps before and behind it
        cost = self._seconds(rows, sum(probe), max(probe), num_cached) + waits - plain
        return math.ceil(min(max(cost / plain / PROBE_SHARE, SHORTEST_REST), LONGEST_REST))

    def _chances(self, rows: Sequence[RunningRequest]) -> list[float]:
        expected, found = self._overall.chance(FIRST_CHANCE), []
        for row in rows:
            known = self._of_requests.get(row.request_id)
            found.append(expected if known is None else known.hoped(expected))
        return found


def _within(counts: Sequence[int], budget: int) -> list[int]:
    """Return as many of rows' drafts as a budget has room for, those of the first rows first."""
    found = []
    for count in counts:
        found.append(max(0, min(count, budget)))
        budget -= found[-1]
    return found


def _num_cached(rows: Sequence[RunningRequest]) -> int:
    return sum(row.computed for row in rows)
