"""Quantiles of durations within five percent, in little memory regardless of their number."""

import math
from collections import Counter
from collections.abc import Iterable

_RATIO = 1.05  # of a bucket's upper bound to its lower one
_LEAST = 1e-6


class Durations:
    """A histogram whose buckets grow by five percent, which bounds its relative error."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    @staticmethod
    def together(parts: Iterable["Durations"]) -> "Durations":
        """Return the sum of several histograms."""
        whole = Durations()
        for part in parts:
            whole._counts.update(part._counts)
        return whole

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a duration."""
        self._counts[math.ceil(math.log(max(seconds, _LEAST), _RATIO))] += times

    def quantile(self, share: float) -> float | None:
        """Return the duration that `share` of all durations does not exceed; None if there are none."""
        rank = math.ceil(share * self._counts.total())
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                return float(_RATIO ** (bucket - 0.5))
        return None
