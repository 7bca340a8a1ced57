"""How many drafts each row of a step gets: as many as bring most tokens a second."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]

THRESHOLDS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02)
"""Chances of being kept that are tried as the least of a step's drafts."""
_LOG_THRESHOLDS = np.log(THRESHOLDS)[:, None]
LEAST_GAIN = 1.02
"""What drafts must bring: below, what they seem to gain is within the error of the reckoned times."""
_SURE = 0.999


def expected_tokens(chances: FloatArray, counts: IntArray) -> FloatArray:
    """Return how many tokens all rows keep of a step, on average: [...].

    Args:
        chances: [rows] of a draft being right if those before it are, below 1.
        counts: [..., rows] drafts of each.
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
    """Return the number of drafts of each row that brings most tokens a second, all 0 unless that beats a plain step.

    A draft is worth its place if it is likely to be kept: that it is right, and all before it. So for each of
    THRESHOLDS every row gets the drafts that are kept with at least that chance, and the best of these steps is taken.

    Args:
        chances: [rows] of a draft being right if those before it are.
        rooms: [rows] the most drafts of each, 0 or more.
        seconds: Returns how long a step takes, by its drafts in total and by those of the row that has most.
        plain_seconds: Of a step without drafts.
        least_gain: Factor on a plain step's tokens a second that drafts must reach.
    """
    chance = np.clip(np.asarray(chances, dtype=np.float64), 1e-6, _SURE)
    tried = np.minimum(_LOG_THRESHOLDS / np.log(chance), rooms).astype(np.int64)  # [thresholds, rows]
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
