"""A priority queue that sorts only what is about to leave."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

_HEAP_SIZE = 1024
_SAMPLE_SIZE = 32
_NUM_PARTS = 8
_Item = TypeVar("_Item", bound=tuple[Any, ...])


class Quickheap(Generic[_Item]):
    """A min-priority queue of tuples: Navarro and Paredes's quickheap, an incremental quicksort.

    A heap holds the least items and buckets hold the others. Buckets are ordered, the items in a bucket are not, so
    adding to a bucket touches no item in it. When the heap is empty, the first bucket is split until its least items
    fit, which scans a list. Operations are amortised O(log n), as with one heap of all items; but every step of a large
    heap is a CPU cache miss.

    Items that arrive in ascending order are queued instead, at constant cost.
    """

    def __init__(self, heap_size: int = _HEAP_SIZE) -> None:
        """Start empty, with a heap of about `heap_size` items."""
        self._heap_size = heap_size
        self._most_in_heap = 2 * heap_size
        self._ascending: deque[_Item] = deque()
        self._heap: list[_Item] = []
        self._buckets: list[list[_Item]] = []
        self._bounds: list[_Item] = []  # ascending; every item before a bucket is less than its bound

    def __len__(self) -> int:
        return len(self._ascending) + len(self._heap) + sum(map(len, self._buckets))

    def push(self, item: _Item) -> None:
        """Add an item."""
        if not self._ascending or self._ascending[-1] < item:
            self._ascending.append(item)
            return
        if self._bounds and not item < self._bounds[0]:
            self._buckets[bisect_right(self._bounds, item) - 1].append(item)
            return
        heappush(self._heap, item)
        if len(self._heap) > self._most_in_heap:
            self._take(self._heap)

    def pop(self) -> _Item:
        """Remove and return the least item.

        Raises:
            IndexError: If there is none.
        """
        while self._buckets and not self._heap:
            del self._bounds[0]
            self._take(self._buckets.pop(0))
        if self._heap and (not self._ascending or self._heap[0] < self._ascending[0]):
            return heappop(self._heap)
        return self._ascending.popleft()

    def keep(self, wanted: Callable[[_Item], bool]) -> None:
        """Remove every item that is not wanted. O(n)."""
        self._ascending = deque(filter(wanted, self._ascending))
        self._heap = list(filter(wanted, self._heap))
        heapify(self._heap)
        bounded = zip(self._bounds, self._buckets, strict=True)
        filled = [(bound, kept) for bound, bucket in bounded if (kept := list(filter(wanted, bucket)))]
        self._bounds = [bound for bound, _ in filled]
        self._buckets = [bucket for _, bucket in filled]

    def clear(self) -> None:
        """Remove every item."""
        self._ascending.clear()
        self._heap.clear()
        self._buckets.clear()
        self._bounds.clear()

    def _take(self, items: list[_Item]) -> None:
        """Make a heap of the least of `items`, all of which precede every bucket, and buckets of the others."""
        while len(items) > self._heap_size:
            sample = sorted(items[:: 1 + len(items) // _SAMPLE_SIZE])
            step = max(1, len(sample) // _NUM_PARTS)
            bounds = sample[step::step]
            parts: list[list[_Item]] = [[] for _ in range(len(bounds) + 1)]
            for item in items:
                parts[bisect_right(bounds, item)].append(item)
            if not parts[0]:  # too many are equal
                break
            items = parts[0]
            self._buckets[:0] = parts[1:]
            self._bounds[:0] = bounds
        heapify(items)
        self._heap = items
        self._most_in_heap = 2 * max(len(items), self._heap_size)
