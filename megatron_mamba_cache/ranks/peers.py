"""The ranks that share each layer's experts. Each has requests of its own; all compute each step together."""

from collections.abc import Sequence
from typing import Protocol


class ExpertPeers(Protocol):
    """One rank's link to the ranks that it shares experts with; each of them makes the same calls in the same order."""

    num_ranks: int

    def greatest(self, values: Sequence[int]) -> list[int]:
        """Return the greatest of each value over all ranks; 64 bits each. Waits for the ranks, not for the device."""


class NoPeers:
    """The `ExpertPeers` of a rank that has all experts."""

    num_ranks = 1

    def greatest(self, values: Sequence[int]) -> list[int]:
        """Return the values."""
        return list(values)
