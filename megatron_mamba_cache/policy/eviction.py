"""The order in which cached states are evicted: by what each is worth, which falls with its age."""

from collections.abc import Callable, Container
from heapq import heapify, heappop, heappush
from math import frexp, inf
from typing import NamedTuple

from ..errors import CacheIntegrityError

FULL_WORTH_AGE = 10
"""Uses of cached states for which a state keeps about all of its worth."""
_STALE_ALLOWANCE = 64
_HALF_AN_OCTAVE = 2**-0.5


class CachedEntry(NamedTuple):
    """What the worth of a cached state may depend on. A tuple, because one is made for every push.

    Args:
        last_used: A logical time.
        num_tokens: From the root to the end of the entry.
        lost_tokens: Tokens that a request matching up to here recomputes once the state is gone: all since the nearest
            state before it.
        num_branch_hits: Requests that started from it though cached text followed it.
        num_continuations: Texts known to have continued directly after it.
        is_end: Nothing cached follows it, so that the KV of its lost tokens leaves with it.
    """

    last_used: int
    num_tokens: int
    lost_tokens: int = 0
    num_branch_hits: int = 0
    num_continuations: int = 0
    is_end: bool = True


class Weight(NamedTuple):
    """What an entry is worth, but for its age.

    Args:
        kind: Entries of a kind are equally likely to be hit.
        gain: What a hit saves; any scale, 0 or more.
    """

    kind: int = 0
    gain: float = 1.0


_Item = tuple[int, int, int, int, float]
"""Last use, minus the entry's tokens (of states used at the same time, the deepest goes first), id, kind, gain."""


class EvictionOrder:
    """Ids in the order of their worth, lowest first: likelihood of the kind x gain / (age + `FULL_WORTH_AGE`).

    All worths fall with time, but of one kind and gain the least recently used always comes first. So there is a heap
    for each kind and each class of gains, which are equal but for a factor of 2 ** .5, and only the heads are compared.

    Replaced and discarded items stay in the heaps until they surface or outnumber the live ones, so every operation is
    amortised O(log n + heaps).
    """

    def __init__(self) -> None:
        self._live: dict[int, _Item] = {}
        self._heaps: dict[tuple[int, int], list[_Item]] = {}
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, entry_id: int) -> bool:
        return entry_id in self._live

    def weight_of(self, entry_id: int) -> Weight:
        """Return the weight that an id was pushed with."""
        return Weight(*self._live[entry_id][3:])

    def push(self, entry_id: int, entry: CachedEntry, weight: Weight) -> None:
        """Add an id, or replace its entry.

        Raises:
            ValueError: If the gain is not a number of at least 0.
        """
        if not weight[1] >= 0:
            raise ValueError(f"need a gain of at least 0, found {weight} for {entry}")
        if entry_id in self._live:
            self._num_stale += 1
        item = self._live[entry_id] = (entry.last_used, -entry.num_tokens, entry_id, *weight)
        heappush(self._heaps.setdefault(_heap_of(*weight), []), item)
        self._compact()

    def discard(self, entry_id: int) -> None:
        """Remove an id; nothing happens if it is absent."""
        if self._live.pop(entry_id, None) is not None:
            self._num_stale += 1
            self._compact()

    def first(self, now: int, likelihood: Callable[[int], float], kinds: Container[int] | None = None) -> int:
        """Return the id to evict first.

        Args:
            likelihood: Of a hit, by kind; any scale.
            kinds: Only ids of these kinds; None: of any.

        Raises:
            CacheIntegrityError: If there is none.
        """
        live, first, least, emptied = self._live, None, inf, []
        for key, heap in self._heaps.items():
            kind = key[0]
            if kinds is not None and kind not in kinds:
                continue
            # Identity, not equality: an id that was discarded and pushed again may have an equal, stale item.
            while heap and live.get(heap[0][2]) is not heap[0]:
                heappop(heap)
                self._num_stale -= 1
            if heap:
                item = heap[0]
                worth = likelihood(kind) * item[4] / (now - item[0] + FULL_WORTH_AGE)
                if first is None or worth < least or (worth == least and item < first):
                    first, least = item, worth
            else:
                emptied.append(key)
        for key in emptied:
            del self._heaps[key]
        if first is None:
            raise CacheIntegrityError("need an entry to evict, found none; ask for no more than is evictable")
        return first[2]

    def clear(self) -> None:
        """Remove every id."""
        self._live.clear()
        self._heaps.clear()
        self._num_stale = 0

    def _compact(self) -> None:
        if self._num_stale <= len(self._live) + _STALE_ALLOWANCE:
            return
        self._heaps.clear()
        for item in self._live.values():
            self._heaps.setdefault(_heap_of(item[3], item[4]), []).append(item)
        for heap in self._heaps.values():
            heapify(heap)
        self._num_stale = 0


def _heap_of(kind: int, gain: float) -> tuple[int, int]:
    fraction, exponent = frexp(gain)
    return kind, 2 * exponent + (fraction >= _HALF_AN_OCTAVE)
