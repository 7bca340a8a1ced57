"""Acceptance of one drafter's drafts: of each request, with that of all requests as its prior, and by position."""

from collections.abc import Sequence
from operator import gt, lt

import numpy as np

from .acceptance import (
    DRAFTER_WINDOW,
    MOST_POSITIONS,
    REQUEST_WINDOW,
    Acceptance,
    FloatArray,
    Positions,
    reach_of,
)

PRIOR_PROBABILITY = 0.7
"""Prior probability that a draft token is accepted, used before any draft has been verified."""
NUM_TRIED, NUM_REJECTED = 16, 4
"""A drafter's acceptance rate counts as known after NUM_TRIED verified or NUM_REJECTED rejected draft tokens."""
_REQUEST_WEIGHT, _DRAFTER_WEIGHT = 3.0, 2.0
_ALL = 0
"""The only key of the estimate for all requests."""


class DrafterAcceptance:
    """Acceptance of one drafter's drafts: of each request, with that of all requests as its prior, and by position.

    Outcomes are collected, and change the estimates only when these are read.
    """

    def __init__(self) -> None:
        self._overall = Acceptance(DRAFTER_WINDOW, _DRAFTER_WEIGHT)
        self._of_requests = Acceptance(REQUEST_WINDOW, _REQUEST_WEIGHT)
        self._positions = Positions(MOST_POSITIONS)
        self._outcomes: tuple[list[int], ...] = [], [], []  # request ids, numbers of drafts, numbers accepted
        self._forgotten: list[int] = []
        self._num_tried = self._num_rejected = 0

    @property
    def is_known(self) -> bool:
        """True if enough drafts were verified."""
        return self._num_tried >= NUM_TRIED or self._num_rejected >= NUM_REJECTED

    def note(self, request_ids: Sequence[int], num_drafted: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Record the outcomes of verified drafts or shadow drafts.

        Args:
            num_drafted: [drafts] number of verified draft tokens, at least 1.
            num_accepted: [drafts] number of accepted draft tokens, excluding the base token.

        Raises:
            ValueError: If no tokens were drafted, more were accepted than drafted, or a number is negative.
        """
        if min(num_drafted) < 1 or min(num_accepted) < 0 or any(map(gt, num_accepted, num_drafted)):
            raise ValueError(
                f"num_accepted must be between 0 and num_drafted, and num_drafted at least 1, found {num_accepted=}, "
                f"{num_drafted=}"
            )
        for numbers, added in zip(self._outcomes, (request_ids, num_drafted, num_accepted), strict=True):
            numbers.extend(added)
        num_rejected = sum(map(lt, num_accepted, num_drafted))
        self._num_tried += sum(num_accepted) + num_rejected
        self._num_rejected += num_rejected

    def reach(self, request_ids: Sequence[int], most: int) -> FloatArray:
        """Return `reach_of` for up to `most` draft tokens: of these requests, then of a new request."""
        self._read_outcomes()
        expected = float(self._overall.probabilities([_ALL], PRIOR_PROBABILITY)[0])
        found = self._of_requests.optimistic_probabilities(request_ids, expected)
        return reach_of(np.append(found, expected), self._positions.factors(most))

    def forget(self, request_id: int) -> None:
        """Drop the estimate for a request; its outcomes still count in that of all requests."""
        self._forgotten.append(request_id)

    def _read_outcomes(self) -> None:
        if self._outcomes[0]:
            self._note_outcomes()
        for request_id in self._forgotten:
            self._of_requests.forget(request_id)
        self._forgotten.clear()

    def _note_outcomes(self) -> None:
        ids, num_drafted, num_accepted = map(np.array, self._outcomes)
        for numbers in self._outcomes:
            numbers.clear()
        num_tried, everything = np.minimum(num_accepted + 1, num_drafted), np.zeros_like(ids)
        keys, index = np.unique(ids, return_inverse=True)
        request_ids = keys.tolist()
        expected = float(self._overall.probabilities([_ALL], PRIOR_PROBABILITY)[0])
        probabilities = self._of_requests.probabilities(request_ids, expected)[index]
        self._positions.note(num_drafted, num_accepted, probabilities)
        self._overall.note([_ALL], everything, num_tried, num_accepted)
        order = index.argsort(kind="stable")
        self._of_requests.note(request_ids, index[order], num_tried[order], num_accepted[order])
