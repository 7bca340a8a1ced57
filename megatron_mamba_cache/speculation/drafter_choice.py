"""Estimate what each drafter's drafts yield for each request, and list the ways to choose between two drafters."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..policy.requests import RunningRequest
from .acceptance import best_threshold, expected_tokens
from .all_drafts import within
from .drafter_acceptance import DrafterAcceptance


class Prospect(NamedTuple):
    """Best number of drafts of a request, and the tokens that a step is expected to yield: with these, and with any."""

    num_drafts: int
    best: float
    tokens: list[float]


@dataclass(frozen=True, slots=True)
class Prospects:
    """Prospects of requests with one drafter, and the tokens per second with these numbers of drafts."""

    by_request: dict[int, Prospect]
    of_new: Prospect
    rate: float

    @classmethod
    def estimate(
        cls,
        acceptance: DrafterAcceptance,
        request_ids: Sequence[int],
        most: int,
        drafting: set[int],
        seconds: Callable[[int, int], float],
    ) -> "Prospects":
        """Return the prospects with up to `most` drafts.

        Args:
            drafting: Requests that are expected to draft; if these are not among the requests, all do.
            seconds: As in `best_threshold`.
        """
        reach, drafting = acceptance.reach(request_ids, most), drafting.intersection(request_ids)
        max_counts = [most * (not drafting or request_id in drafting) for request_id in request_ids]
        threshold, rate = best_threshold(reach[:-1], max_counts, seconds)
        counts, tokens = (reach >= threshold).sum(axis=1), expected_tokens(reach)
        best = tokens[np.arange(len(counts)), counts]
        found = list(map(Prospect, counts.tolist(), best.tolist(), tokens.tolist()))
        return cls(dict(zip(request_ids, found, strict=False)), found[-1], rate)

    def of_requests(self, request_ids: Iterable[int]) -> list[Prospect]:
        """Return the prospect of each request."""
        find, of_new = self.by_request.get, self.of_new
        return [find(request_id, of_new) for request_id in request_ids]


@dataclass(frozen=True, slots=True)
class Outlook:
    """Expected yield of drafts, estimated before step number `step` and used for up to `validity` steps.

    Args:
        requests: Tuple of the requests; empty if they were not in a tuple.
        lookup: Prospects with prompt lookup alongside the drafter; the drafter's without it.
        winners: Requests for which prompt lookup, where it finds a match, is expected to be better than the drafter.
        new_may_win: True if this is expected for a new request.
        pays: True if drafts of the drafter alone are expected to save time.
    """

    requests: tuple[RunningRequest, ...]
    step: int
    validity: int
    num_cached: int
    drafter: Prospects
    lookup: Prospects
    winners: set[int]
    new_may_win: bool
    pays: bool

    def may_win(self, request_id: int) -> bool:
        """Return True if prompt lookup, where it finds a match, is expected to be better than the drafter."""
        return request_id in self.winners or (self.new_may_win and request_id not in self.drafter.by_request)

    def forget(self, request_id: int) -> None:
        """Treat a request as a new one from now on."""
        self.winners.discard(request_id)
        for prospects in (self.drafter, self.lookup):
            prospects.by_request.pop(request_id, None)

    def num_known(self, requests: Sequence[RunningRequest]) -> int:
        """Return how many of these requests were running at the estimate."""
        known = self.drafter.by_request
        return sum([request.request_id in known for request in requests])

    def is_due(self, requests: Sequence[RunningRequest], step: int) -> bool:
        """Return True if it must be estimated again, because of its age or because requests changed."""
        num_before, num_now = len(self.drafter.by_request), len(requests)
        if step - self.step >= self.validity:
            return True
        if requests is self.requests and num_before == num_now:
            return False
        return 4 * (num_before + num_now - 2 * self.num_known(requests)) > num_now


@dataclass(frozen=True, slots=True)
class Choice:
    """Number of draft tokens of each request, which of them prompt lookup drafts, and the expected tokens of a step."""

    counts: list[int]
    by_lookup: list[bool]
    num_tokens: float

    @property
    def num_drafting(self) -> int:
        """Number of requests for which the drafter is called."""
        return self.by_lookup.count(False)

    @property
    def longest(self) -> int:
        """Length of the drafter's longest draft."""
        return max([count * (not is_lookup) for count, is_lookup in zip(self.counts, self.by_lookup, strict=True)])


def choices(
    by_drafter: Sequence[Prospect],
    by_lookup: Sequence[Prospect],
    max_counts: Sequence[int],
    offered: Sequence[int],
    budget: int,
) -> list[Choice]:
    """Return the ways to draft: with the drafter, with prompt lookup, and each request with what yields more tokens.

    Args:
        max_counts: [requests] maximum number of draft tokens.
        offered: [requests] number of tokens that prompt lookup proposes; may be empty.
        budget: Maximum total number of draft tokens; older requests have priority.
    """
    drafted = _limited([prospect.num_drafts for prospect in by_drafter], max_counts, budget)
    tokens = [prospect.tokens[count] for prospect, count in zip(by_drafter, drafted, strict=True)]
    found = [Choice(drafted, [False] * len(drafted), sum(tokens))]
    if not any(offered):
        return found
    looked = _limited([prospect.num_drafts for prospect in by_lookup], offered, budget)
    looked_tokens = [prospect.tokens[count] for prospect, count in zip(by_lookup, looked, strict=True)]
    found.append(Choice(looked, [True] * len(looked), sum(looked_tokens)))
    is_better = [count > 0 and one >= other for count, one, other in zip(looked, looked_tokens, tokens, strict=True)]
    if any(is_better) and any(drafted) and not all(is_better):
        best = [one if is_lookup else other for one, other, is_lookup in zip(looked, drafted, is_better, strict=True)]
        if sum(best) <= budget:
            found.append(Choice(best, is_better, sum(map(max, looked_tokens, tokens))))
    return found


def _limited(counts: Iterable[int], max_counts: Sequence[int], budget: int) -> list[int]:
    found = list(map(min, counts, max_counts))
    return found if sum(found) <= budget else within(found, budget)
