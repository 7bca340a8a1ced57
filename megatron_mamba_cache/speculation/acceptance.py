"""Estimates of how likely drafts are accepted, learned from verified and from shadow drafts."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..policy.requests import RunningRequest

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]

THRESHOLDS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02)
"""Tried as the lowest acceptance chance of a step's drafts."""
_LOG_THRESHOLDS = np.log(THRESHOLDS)[:, None]
LEAST_GAIN = 1.02
"""Minimum speedup of drafts; below it, the gain is within the error of the estimated times."""
_SURE = 0.999


def expected_tokens(chances: FloatArray, counts: IntArray) -> FloatArray:
    """Return the expected number of tokens that all requests keep of a step: [...].

    Args:
        chances: [requests] that a draft is right if those before it are, below 1.
        counts: [..., requests] drafts of each.
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
    """Return the draft counts that maximize tokens per second; all 0 unless they beat a plain step.

    For each of THRESHOLDS, every request gets the drafts that are kept with at least that chance; the best step wins.

    Args:
        chances: [requests] that a draft is right if those before it are.
        rooms: [requests] the most drafts of each, 0 or more.
        seconds: Estimates a step's time from its total drafts and the most drafts of one request.
        plain_seconds: Time of a step without drafts.
        least_gain: Minimum speedup over a plain step.
    """
    chance = np.clip(np.asarray(chances, dtype=np.float64), 1e-6, _SURE)
    tried = np.minimum(_LOG_THRESHOLDS / np.log(chance), rooms).astype(np.int64)  # [thresholds, requests]
    totals, most = tried.sum(axis=1).tolist(), tried.max(axis=1).tolist()
    tokens = expected_tokens(chance, tried).tolist()
    best, best_rate, before = None, least_gain * len(chances) / plain_seconds, 0
    for number, total in enumerate(totals):
        if total > before:  # else no draft more
            before = total
            rate = tokens[number] / seconds(total, most[number])
            if rate > best_rate:
                best, best_rate = number, rate
    return [0] * len(chances) if best is None else [int(count) for count in tried[best]]


OPTIMISM = 0.5
"""Standard errors added to an estimate, so that uncertain drafts are tried."""
REQUEST_WINDOW = 32
"""Drafts of a request in its estimate."""
DRAFTER_WINDOW = 128
"""Drafts of all requests in the estimate for a new one."""


class Acceptance:
    """Estimate the chance that a draft is right if those before it in its step are.

    Older drafts have less weight. Drafts after the first wrong one do not count.

    Args:
        window: Effective number of drafts in the estimate, more than 1.
        weight: Weight of the prior, in drafts.
    """

    __slots__ = ("_keep", "_right", "_tried", "_weight")

    def __init__(self, window: int, weight: float) -> None:
        self._keep = 1 - 1 / window
        self._weight = weight
        self._right = self._tried = 0.0

    def is_known(self, num_tried: int, num_wrong: int) -> bool:
        """Return True if the estimate has at least this many drafts, or wrong drafts."""
        return self._tried >= num_tried or self._tried - self._right >= num_wrong

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a step.

        Args:
            num_drafted: Verified drafts; 0 teaches nothing.
            num_accepted: Accepted drafts, without the base token.

        Raises:
            ValueError: If more were accepted than drafted, or a number is negative.
        """
        if not 0 <= num_accepted <= num_drafted:
            raise ValueError(f"need 0 <= num_accepted <= num_drafted, found {num_accepted} of {num_drafted}")
        num_tried = min(num_accepted + 1, num_drafted)
        kept = self._keep**num_tried
        self._right = kept * self._right + num_accepted
        self._tried = kept * self._tried + num_tried

    def chance(self, expected: float) -> float:
        """Return the estimate, between 0 and 1, for a prior `expected`."""
        return (self._right + self._weight * expected) / (self._tried + self._weight)

    def optimistic_chance(self, expected: float) -> float:
        """Return the estimate plus part of its standard error, so that bad luck ends nothing."""
        chance = self.chance(expected)
        error = math.sqrt(max(chance * (1 - chance), 0.0) / (self._tried + self._weight + 1))
        return min(chance + OPTIMISM * error, 1.0)


class ShadowDrafts:
    """Drafts that are compared with the generated text instead of verified, at most one for each request."""

    def __init__(self) -> None:
        self._drafts: dict[int, tuple[int, tuple[int, ...]]] = {}  # request -> where it starts in the reply, its tokens

    def start(self, request: RunningRequest, tokens: tuple[int, ...]) -> None:
        """Start a shadow draft at the end of a request's text; it replaces an earlier one."""
        self._drafts[request.request_id] = len(request.generated), tokens

    def num_tokens(self, request: RunningRequest) -> int:
        """Return the length of a request's shadow draft; 0 if it has none."""
        return len(self._drafts[request.request_id][1]) if request.request_id in self._drafts else 0

    def ended(self, requests: Sequence[RunningRequest]) -> Iterator[tuple[int, int, int]]:
        """Yield (request id, drafted, correct) for each shadow draft that the text has decided."""
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
        """Drop the draft of a request."""
        self._drafts.pop(request_id, None)

    def clear(self) -> None:
        """Drop all drafts."""
        self._drafts.clear()
