"""The worth of a cached entry, and a heap that yields the entry of least worth first."""

from collections.abc import Callable
from math import isnan
from typing import NamedTuple, Protocol

from ..errors import CacheIntegrityError
from .quickheap import Quickheap

_STALE_ALLOWANCE = 64
_MOST_FILED_ANEW = 8


class CachedEntry(NamedTuple):
    """What a worth function may read of an entry. A tuple, because one is made for every push.

    All entries of a pool have the same size, so worth is per entry, not per byte.

    Args:
        last_used: A logical time.
        num_tokens: From the root to the end of the entry.
        floor: The highest worth evicted up to `last_used`, 0 if none was: aging, as in Greedy-Dual.
        lost_tokens: Tokens that a request matching up to here recomputes once the entry is gone: for a state, all since
            the nearest state before it; for a KV block, the block's own.
        num_hits: Requests for which this entry was the deepest usable one.
        num_continuations: For a state, the texts that continued directly after it: 0 at the end of all known text, 1
            inside a text, more where texts branch.
    """

    last_used: int
    num_tokens: int
    floor: float = 0.0
    lost_tokens: int = 0
    num_hits: int = 0
    num_continuations: int = 0


class Worth(Protocol):
    """A function of the entry alone, so every rank computes the same value; the lowest is evicted first."""

    def __call__(self, entry: CachedEntry, /) -> float:
        """Return what keeping the entry is worth; any finite scale."""


def lru_worth(entry: CachedEntry) -> float:
    """Return the entry's last use: the least recently used goes first."""
    return entry.last_used


_Item = tuple[float, int, int, int]  # worth, last use, minus depth, id: compared in this order


class EvictionHeap:
    """Ids in eviction order: lowest worth first, then least recently used, deepest, lowest id.

    Ids count from 0: memory grows with the highest. Live items are in a list: with many ids, a dictionary makes a push
    or pop several times slower through CPU cache misses.

    Replaced and discarded items stay in the heap until they surface or outnumber the live ones, so every operation is
    amortised O(log n) and there are at most as many stale items as live ones, plus a constant.
    """

    def __init__(self, worth: Worth = lru_worth) -> None:
        self._worth = worth
        self._items: Quickheap[_Item] = Quickheap()
        self._live: list[_Item | None] = []
        self._num_live = 0
        self._num_stale = 0
        self.floor = 0.0
        """The highest worth evicted so far, 0 before the first eviction."""

    def __len__(self) -> int:
        return self._num_live

    def __contains__(self, entry_id: int) -> bool:
        return entry_id < len(self._live) and self._live[entry_id] is not None

    def push(self, entry_id: int, entry: CachedEntry) -> None:
        """Add an id, or replace its entry.

        Raises:
            ValueError: If the worth is not a number.
        """
        worth = self._worth(entry)
        if isnan(worth):
            raise ValueError(f"need a worth that can be ordered, found {worth} for {entry}")
        item = (worth, entry.last_used, -entry.num_tokens, entry_id)
        if entry_id >= len(self._live):
            self._live += [None] * (entry_id + 1 - len(self._live))
        if self._live[entry_id] is None:
            self._num_live += 1
        else:
            self._num_stale += 1
        self._live[entry_id] = item
        self._items.push(item)
        self._compact()

    def discard(self, entry_id: int) -> None:
        """Remove an id; nothing happens if it is absent."""
        if entry_id in self:
            self._live[entry_id] = None
            self._num_live -= 1
            self._num_stale += 1
            self._compact()

    def pop(self) -> int:
        """Remove and return the id to evict first.

        Raises:
            CacheIntegrityError: If there is none.
        """
        while self._num_live:
            item = self._items.pop()
            entry_id = item[3]
            if self._live[entry_id] is item:
                self._live[entry_id] = None
                self._num_live -= 1
                self._compact()
                if item[0] > self.floor:
                    self.floor = item[0]
                return entry_id
            self._num_stale -= 1
        raise CacheIntegrityError("need an entry to evict, found none; ask for no more than is evictable")

    def pop_current(self, changed: Callable[[int], CachedEntry | None]) -> int:
        """Remove and return the id to evict first by its current entry.

        An id whose entry has changed since it was pushed is pushed again. This happens a few times at most, which keeps
        it O(log n); the last id is evicted whatever its worth. When a worth falls, the owner must push the id itself.

        Args:
            changed: Returns an id's current entry, or None if it is the one that was pushed.

        Raises:
            CacheIntegrityError: If there is none.
        """
        entry_id = self.pop()
        for _ in range(_MOST_FILED_ANEW):
            entry = changed(entry_id)
            if entry is None:
                break
            self.push(entry_id, entry)
            again = self.pop()
            if again == entry_id:
                break
            entry_id = again
        return entry_id

    def clear(self) -> None:
        """Remove every id."""
        self._items.clear()
        self._live.clear()
        self._num_live = self._num_stale = 0

    def _is_live(self, item: _Item) -> bool:
        # Identity, not equality: an id that was discarded and pushed again may have an equal, stale item.
        return self._live[item[3]] is item

    def _compact(self) -> None:
        if self._num_stale > self._num_live + _STALE_ALLOWANCE:
            self._items.keep(self._is_live)
            self._num_stale = 0
