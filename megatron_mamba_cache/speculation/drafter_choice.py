"""Estimate the acceptance of each drafter's drafts, and list the ways to choose between two drafters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..policy.requests import RunningRequest
from .acceptance import (
    DRAFTER_WINDOW,
    MOST_POSITIONS,
    REQUEST_WINDOW,
    Acceptance,
    FloatArray,
    IntArray,
    Positions,
    expected_tokens,
    reach_of,
)

PRIOR_PROBABILITY = 0.7
"""Prior probability that a draft token is accepted, used before any draft has been verified."""
NUM_TRIED, NUM_REJECTED = 16, 4
"""A drafter's acceptance rate counts as known after NUM_TRIED verified or NUM_REJECTED rejected draft tokens."""
_REQUEST_WEIGHT, _DRAFTER_WEIGHT = 3.0, 2.0


class DrafterAcceptance:
    """Acceptance of one drafter's drafts: of each request, with that of all requests as its prior, and by position."""

    def __init__(self) -> None:
        self._overall = Acceptance(DRAFTER_WINDOW, _DRAFTER_WEIGHT)
        self._of_requests: dict[int, Acceptance] = {}
        self._positions = Positions(MOST_POSITIONS)

    @property
    def is_known(self) -> bool:
        """True if enough drafts were verified."""
        return self._overall.is_known(NUM_TRIED, NUM_REJECTED)

    def note(self, request_id: int, num_drafted: int, num_accepted: int) -> None:
        """Update the estimates with the outcome of a verified draft or a shadow draft."""
        known = self._of_requests.get(request_id)
        if known is None:
            known = self._of_requests[request_id] = Acceptance(REQUEST_WINDOW, _REQUEST_WEIGHT)
        probability = known.probability(self._overall.probability(PRIOR_PROBABILITY))
        self._positions.note(num_drafted, num_accepted, probability)
        known.note(num_drafted, num_accepted)
        self._overall.note(num_drafted, num_accepted)

    def reach(self, requests: Sequence[RunningRequest], most: int) -> FloatArray:
        """Return `reach_of` for up to `most` draft tokens."""
        expected, found = self._overall.probability(PRIOR_PROBABILITY), []
        for request in requests:
            known = self._of_requests.get(request.request_id)
            found.append(expected if known is None else known.optimistic_probability(expected))
        return reach_of(found, self._positions.factors(most))

    def forget(self, request_id: int) -> None:
        """Drop the estimate for a request."""
        self._of_requests.pop(request_id, None)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which requests draft by prompt lookup, and each request's `reach_of` and maximum number of draft tokens."""

    by_lookup: list[bool]
    reach: FloatArray
    limits: IntArray


def choices(
    drafter: DrafterAcceptance,
    lookup: DrafterAcceptance,
    requests: Sequence[RunningRequest],
    max_counts: Sequence[int],
    offered: Sequence[int],
) -> Iterator[Choice]:
    """Yield the ways to draft: with the drafter, with prompt lookup, and each request with what yields more tokens.

    Args:
        max_counts: [requests] maximum number of draft tokens.
        offered: [requests] number of tokens that prompt lookup proposes; may be empty.
    """
    num_requests, most = len(requests), max((*max_counts, *offered))
    by_drafter = Choice([False] * num_requests, drafter.reach(requests, most), np.asarray(max_counts))
    yield by_drafter
    if not any(offered):
        return
    by_lookup = Choice([True] * num_requests, lookup.reach(requests, most), np.asarray(offered))
    yield by_lookup
    gains = (expected_tokens(choice.reach, choice.limits) for choice in (by_lookup, by_drafter))
    is_better = np.greater_equal(*gains)
    if is_better.any() and not is_better.all():
        reach = np.where(is_better[:, None], by_lookup.reach, by_drafter.reach)
        yield Choice(is_better.tolist(), reach, np.where(is_better, by_lookup.limits, by_drafter.limits))
