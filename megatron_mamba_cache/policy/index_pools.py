"""Indices of KV blocks and state slots, in memory of one use or shared by both."""

from collections.abc import Sequence
from typing import Protocol

from ..errors import CacheIntegrityError


class IndexPool(Protocol):
    """Indices of one use, from 0: KV blocks or state slots. A taken index is fixed (not evictable) until `unfix`."""

    @property
    def num_indices(self) -> int:
        """Numbers are below this."""

    @property
    def is_shared(self) -> bool:
        """True if memory that the other use frees can make room here."""

    @property
    def num_free(self) -> int:
        """Indices that `take` can return without an eviction."""

    @property
    def num_available(self) -> int:
        """Indices that `take` can return after evicting all that is not fixed."""

    def take(self, num_indices: int) -> list[int]:
        """Return free indices and fix them; there must be enough."""

    def fix(self, *indices: int) -> None:
        """Protect taken indices from eviction."""

    def unfix(self, *indices: int) -> None:
        """Let taken indices be evicted."""

    def release(self, index: int) -> None:
        """Free an index that is not fixed."""


class CacheSpace(Protocol):
    """The memory that KV blocks and states have."""

    @property
    def blocks(self) -> IndexPool:
        """Indices of KV blocks."""

    @property
    def slots(self) -> IndexPool:
        """Indices of states."""

    def fits(
        self, num_blocks: int, num_slots: int, kept_blocks: Sequence[int] = (), kept_slots: Sequence[int] = ()
    ) -> bool:
        """Return whether blocks and slots can be had together.

        Args:
            kept_blocks, kept_slots: Distinct taken indices, not fixed, that must stay.
        """

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless every count agrees with the indices. O(n)."""


class FixedIndexPool:
    """Indices that one use has for itself."""

    is_shared = False

    def __init__(self, num_indices: int) -> None:
        self.num_indices = self.num_free = self.num_available = num_indices
        self._free = list(reversed(range(num_indices)))  # a stack: lowest number on top

    def take(self, num_indices: int) -> list[int]:
        self.num_free -= num_indices
        self.num_available -= num_indices
        taken = self._free[self.num_free :]
        del self._free[self.num_free :]
        taken.reverse()
        return taken

    def fix(self, *indices: int) -> None:
        self.num_available -= len(indices)

    def unfix(self, *indices: int) -> None:
        self.num_available += len(indices)

    def release(self, index: int) -> None:
        self.num_free += 1
        self._free.append(index)

    def check_integrity(self) -> None:
        """Raise CacheIntegrityError unless free indices are distinct and the counts can be true. O(n)."""
        num_free = len(self._free)
        is_ordered = num_free == self.num_free <= self.num_available <= self.num_indices
        if len(set(self._free)) != num_free or not is_ordered:
            raise CacheIntegrityError(
                f"{self.num_indices} indices: free {sorted(self._free)}, {self.num_free} counted, and "
                f"{self.num_available} available"
            )
