"""Quantiles of durations within five percent, in little memory, however many there are."""

import math
from collections import Counter
from collections.abc import Iterable

_RATIO = 1.05  # of a bucket's upper bound to its lower one
_LEAST = 1e-6


class Durations:
    """A histogram whose buckets grow by five percent; a bound of its relative error follows."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    @staticmethod
    def together(parts: Iterable["Durations"]) -> "Durations":
        """Return all durations of several histograms."""
        whole = Durations()
        for part in parts:
            whole._counts.update(part._counts)
        return whole

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a duration."""
        self._counts[math.ceil(math.log(max(seconds, _LEAST), _RATIO))] += times

    def quantile(self, share: float) -> float | None:
        """Return the duration that such a share of them does not exceed; None without any."""
        rank = math.ceil(share * self._counts.total())
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                return float(_RATIO ** (bucket - 0.5))
        return None
