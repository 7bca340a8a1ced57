"""Index allocation for KV blocks and state slots, in separate memory or in memory that both share."""

from collections.abc import Sequence
from typing import Protocol

from ..errors import CacheIntegrityError


class IndexPool(Protocol):
    """Interface of a pool of KV-block or state-slot indices. A taken index is fixed (not evictable) until `unfix`."""

    num_indices: int
    """Number of indices, which are 0 to `num_indices` - 1."""
    is_shared: bool
    """True if memory freed by the other pool can be used by this one."""
    num_free: int
    """Number of indices that `take` can return without an eviction."""

    @property
    def num_available(self) -> int:
        """Number of indices that `take` can return after evicting everything that is not fixed."""

    def take(self, num_indices: int) -> list[int]:
        """Return free indices and fix them; the caller ensures that there are enough."""

    def fix(self, *indices: int) -> None:
        """Protect taken indices from eviction."""

    def unfix(self, *indices: int) -> None:
        """Allow the eviction of taken indices."""

    def release(self, index: int) -> None:
        """Free an index that is not fixed."""


class CacheSpace(Protocol):
    """Interface of the memory for KV blocks and states, which decides how many of each can be allocated."""

    @property
    def blocks(self) -> IndexPool:
        """Pool of KV block indices."""

    @property
    def slots(self) -> IndexPool:
        """Pool of state slot indices."""

    def fits(
        self, num_blocks: int, num_slots: int, kept_blocks: Sequence[int] = (), kept_slots: Sequence[int] = ()
    ) -> bool:
        """Return whether this many blocks and slots can be allocated at the same time.

        Args:
            kept_blocks, kept_slots: Distinct taken indices that are evictable but must be kept.
        """

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless every count agrees with the indices. O(n)."""


class FixedIndexPool:
    """`IndexPool` with memory of its own, which no other pool can use."""

    is_shared = False

    def __init__(self, num_indices: int) -> None:
        self.num_indices = self.num_free = self.num_available = num_indices
        self._free = list(reversed(range(num_indices)))  # stack, lowest index on top

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
        """Raise `CacheIntegrityError` unless the free indices are distinct and the counts are consistent. O(n)."""
        num_free = len(self._free)
        is_ordered = num_free == self.num_free <= self.num_available <= self.num_indices
        if len(set(self._free)) != num_free or not is_ordered:
            raise CacheIntegrityError(
                f"the pool counts {self.num_free} free and {self.num_available} available of {self.num_indices} "
                f"indices, but its free indices are {sorted(self._free)}"
            )
