"""A collective maximum for tests in which ranks are threads of one process."""

import threading
from collections.abc import Sequence

PATIENCE_S = 20


class Meeting:
    """Collective that returns the element-wise maximum of the ranks' numbers."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._reports: list[Sequence[int]] = []
        self._found: list[int] = []
        self._barrier = threading.Barrier(num_ranks, self._conclude, PATIENCE_S)

    def _conclude(self) -> None:
        self._found = [max(values) for values in zip(*self._reports, strict=True)]
        self._reports = []

    def greatest(self, values: Sequence[int]) -> list[int]:
        self._reports.append(values)
        self._barrier.wait()
        found = self._found
        self._barrier.wait()  # before the next round overwrites it
        return list(found)
