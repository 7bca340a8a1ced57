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
_LOG_THRESHOLDS = np.log(THRESHOLDS)[:, None]
LEAST_GAIN = 1.02
"""Minimum expected speedup for drafting; a smaller gain is within the error of the time estimates."""
_SURE = 0.999


def expected_tokens(probabilities: FloatArray, counts: IntArray) -> FloatArray:
    """Return the expected number of tokens that a step produces, summed over all requests; shape [...].

    Args:
        probabilities: [requests] probability, below 1, that a draft token is accepted given that all earlier ones were.
        counts: [..., requests] number of draft tokens.
    """
    found: FloatArray = ((1 - probabilities ** (counts + 1)) / (1 - probabilities)).sum(axis=-1)
    return found


def best_counts(
    probabilities: Sequence[float],
    max_counts: Sequence[int],
    seconds: Callable[[int, int], float],
    plain_seconds: float,
    least_gain: float = LEAST_GAIN,
) -> list[int]:
    """Return the draft counts that maximize the expected tokens per second; zeros if drafting is not faster.

    Each threshold in THRESHOLDS gives one candidate: a request then drafts as many tokens as are all accepted with at
    least that probability.

    Args:
        probabilities: [requests] probability that a draft token is accepted given that all earlier ones were.
        max_counts: [requests] maximum number of draft tokens, 0 or more.
        seconds: Function that estimates the seconds for a step from its total number of draft tokens and the length of
            its longest draft.
        plain_seconds: Estimated seconds for a step without drafts.
        least_gain: Minimum speedup over a step without drafts.
    """
    probability = np.clip(np.asarray(probabilities, dtype=np.float64), 1e-6, _SURE)
    tried = np.minimum(_LOG_THRESHOLDS / np.log(probability), max_counts).astype(np.int64)  # [thresholds, requests]
    totals, most = tried.sum(axis=1).tolist(), tried.max(axis=1).tolist()
    tokens = expected_tokens(probability, tried).tolist()
    best, best_rate, before = None, least_gain * len(probabilities) / plain_seconds, 0
    for number, total in enumerate(totals):
        if total > before:  # otherwise, the lower threshold gives the same counts
            before = total
            rate = tokens[number] / seconds(total, most[number])
            if rate > best_rate:
                best, best_rate = number, rate
    return [0] * len(probabilities) if best is None else [int(count) for count in tried[best]]


OPTIMISM = 0.5
"""Number of standard errors added to an estimate, so that drafts of uncertain acceptance are tried."""
REQUEST_WINDOW = 32
"""Effective number of draft tokens in the estimate for one request."""
DRAFTER_WINDOW = 128
"""Effective number of draft tokens, over all requests, in the estimate for a new request."""


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
