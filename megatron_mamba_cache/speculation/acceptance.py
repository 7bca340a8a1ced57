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
"""Candidate thresholds: a request drafts while the chance of keeping the next draft token is above it."""
_LOG_THRESHOLDS = np.log(THRESHOLDS)[:, None]
LEAST_GAIN = 1.02
"""Minimum expected speedup for drafting; a smaller gain is within the error of the time estimates."""
_SURE = 0.999


def expected_tokens(chances: FloatArray, counts: IntArray) -> FloatArray:
    """Return the expected number of tokens that a step adds over all requests, shape [...].

    Args:
        chances: [requests] chance, below 1, that a draft token is right if those before it are.
        counts: [..., requests] number of draft tokens.
    """
    found: FloatArray = ((1 - chances ** (counts + 1)) / (1 - chances)).sum(axis=-1)
    return found


def best_counts(
    chances: Sequence[float],
    rooms: Sequence[int],
    seconds: Callable[[int, int], float],
    plain_seconds: float,
    least_gain: float = LEAST_GAIN,
) -> list[int]:
    """Return the draft counts that maximize tokens per second, or zeros if drafting is not faster.

    Each of THRESHOLDS gives one candidate: every request drafts the tokens that are kept with at least that chance.

    Args:
        chances: [requests] chance that a draft token is right if those before it are.
        rooms: [requests] maximum number of draft tokens, 0 or more.
        seconds: Estimates the time of a step from the total number of draft tokens and the largest per request.
        plain_seconds: Time of a step without drafts.
        least_gain: Minimum speedup over a plain step.
    """
    chance = np.clip(np.asarray(chances, dtype=np.float64), 1e-6, _SURE)
    tried = np.minimum(_LOG_THRESHOLDS / np.log(chance), rooms).astype(np.int64)  # [thresholds, requests]
    totals, most = tried.sum(axis=1).tolist(), tried.max(axis=1).tolist()
    tokens = expected_tokens(chance, tried).tolist()
    best, best_rate, before = None, least_gain * len(chances) / plain_seconds, 0
    for number, total in enumerate(totals):
        if total > before:  # a lower threshold without more draft tokens changes nothing
            before = total
            rate = tokens[number] / seconds(total, most[number])
            if rate > best_rate:
                best, best_rate = number, rate
    return [0] * len(chances) if best is None else [int(count) for count in tried[best]]


OPTIMISM = 0.5
"""Number of standard errors added to an estimate, so that uncertain drafts are tried."""
REQUEST_WINDOW = 32
"""Effective number of draft tokens in the estimate for one request."""
DRAFTER_WINDOW = 128
"""Effective number of draft tokens, over all requests, in the estimate for a new request."""


class Acceptance:
    """Running estimate of the chance that a draft token is right if those before it in its step are.

    Older draft tokens have less weight. Tokens after the first wrong token of a draft do not count.

    Args:
        window: Effective number of draft tokens in the estimate, more than 1.
        weight: Weight of the prior, as a number of draft tokens.
    """

    __slots__ = ("_keep", "_right", "_tried", "_weight")

    def __init__(self, window: int, weight: float) -> None:
        self._keep = 1 - 1 / window
        self._weight = weight
        self._right = self._tried = 0.0

    def is_known(self, num_tried: int, num_wrong: int) -> bool:
        """Return True if the estimate is based on at least this many draft tokens, or this many wrong ones."""
        return self._tried >= num_tried or self._tried - self._right >= num_wrong

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
                f"need 0 <= num_accepted <= num_drafted, found num_accepted={num_accepted}, num_drafted={num_drafted}"
            )
        num_tried = min(num_accepted + 1, num_drafted)
        kept = self._keep**num_tried
        self._right = kept * self._right + num_accepted
        self._tried = kept * self._tried + num_tried

    def chance(self, expected: float) -> float:
        """Return the estimated chance, between 0 and 1, with `expected` as its prior."""
        return (self._right + self._weight * expected) / (self._tried + self._weight)

    def optimistic_chance(self, expected: float) -> float:
        """Return the estimate plus part of its standard error, so that bad luck does not stop drafting."""
        chance = self.chance(expected)
        error = math.sqrt(max(chance * (1 - chance), 0.0) / (self._tried + self._weight + 1))
        return min(chance + OPTIMISM * error, 1.0)


class ShadowDrafts:
    """Shadow drafts, which are compared with the generated text but never verified; at most one per request."""

    def __init__(self) -> None:
        self._drafts: dict[int, tuple[int, tuple[int, ...]]] = {}  # request id -> (start in the reply, draft tokens)

    def start(self, request: RunningRequest, tokens: tuple[int, ...]) -> None:
        """Start a shadow draft at the end of a request's text, replacing any earlier shadow draft."""
        self._drafts[request.request_id] = len(request.generated), tokens

    def num_tokens(self, request: RunningRequest) -> int:
        """Return the length of a request's shadow draft; 0 if it has none."""
        return len(self._drafts[request.request_id][1]) if request.request_id in self._drafts else 0

    def ended(self, requests: Sequence[RunningRequest]) -> Iterator[tuple[int, int, int]]:
        """Remove the shadow drafts whose outcome is known; yield (request id, drafted, correct) for each."""
        for request in requests:
            if request.request_id not in self._drafts:
                continue
            start, tokens = self._drafts[request.request_id]
            written = request.generated[start : start + len(tokens)]
            pairs = enumerate(zip(written, tokens, strict=False))
            num_right = next((number for number, (one, other) in pairs if one != other), len(written))
            if num_right < len(written) or num_right == len(tokens):
                del self._drafts[request.request_id]
                yield request.request_id, len(tokens), num_right

    def forget(self, request_id: int) -> None:
        """Drop the shadow draft of a request."""
        self._drafts.pop(request_id, None)

    def clear(self) -> None:
        """Drop all shadow drafts."""
        self._drafts.clear()
