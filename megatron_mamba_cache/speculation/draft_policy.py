"""When rows draft, and how much: what drafts are likely to bring against the time that they take."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..policy.requests import RunningRequest
from .acceptance import DRAFTER_WINDOW, REQUEST_WINDOW, Acceptance
from .draft_counts import best_counts
from .step_time import StepTime

FIRST_CHANCE = 0.8
"""Of a draft, before any was verified."""
PROBE_DRAFTS = 4
PROBE_SHARE = 0.01
"""Of the time, what probes may take."""
SHORTEST_REST, LONGEST_REST = 8, 256
_REQUEST_WEIGHT, _DRAFTER_WEIGHT = 3.0, 4.0


class AllDrafts:
    """Stands in for a `DraftPolicy` where every row drafts as many tokens as it has room for, whatever they bring."""

    def counts(self, rows: Sequence[RunningRequest], rooms: Sequence[int]) -> list[int]:
        """Return the rooms."""
        return list(rooms)

    def of_proposed(self, rows: Sequence[RunningRequest], proposed: Sequence[int]) -> list[int]:
        """Return what was proposed."""
        return list(proposed)

    def note(self, request_id: int, num_drafted: int, num_accepted: int) -> None:
        """Learn nothing."""

    def note_step(self, *, drafted: bool) -> None:
        """Count nothing."""

    def rests(self, rows: Sequence[RunningRequest]) -> bool:
        """Return False."""
        return False

    def forget(self, request_id: int) -> None:
        """Forget nothing."""


@dataclass(slots=True)
class _Rest:
    """No drafts of these requests before a step."""

    request_ids: set[int]
    end: int


class DraftPolicy:
    """Decides how many drafts each row of a step gets; the same on all ranks of a model.

    A step gets the drafts with which it is likely to bring most tokens a second, by how many drafts were accepted
    lately, of each request and of all, and by how long steps take. Where none pay, all rows rest together, and steps
    may be launched ahead of their tokens. After a rest one step probes: every row drafts a few tokens. Rests are so
    long that probes take at most PROBE_SHARE of the time.

    Args:
        time: Of steps.
        drafter_seconds: Returns how long the drafter takes, by rows and drafts of the row that gets most.
    """

    def __init__(self, time: StepTime, drafter_seconds: Callable[[int, int], float] = lambda _rows, _most: 0.0) -> None:
        self._time = time
        self._drafter_seconds = drafter_seconds
        self._overall = Acceptance(DRAFTER_WINDOW, _DRAFTER_WEIGHT)
        self._of_requests: dict[int, Acceptance] = {}
        self._step = 0  # steps that have landed
        self._drafted_at = 0  # the last of them that was to have drafts
        self._rest: _Rest | None = None
        self._probes = False

    def counts(self, rows: Sequence[RunningRequest], rooms: Sequence[int]) -> list[int]:
        """Return how many drafts each row of the next step should get; estimates do not change.

        Args:
            rooms: [rows] the most drafts of each. Where none has room nothing is decided.
        """
        none = [0] * len(rows)
        if not any(rooms) or self._holds(rows, self._step):
            return none
        num_cached = _num_cached(rows)
        plain = self._time.seconds(len(rows), 0, num_cached)

        def seconds(num_drafts: int, most: int) -> float:
            return self._time.seconds(len(rows), num_drafts, num_cached) + self._drafter_seconds(len(rows), most)

        self._rest, self._probes = None, False
        found = best_counts(self._chances(rows), rooms, seconds, plain)
        if any(found):
            return found
        probe = [min(PROBE_DRAFTS, room) for room in rooms]
        more = seconds(sum(probe), max(probe)) + self._time.device.drafts_s - plain  # the step behind it waits, too
        end = self._drafted_at + _rest_between(more / plain)
        if self._step >= end:
            self._probes = True
            return probe
        self._rest = _Rest({row.request_id for row in rows}, end)
        return none

    def of_proposed(self, rows: Sequence[RunningRequest], proposed: Sequence[int]) -> list[int]:
        """Return how many of its proposed drafts each row should get, where fewer were proposed than asked for.

        By now the step waits for its tokens and its drafter, with drafts or without.
        """
        if self._probes or not any(proposed):
            return list(proposed)
        num_cached = _num_cached(rows)
        plain = self._time.seconds(len(rows), 0, num_cached) + self._time.device.drafts_s
        chances = self._chances(rows)
        return best_counts(
            chances, proposed, lambda count, _most: self._time.seconds(len(rows), count, num_cached), plain
        )

    def note(self, request_id: int, num_drafted: int, num_accepted: int) -> None:
        """Learn from a row that was to have drafts; 0 drafted where none was to be had, or none paid."""
        if request_id not in self._of_requests:
            self._of_requests[request_id] = Acceptance(REQUEST_WINDOW, _REQUEST_WEIGHT)
        self._of_requests[request_id].note(num_drafted, num_accepted)
        self._overall.note(num_drafted, num_accepted)

    def note_step(self, *, drafted: bool) -> None:
        """Count a step that has landed, once each.

        Args:
            drafted: Whether any row was to have drafts.
        """
        if drafted:
            self._drafted_at = self._step
        self._step += 1

    def rests(self, rows: Sequence[RunningRequest]) -> bool:
        """Return whether rows whose step has no drafts will all get none in the step after it either."""
        return self._holds(rows, self._step + 1)

    def forget(self, request_id: int) -> None:
        """Drop what is known of a request."""
        self._of_requests.pop(request_id, None)
        if self._rest is not None:
            self._rest.request_ids.discard(request_id)

    def _holds(self, rows: Sequence[RunningRequest], step: int) -> bool:
        """Return whether a rest holds for rows in a step."""
        rest = self._rest
        return rest is not None and step < rest.end and all(row.request_id in rest.request_ids for row in rows)

    def _chances(self, rows: Sequence[RunningRequest]) -> list[float]:
        expected, found = self._overall.chance(FIRST_CHANCE), []
        for row in rows:
            known = self._of_requests.get(row.request_id)
            found.append(expected if known is None else known.hoped(expected))
        return found


def _num_cached(rows: Sequence[RunningRequest]) -> int:
    return sum(row.computed for row in rows)


def _rest_between(cost: float) -> int:
    """Return how many steps lie from one probe to the next, by how many plain steps' time a probe costs."""
    return min(max(math.ceil(cost / PROBE_SHARE), SHORTEST_REST), LONGEST_REST)
