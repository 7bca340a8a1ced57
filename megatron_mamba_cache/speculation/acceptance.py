"""Estimate the acceptance probability of draft tokens, and choose draft lengths from it."""

import math
from collections.abc import Callable, Iterator, Sequence
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


def reach_of(probabilities: Sequence[float], factors: Sequence[float]) -> FloatArray:
    """Return the probability that the first n draft tokens are accepted, [requests, positions] for n = 1, 2, ...

    Args:
        probabilities: [requests] probability that a draft token is accepted given that all earlier ones were.
        factors: [positions] factor of the probability that it is not, by position in the draft.
    """
    rejection = np.subtract(1.0, probabilities)[:, None] * np.asarray(factors, dtype=np.float64)
    found: FloatArray = np.minimum(np.maximum(1 - rejection, 1e-6), _SURE).cumprod(axis=1)
    return found


def expected_tokens(reach: FloatArray, counts: IntArray) -> FloatArray:
    """Return the expected number of tokens that a step produces for each request, [..., requests].

    Args:
        reach: [requests, positions]; see `reach_of`.
        counts: [..., requests] number of draft tokens.
    """
    gains = np.ones((len(reach), reach.shape[1] + 1))
    reach.cumsum(axis=1, out=gains[:, 1:])
    gains[:, 1:] += 1
    found: FloatArray = gains[np.arange(len(reach)), counts]
    return found


def best_counts(
    reach: FloatArray,
    max_counts: Sequence[int],
    seconds: Callable[[int, int], float],
    least_rate: float,
    takes_time: Sequence[bool] | None = None,
) -> tuple[list[int], float]:
    """Return the draft counts that maximize the expected tokens per second, and this rate.

    Each threshold in THRESHOLDS gives one candidate: a request then drafts as many tokens as are all accepted with at
    least that probability.

    Args:
        reach: [requests, positions]; see `reach_of`.
        max_counts: [requests] maximum number of draft tokens, from 0 to the number of positions.
        seconds: Function that estimates the seconds for a step from its total number of draft tokens and the length of
            the longest draft that takes time.
        least_rate: Rate to exceed; otherwise, it is returned with zeros.
        takes_time: [requests] False for requests whose drafts take no time; None if all take time.
    """
    tried = np.minimum((reach >= _THRESHOLDS).sum(axis=2), max_counts)  # [thresholds, requests]
    charged = tried if takes_time is None else tried * np.asarray(takes_time)
    totals, most = tried.sum(axis=1).tolist(), charged.max(axis=1).tolist()
    tokens = expected_tokens(reach, tried).sum(axis=1).tolist()
    best, best_rate, before = None, least_rate, 0
    for number, total in enumerate(totals):
        if total > before:  # otherwise, the lower threshold gives the same counts
            before = total
            rate = tokens[number] / seconds(total, most[number])
            if rate > best_rate:
                best, best_rate = number, rate
    counts: list[int] = [0] * len(reach) if best is None else tried[best].tolist()
    return counts, best_rate


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
MOST_POSITIONS = 8
"""Maximum number of draft tokens of a request."""


class Acceptance:
    """Running estimate of the acceptance probability of draft tokens, with less weight for older tokens.

    It is the probability that a draft token is accepted given that all earlier tokens in its draft were. Draft tokens
    after the first rejected one therefore do not count.

    Args:
        window: Effective number of draft tokens in the estimate, more than 1.
        weight: Weight of the prior, as a number of draft tokens.
    """

    __slots__ = ("_accepted", "_keep", "_tried", "_weight")

    def __init__(self, window: int, weight: float) -> None:
        self._keep = 1 - 1 / window
        self._weight = weight
        self._accepted = self._tried = 0.0

    def is_known(self, num_tried: int, num_rejected: int) -> bool:
        """Return True if at least `num_tried` draft tokens were verified, or at least `num_rejected` were rejected."""
        return self._tried >= num_tried or self._tried - self._accepted >= num_rejected

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Update the estimate with the outcome of one draft.

        Args:
            num_drafted: Number of verified draft tokens; 0 has no effect.
            num_accepted: Number of accepted draft tokens, excluding the base token.

        Raises:
            ValueError: If more tokens were accepted than drafted, or a number is negative.
        """
        if not 0 <= num_accepted <= num_drafted:
            raise ValueError(
                f"num_accepted must be between 0 and num_drafted, found num_accepted={num_accepted}, "
                f"num_drafted={num_drafted}"
            )
        num_tried = min(num_accepted + 1, num_drafted)
        kept = self._keep**num_tried
        self._accepted = kept * self._accepted + num_accepted
        self._tried = kept * self._tried + num_tried

    def probability(self, expected: float) -> float:
        """Return the estimated acceptance probability, with `expected` as the prior."""
        return (self._accepted + self._weight * expected) / (self._tried + self._weight)

    def optimistic_probability(self, expected: float) -> float:
        """Return the estimate plus OPTIMISM standard errors, at most 1; a few rejections then do not stop drafting."""
        probability = self.probability(expected)
        error = math.sqrt(max(probability * (1 - probability), 0.0) / (self._tried + self._weight + 1))
        return min(probability + OPTIMISM * error, 1.0)


class Positions:
    """Running estimate, over all requests, of how much likelier a draft token is rejected by its position in a draft.

    Args:
        num_positions: Maximum number of draft tokens.
    """

    __slots__ = ("_expected", "_num_drafts", "_rejected")

    def __init__(self, num_positions: int) -> None:
        self._expected, self._rejected = [0.0] * num_positions, [0.0] * num_positions
        self._num_drafts = 0

    def note(self, num_drafted: int, num_accepted: int, probability: float) -> None:
        """Update the estimate with the outcome of one draft.

        Args:
            num_drafted, num_accepted: As in `Acceptance.note`.
            probability: Acceptance probability of a draft token that was expected, whatever its position.
        """
        num_positions = len(self._expected)
        for position in range(min(num_accepted + 1, num_drafted, num_positions)):
            self._expected[position] += 1 - probability
        if num_accepted < min(num_drafted, num_positions):
            self._rejected[num_accepted] += 1
        self._num_drafts += 1
        if self._num_drafts >= _MOST_DRAFTS:
            self._expected = [number / 2 for number in self._expected]
            self._rejected = [number / 2 for number in self._rejected]
            self._num_drafts //= 2

    def factors(self, num_positions: int) -> list[float]:
        """Return the numbers of rejections at the first positions, relative to the expected ones.

        They are relative to those at all positions, because the acceptance probability accounts for these.
        """
        weight = _POSITION_WEIGHT
        overall = (sum(self._rejected) + weight) / (sum(self._expected) + weight)
        pairs = zip(self._rejected[:num_positions], self._expected, strict=False)
        return [(rejected / overall + weight) / (expected + weight) for rejected, expected in pairs]


class ShadowDrafts:
    """Drafts that are compared with the tokens generated later, without being verified; at most one per request."""

    def __init__(self) -> None:
        self._drafts: dict[int, tuple[int, tuple[int, ...]]] = {}  # request id -> (index in its reply, draft tokens)

    def start(self, request: RunningRequest, tokens: tuple[int, ...]) -> None:
        """Store a shadow draft that continues a request's current text; it replaces any earlier shadow draft."""
        self._drafts[request.request_id] = len(request.generated), tokens

    def num_tokens(self, request: RunningRequest) -> int:
        """Return the length of a request's shadow draft; 0 if it has none."""
        return len(self._drafts[request.request_id][1]) if request.request_id in self._drafts else 0

    def ended(self, requests: Sequence[RunningRequest]) -> Iterator[tuple[int, int, int]]:
        """Remove shadow drafts whose outcome is known; yield (request id, draft length, number correct) for each."""
        for request in requests:
            if request.request_id not in self._drafts:
                continue
            start, tokens = self._drafts[request.request_id]
            written = request.generated[start : start + len(tokens)]
            pairs = enumerate(zip(written, tokens, strict=False))
            num_correct = next((number for number, (one, other) in pairs if one != other), len(written))
            if num_correct < len(written) or num_correct == len(tokens):
                del self._drafts[request.request_id]
                yield request.request_id, len(tokens), num_correct

    def forget(self, request_id: int) -> None:
        """Drop the shadow draft of a request."""
        self._drafts.pop(request_id, None)

    def clear(self) -> None:
        """Drop all shadow drafts."""
        self._drafts.clear()
