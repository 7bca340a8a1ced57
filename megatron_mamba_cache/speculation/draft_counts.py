"""How many drafts each request of a step gets: those that maximize tokens per second."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

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

    A draft pays if it is likely to be kept: if it and all before it are right. For each of THRESHOLDS, every request
    gets the drafts that are kept with at least that chance; the best of these steps wins.

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
