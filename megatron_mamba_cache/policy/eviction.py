"""What a cached entry is worth, and a heap that gives up the least worthy first."""

from collections.abc import Callable
from math import isnan
from typing import NamedTuple, Protocol

from ..errors import CacheIntegrityError
from .quickheap import Quickheap

_STALE_ALLOWANCE = 64
_MOST_FILED_ANEW = 8


class CachedEntry(NamedTuple):
    """What a worth function may know of an entry. A tuple, since one is made for every push.

    Entries of a pool are of one size, so that what counts is worth an entry, not a byte.

    Args:
        last_used: A logical time.
        num_tokens: From the root to the end of the entry.
        floor: The highest worth of an entry evicted until `last_used`, 0 if none was: aging, as in Greedy-Dual.
        lost_tokens: What a request that ends here computes again once the entry is gone: of a state, all from the
            nearest state before it; of a KV block, the block.
        num_hits: Requests that found this entry to be the deepest of use to them.
        num_continuations: Of a state, others that followed directly behind it: 0 at the end of all that is known, 1
            inside a text that went on, more where texts part.
    """

    last_used: int
    num_tokens: int
    floor: float = 0.0
    lost_tokens: int = 0
    num_hits: int = 0
    num_continuations: int = 0


class Worth(Protocol):
    """A function of the entry alone, so that every rank reaches the same figure; the lowest is evicted first."""

    def __call__(self, entry: CachedEntry, /) -> float:
        """Return what keeping the entry is worth; any finite scale."""


def lru_worth(entry: CachedEntry) -> float:
    """Return the entry's last use: the least recently used goes first."""
    return entry.last_used


_Item = tuple[float, int, int, int]  # worth, last use, minus depth, id: compared in this order


class EvictionHeap:
    """Ids in the order of their eviction: least worth first, then least recently used, deeper, lower id.

    Ids count from 0: memory grows with the highest. A list holds what is live, as a dictionary of many ids costs a
    push or pop several times as much in misses of the CPU's caches.

    Entries replaced or discarded stay behind until they surface or until they outnumber the live ones, so every
    operation is amortised O(log n) and stale entries number at most the live ones plus a constant.
    """

    def __init__(self, worth: Worth = lru_worth) -> None:
        self._worth = worth
        self._items: Quickheap[_Item] = Quickheap()
        self._live: list[_Item | None] = []
        self._num_live = 0
        self._num_stale = 0
        self.floor = 0.0
        """The highest worth that was evicted so far, 0 before the first."""

    def __len__(self) -> int:
        return self._num_live

    def __contains__(self, entry_id: int) -> bool:
        return entry_id < len(self._live) and self._live[entry_id] is not None

    def push(self, entry_id: int, entry: CachedEntry) -> None:
        """Add an id, or replace what is known of it.

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
        """Remove and return the id to evict first, by what is known of it now.

        An id whose worth has risen since it was pushed is filed anew; so are a few at most, which keeps this
        O(log n): the last of them is evicted whatever it is worth. A worth that falls is for its owner to push.

        Args:
            changed: Returns what is known of an id, or None if it is what was pushed.

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
