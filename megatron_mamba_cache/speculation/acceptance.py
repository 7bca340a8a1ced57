"""Estimate the acceptance probability of draft tokens, and choose draft lengths from it."""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..policy.requests import RunningRequest

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]

THRESHOLDS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02)
"""Candidate thresholds: a draft grows while the probability that all its tokens are accepted is above the threshold."""
_THRESHOLDS = np.array(THRESHOLDS)[:, None, None]
LEAST_GAIN = 1.02
"""Minimum expected speedup for drafting; a smaller gain is within the error of the time estimates."""
_SURE = 0.999


def reach_of(probabilities: FloatArray, factors: FloatArray) -> FloatArray:
    """Return the probability that the first n draft tokens are accepted, [requests, positions] for n = 1, 2, ...

    Args:
        probabilities: [requests] probability that a draft token is accepted given that all earlier ones were.
        factors: [positions] factor of the probability that it is not, by position in the draft.
    """
    rejection = (1 - probabilities)[:, None] * factors
    found: FloatArray = np.minimum(np.maximum(1 - rejection, 1e-6), _SURE).cumprod(axis=1)
    return found


def expected_tokens(reach: FloatArray) -> FloatArray:
    """Return the expected number of tokens that a step produces for each request, [requests, 1 + positions].

    Args:
        reach: [requests, positions]; see `reach_of`.

    Returns:
        Number by request and number of draft tokens.
    """
    found = np.ones((len(reach), reach.shape[1] + 1))
    reach.cumsum(axis=1, out=found[:, 1:])
    found[:, 1:] += 1
    return found


def best_threshold(
    reach: FloatArray, max_counts: Sequence[int], seconds: Callable[[int, int], float]
) -> tuple[float, float]:
    """Return the threshold of THRESHOLDS with the most expected tokens per second, and this rate.

    With a threshold, a request drafts as many tokens as are all accepted with at least that probability. The threshold
    is infinite, and the rate 0, if no request would draft.

    Args:
        reach: [requests, positions]; see `reach_of`.
        max_counts: [requests] maximum number of draft tokens, from 0 to the number of positions.
        seconds: Function that estimates the seconds for a step from its total number of draft tokens and the length of
            the longest draft.
    """
    tried = np.minimum((reach >= _THRESHOLDS).sum(axis=2), max_counts)  # [thresholds, requests]
    totals, most = tried.sum(axis=1).tolist(), tried.max(axis=1).tolist()
    tokens = expected_tokens(reach)[np.arange(len(reach)), tried].sum(axis=1).tolist()
    best, best_rate, before = math.inf, 0.0, 0
    for threshold, total, longest, num_tokens in zip(THRESHOLDS, totals, most, tokens, strict=True):
        if total > before:  # otherwise, the lower threshold gives the same counts
            before, rate = total, num_tokens / seconds(total, longest)
            if rate > best_rate:
                best, best_rate = threshold, rate
    return best, best_rate


OPTIMISM = 0.5
"""Number of standard errors added to an estimate, so that drafts of uncertain acceptance are tried."""
REQUEST_WINDOW = 32
"""Effective number of draft tokens in the estimate for one request."""
DRAFTER_WINDOW = 128
"""Effective number of draft tokens, over all requests, in the estimate for a new request."""
_MOST_DRAFTS = 512
"""Number of drafts after which those before count half in the estimates by position."""
_POSITION_WEIGHT = 4.0
"""Weight of equal rates at all positions, as a number of rejections."""
_NONE = (0.0, 0.0)
MOST_POSITIONS = 8
"""Maximum number of draft tokens of a request."""


class Acceptance:
    """Running estimates of the acceptance probability of draft tokens by key, with less weight for older tokens.

    It is the probability that a draft token is accepted given that all earlier tokens in its draft were. Draft tokens
    after the first rejected one therefore do not count.

    Args:
        window: Effective number of draft tokens in an estimate, more than 1.
        weight: Weight of the prior, as a number of draft tokens.
    """

    def __init__(self, window: int, weight: float) -> None:
        self._keep = 1 - 1 / window
        self._weight = weight
        self._numbers: dict[int, tuple[float, float]] = {}  # key -> (accepted, tried)

    def note(self, keys: Sequence[int], index: IntArray, num_tried: IntArray, num_accepted: IntArray) -> None:
        """Update the estimates of `keys` with the outcomes of drafts, [drafts], the oldest of each key first.

        Args:
            index: [drafts] index of each draft's key, in ascending order; each key has drafts.
        """
        totals = np.bincount(index, num_tried)
        weights = self._keep ** (totals.cumsum()[index] - num_tried.cumsum())  # by the number of tokens tried later
        accepted, tried = np.bincount(index, weights * num_accepted), np.bincount(index, weights * num_tried)
        numbers = (self._keep**totals)[:, None] * self._numbers_of(keys)
        numbers[:, 0] += accepted
        numbers[:, 1] += tried
        self._numbers.update(zip(keys, map(tuple, numbers.tolist()), strict=True))

    def probabilities(self, keys: Sequence[int], expected: float) -> FloatArray:
        """Return the estimated acceptance probabilities, [keys], with `expected` as the prior."""
        numbers = self._numbers_of(keys)
        found: FloatArray = (numbers[:, 0] + self._weight * expected) / (numbers[:, 1] + self._weight)
        return found

    def optimistic_probabilities(self, keys: Sequence[int], expected: float) -> FloatArray:
        """Return the estimates plus OPTIMISM standard errors, at most 1; a few rejections then do not stop drafting.

        A key without outcomes has the probability `expected`.
        """
        tried, probabilities = self._numbers_of(keys)[:, 1], self.probabilities(keys, expected)
        errors = np.sqrt(np.maximum(probabilities * (1 - probabilities), 0) / (tried + self._weight + 1))
        return np.minimum(probabilities + OPTIMISM * errors * (tried > 0), 1.0)

    def forget(self, key: int) -> None:
        """Drop an estimate."""
        self._numbers.pop(key, None)

    def _numbers_of(self, keys: Sequence[int]) -> FloatArray:
        return np.array([self._numbers.get(key, _NONE) for key in keys])


class Positions:
    """Running estimate, over all requests, of how much likelier a draft token is rejected by its position in a draft.

    Args:
        num_positions: Maximum number of draft tokens.
    """

    def __init__(self, num_positions: int) -> None:
        self._expected, self._rejected = np.zeros(num_positions), np.zeros(num_positions)
        self._num_drafts = 0

    def note(self, num_drafted: IntArray, num_accepted: IntArray, probabilities: FloatArray) -> None:
        """Update the estimate with the outcomes of drafts, [drafts].

        Args:
            probabilities: Acceptance probability of a draft token that was expected, whatever its position.
        """
        size = len(self._expected)
        lengths = np.minimum(num_drafted, size)
        chances = np.bincount(np.minimum(num_accepted + 1, lengths), 1 - probabilities, size + 1)
        self._expected += chances[:0:-1].cumsum()[::-1]
        self._rejected += np.bincount(num_accepted[num_accepted < lengths], minlength=size)
        self._num_drafts += len(lengths)
        if self._num_drafts >= _MOST_DRAFTS:
            self._expected, self._rejected = self._expected / 2, self._rejected / 2
            self._num_drafts //= 2

    def factors(self, num_positions: int) -> FloatArray:
        """Return the numbers of rejections at the first positions, relative to the expected ones.

        They are relative to those at all positions, because the acceptance probability accounts for these.
        """
        weight = _POSITION_WEIGHT
        overall = (self._rejected.sum() + weight) / (self._expected.sum() + weight)
        found: FloatArray = ((self._rejected / overall + weight) / (self._expected + weight))[:num_positions]
        return found


class ShadowDrafts:
    """Drafts that are compared with the tokens generated later, without being verified; at most one per request."""

    def __init__(self) -> None:
        # request id -> (request, index in its reply, draft tokens)
        self._drafts: dict[int, tuple[RunningRequest, int, tuple[int, ...]]] = {}

    def start(self, request: RunningRequest, tokens: tuple[int, ...]) -> None:
        """Store a shadow draft that continues a request's current text; it replaces any earlier shadow draft."""
        self._drafts[request.request_id] = request, len(request.generated), tokens

    def num_tokens(self, request: RunningRequest) -> int:
        """Return the length of a request's shadow draft; 0 if it has none."""
        return len(self._drafts[request.request_id][2]) if request.request_id in self._drafts else 0

    def pop_ended(self) -> list[tuple[int, int, int]]:
        """Remove shadow drafts whose outcome is known; return (request id, draft length, number correct) for each."""
        found = []
        for request_id, (request, start, tokens) in self._drafts.items():
            written = request.generated[start : start + len(tokens)]
            if (*written,) != tokens[: len(written)]:
                num_correct = [one == other for one, other in zip(written, tokens, strict=False)].index(False)
                found.append((request_id, len(tokens), num_correct))
            elif len(written) == len(tokens):
                found.append((request_id, len(tokens), len(tokens)))
        for request_id, *_ in found:
            del self._drafts[request_id]
        return found

    def forget(self, request_id: int) -> None:
        """Drop the shadow draft of a request."""
        self._drafts.pop(request_id, None)

    def clear(self) -> None:
        """Drop all shadow drafts."""
        self._drafts.clear()
