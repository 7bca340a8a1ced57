"""The order in which cached states are evicted: by a priority that falls with age."""

from collections import deque
from collections.abc import Callable, Container, Sequence
from heapq import heapify, heappop, heappush
from math import frexp, inf
from typing import NamedTuple

from ..errors import CacheIntegrityError
from .identifiers import BlockId

FULL_PRIORITY_AGE = 12
"""Request starts and ends after which a state still has about its full priority."""
_STALE_ALLOWANCE = 64
_HALF_AN_OCTAVE = 2**-0.5


class CachedEntry(NamedTuple):
    """Facts from which the weight of a cached state is computed. A tuple, because every push creates one.

    Args:
        num_tokens: Number of tokens from the start of the text to the end of the entry.
        lost_tokens: Number of tokens since the previous state, which must be recomputed if this state is evicted.
        num_branch_hits: Number of requests that started from this state and diverged from the cached text after it.
        num_continuations: Number of texts that are known to continue directly after this state.
        is_end: True if no cached text follows, so the KV blocks of its lost tokens are freed with it.
        ends_prompt: True if this is the last state of the newest prompt of its text.
    """

    num_tokens: int
    lost_tokens: int = 0
    num_branch_hits: int = 0
    num_continuations: int = 0
    is_end: bool = True
    ends_prompt: bool = False


class Weight(NamedTuple):
    """Priority of an entry without the effect of its age.

    Args:
        kind: Group of entries that are assumed to be hit with the same likelihood.
        gain: What a hit saves, on any scale; at least 0.
        is_held: True if the entry counts as just used and certain to be hit.
    """

    kind: int = 0
    gain: float = 1.0
    is_held: bool = False


_Item = tuple[float, int, BlockId, int, float, bool]
"""Last use, minus the entry's tokens (of states used at the same time, the deepest goes first), id, and its weight."""
_NO_ITEM: _Item = (0, 0, BlockId(-1), 0, 0.0, False)


class _Class:
    """Items of one kind and similar gain, all held or all not held; the least recently used comes first.

    Nearly all items are pushed in order of their last use; a heap stores the few that are not.

    Attributes:
        first: The first item, stale or not; invalid when no item is left.
    """

    __slots__ = ("first", "late", "run")

    def __init__(self, first: _Item) -> None:
        self.first = first
        self.run = deque([first])
        self.late: list[_Item] = []  # a heap

    def push(self, item: _Item, replaced: _Item) -> bool:
        """Add an item; return whether the replaced item was the newest and has been removed."""
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
        """Remove stale items from the front of the run and of the heap; return how many."""
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
    """Ids ordered by priority, lowest first: likelihood of the kind x gain / (age + `FULL_PRIORITY_AGE`).

    Held ids count as just used and certain to be hit. Of one kind and gain, the least recently used comes first. So
    there is a queue for each kind and class of gains (equal within a factor of 2 ** .5) and for held ids, and only the
    heads of queues are compared. Replaced and discarded items stay in the queues until they reach a head or outnumber
    the live ones: an operation takes O(log n + queues) on average, O(queues) for items in the order of their last use.
    Live items are in a list as long as the highest id.
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
        """Return the weight with which an id was pushed."""
        return Weight(*self._live[entry_id][3:])

    def kind_of(self, entry_id: BlockId) -> int:
        """Return the kind with which an id was pushed."""
        return self._live[entry_id][3]

    def last_use_of(self, entry_id: BlockId) -> float:
        """Return the time of last use with which an id was pushed."""
        return self._live[entry_id][0]

    def priority_of(self, entry_id: BlockId, now: float, likelihood: Callable[[int], float]) -> float:
        """Return the priority of an id at logical time `now`."""
        last_used, _, _, kind, gain, is_held = self._live[entry_id]
        return gain / FULL_PRIORITY_AGE if is_held else likelihood(kind) * gain / (now + FULL_PRIORITY_AGE - last_used)

    def push(self, entry_id: BlockId, last_used: float, num_tokens: int, weight: Weight) -> bool:
        """Add an id and return True, or update an existing id and return False.

        Args:
            last_used: A logical time.
            num_tokens: Tie-breaker: of ids with the same last use, the one with the most tokens is evicted first.

        Raises:
            ValueError: If the gain is not a number of at least 0.
        """
        if not weight[1] >= 0:
            raise ValueError(f"need a gain of at least 0, found {weight} for {entry_id}")
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
        """Return the id to evict first.

        Args:
            likelihood: Returns the likelihood of a hit for a kind, at most 1.
            kinds: Consider only ids of these kinds; None: all kinds.

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
            raise CacheIntegrityError("need an entry to evict, found none; evict at most as many as are evictable")
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
    """Return the key of an entry's queue within its kind: the magnitude of its gain, and whether it is held."""
    fraction, exponent = frexp(gain)
    return 2 * exponent + (fraction >= _HALF_AN_OCTAVE), is_held
