"""Order in which cached states are evicted, by a priority that decreases with age."""

from collections import deque
from collections.abc import Callable, Container, Sequence
from heapq import heapify, heappop, heappush
from math import frexp, inf
from typing import NamedTuple

from ..errors import CacheIntegrityError
from .identifiers import BlockId

FULL_PRIORITY_AGE = 12
"""Age, in request starts and ends, at which the priority of a state is half of its initial priority."""
_STALE_ALLOWANCE = 64
_HALF_AN_OCTAVE = 2**-0.5


class CachedEntry(NamedTuple):
    """Properties of a cached state from which its weight is computed. A named tuple, which is fast to create.

    Args:
        num_tokens: Number of tokens from the start of the text to the state.
        lost_tokens: Number of tokens after the previous state, which must be recomputed if this state is evicted.
        num_branch_hits: Number of requests that started from this state and diverged from the cached text after it.
        num_continuations: Number of texts that are known to continue directly after this state.
        is_end: True if no block is cached after this state; the KV blocks of `lost_tokens` are then freed with it.
        ends_prompt: True if this is the last state of the newest prompt of its text.
    """

    num_tokens: int
    lost_tokens: int = 0
    num_branch_hits: int = 0
    num_continuations: int = 0
    is_end: bool = True
    ends_prompt: bool = False


class Weight(NamedTuple):
    """Factors of a cached state's priority that do not depend on its age.

    Args:
        kind: Group of states that are assumed to have the same likelihood of a hit.
        gain: Cost that a hit saves, in arbitrary units; at least 0.
        is_held: True if the state counts as just used and certain to be hit.
    """

    kind: int = 0
    gain: float = 1.0
    is_held: bool = False


_Item = tuple[float, int, BlockId, int, float, bool]
"""Last use, negative number of tokens (the deepest of the states used last at one time is first), id, weight."""
_NO_ITEM: _Item = (0, 0, BlockId(-1), 0, 0.0, False)


class _Class:
    """Queue of items of the same kind with similar gains and equal `is_held`; the least recently used item is first.

    Nearly all items are pushed in order of their last use; these are in the deque `run`. The others are in a heap.

    Attributes:
        first: First item, which may have been replaced or discarded (stale); invalid if the queue is empty.
    """

    __slots__ = ("first", "late", "run")

    def __init__(self, first: _Item) -> None:
        self.first = first
        self.run = deque([first])
        self.late: list[_Item] = []  # a heap

    def push(self, item: _Item, replaced: _Item) -> bool:
        """Add an item. If `replaced` is the last item of `run`, remove it and return True; otherwise return False."""
        run = self.run
        has_left = bool(run) and run[-1] is replaced
        if has_left:
            run.pop()
        if run and item < run[-1]:
            heappush(self.late, item)
        else:
            run.append(item)
        if item < self.first:
            self.first = item
        return has_left

    def skip_stale(self, live: Sequence[_Item]) -> int:
        """Remove stale items from the front of the run and the heap; return the number removed."""
        run, late, num_stale = self.run, self.late, 0
        # Compare by identity: an id that was discarded and pushed again may have an equal but stale item.
        while run and live[run[0][2]] is not run[0]:
            run.popleft()
            num_stale += 1
        while late and live[late[0][2]] is not late[0]:
            heappop(late)
            num_stale += 1
        if run or late:
            self.first = min(run[0], late[0]) if run and late else (run or late)[0]
        return num_stale

    def keep(self, is_kept: Callable[[_Item], bool]) -> None:
        self.run = deque(filter(is_kept, self.run))
        self.late = list(filter(is_kept, self.late))
        heapify(self.late)


class EvictionOrder:
    """Priority queue of the ids of evictable states; the id with the lowest priority is first.

    The priority is likelihood x gain / (age + `FULL_PRIORITY_AGE`), where the likelihood depends on the kind. Held ids
    count as just used and certain to be hit. There is one queue for each kind, each class of gains (equal within a
    factor of 2 ** .5) and each value of `is_held`. Only the first items of the queues, the least recently used, are
    compared.

    Replaced and discarded items stay in the queues until they are first or outnumber the live items. An operation takes
    O(log n + queues) on average, and O(queues) for items in the order of their last use.
    """

    def __init__(self) -> None:
        self._live: list[_Item] = []  # item of each id; `_NO_ITEM` if absent
        self._num_live = 0
        self._classes: dict[int, dict[tuple[int, bool], _Class]] = {}  # by kind, then by the key from `_class_of`
        self._num_stale = 0

    def __len__(self) -> int:
        return self._num_live

    def __contains__(self, entry_id: BlockId) -> bool:
        return entry_id < len(self._live) and self._live[entry_id] is not _NO_ITEM

    def weight_of(self, entry_id: BlockId) -> Weight:
        """Return the latest weight of an id."""
        return Weight(*self._live[entry_id][3:])

    def kind_of(self, entry_id: BlockId) -> int:
        """Return the latest kind of an id."""
        return self._live[entry_id][3]

    def last_use_of(self, entry_id: BlockId) -> float:
        """Return the time of an id's last use."""
        return self._live[entry_id][0]

    def priority_of(self, entry_id: BlockId, now: float, likelihood: Callable[[int], float]) -> float:
        """Return the priority of an id at logical time `now`."""
        last_used, _, _, kind, gain, is_held = self._live[entry_id]
        return gain / FULL_PRIORITY_AGE if is_held else likelihood(kind) * gain / (now + FULL_PRIORITY_AGE - last_used)

    def push(self, entry_id: BlockId, last_used: float, num_tokens: int, weight: Weight) -> bool:
        """Add an id and return True, or update an existing id and return False.

        Args:
            last_used: Logical time of the last use.
            num_tokens: Tie-breaker: among ids with the same last use, the id with the most tokens is evicted first.

        Raises:
            ValueError: If the gain is negative or NaN.
        """
        if not weight[1] >= 0:
            raise ValueError(f"the gain must be at least 0, found {weight} for id {entry_id}")
        live = self._live
        if entry_id >= len(live):
            live += [_NO_ITEM] * (entry_id + 1 - len(live))
        replaced = live[entry_id]
        kind, gain, is_held = weight
        item = live[entry_id] = (last_used, -num_tokens, entry_id, kind, gain, is_held)
        classes, of_class = self._classes.get(kind), _class_of(gain, is_held)
        if classes is None:
            classes = self._classes[kind] = {}
        queue = classes.get(of_class)
        has_left = False
        if queue is None:
            classes[of_class] = _Class(item)
        else:
            has_left = queue.push(item, replaced)
        if replaced is _NO_ITEM:
            self._num_live += 1
        elif not has_left:
            self._count_stale()
        return replaced is _NO_ITEM

    def discard(self, entry_id: BlockId) -> bool:
        """Remove an id; return False if it is absent."""
        live = self._live
        if entry_id >= len(live) or live[entry_id] is _NO_ITEM:
            return False
        live[entry_id] = _NO_ITEM
        self._num_live -= 1
        self._count_stale()
        return True

    def first(self, now: float, likelihood: Callable[[int], float], kinds: Container[int] | None = None) -> BlockId:
        """Return the id with the lowest priority at logical time `now`, which is evicted first.

        Args:
            likelihood: Function that returns the likelihood of a hit for a kind, at most 1.
            kinds: Kinds to consider; None for all.

        Raises:
            CacheIntegrityError: If there is no such id.
        """
        first, least, age_at_0, live = None, inf, now + FULL_PRIORITY_AGE, self._live
        for kind, classes in self._classes.items():
            if kinds is not None and kind not in kinds:
                continue
            chance, empty = likelihood(kind), []
            for of_class, queue in classes.items():
                item = queue.first
                if live[item[2]] is not item:
                    self._num_stale -= queue.skip_stale(live)
                    if not (queue.run or queue.late):
                        empty.append(of_class)
                        continue
                    item = queue.first
                priority = item[4] / FULL_PRIORITY_AGE if of_class[1] else chance * item[4] / (age_at_0 - item[0])
                if priority <= least and (priority < least or first is None or item < first):
                    first, least = item, priority
            for of_class in empty:
                del classes[of_class]
        if first is None:
            raise CacheIntegrityError("there is no entry to evict; evict at most as many entries as are evictable")
        return first[2]

    def clear(self) -> None:
        """Remove every id."""
        self._live.clear()
        self._num_live = 0
        self._classes.clear()
        self._num_stale = 0

    def _is_live(self, item: _Item) -> bool:
        return self._live[item[2]] is item

    def _count_stale(self) -> None:
        """Count one more stale item; remove all stale items if they outnumber the live ones."""
        self._num_stale += 1
        if self._num_stale <= self._num_live + _STALE_ALLOWANCE:
            return
        for classes in self._classes.values():
            for queue in classes.values():
                queue.keep(self._is_live)
        self._num_stale = 0


def _class_of(gain: float, is_held: bool) -> tuple[int, bool]:
    """Return the key of the queue for a gain: the class of the gain, and `is_held`."""
    fraction, exponent = frexp(gain)
    return 2 * exponent + (fraction >= _HALF_AN_OCTAVE), is_held
