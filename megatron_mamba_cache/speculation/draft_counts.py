"""How many drafts each row of a step gets: as many as bring most tokens a second."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

THRESHOLDS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02)
"""Chances of being kept that are tried as the least of a step's drafts."""
LEAST_GAIN = 1.02
"""What drafts must bring: below, what they seem to gain is within the error of the reckoned times."""
_SURE = 0.999


def expected_tokens(chances: ArrayLike, counts: ArrayLike) -> float:
    """Return how many tokens rows keep of a step, on average.

    Args:
        chances: [rows] of a draft being right if those before it are.
        counts: [rows] drafts of each.
    """
    chance = np.minimum(np.asarray(chances, dtype=np.float64), _SURE)
    return float(((1 - chance ** (np.asarray(counts) + 1)) / (1 - chance)).sum())


def best_counts(
    chances: Sequence[float], rooms: Sequence[int], seconds: Callable[[int, int], float], plain_seconds: float
) -> list[int]:
    """Return the number of drafts of each row that brings most tokens a second, all 0 unless that beats a plain step.

    A draft is worth its place if it is likely to be kept: that it is right, and all before it. So for each of
    THRESHOLDS every row gets the drafts that are kept with at least that chance, and the best of these steps is taken.

    Args:
        chances: [rows] of a draft being right if those before it are.
        rooms: [rows] the most drafts of each, 0 or more.
        seconds: Returns how long a step takes, by its drafts in total and by those of the row that has most.
        plain_seconds: Of a step without drafts.
    """
    chance = np.clip(np.asarray(chances, dtype=np.float64), 1e-6, _SURE)
    most = np.asarray(rooms, dtype=np.int64)
    best, best_rate = np.zeros(len(most), dtype=np.int64), LEAST_GAIN * len(most) / plain_seconds
    tried = 0
    for threshold in THRESHOLDS:
        counts = np.minimum(most, (np.log(threshold) / np.log(chance)).astype(np.int64))
        total = int(counts.sum())
        if total == tried:  # no draft more
            continue
        tried = total
        rate = expected_tokens(chance, counts) / seconds(total, int(counts.max()))
        if rate > best_rate:
            best, best_rate = counts, rate
    return [int(count) for count in best]
