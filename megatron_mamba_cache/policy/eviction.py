"""The order in which cached states are evicted: by what each is worth, which falls with its age."""

from collections import deque
from collections.abc import Callable, Container, Mapping
from heapq import heapify, heappop, heappush
from math import frexp, inf
from typing import NamedTuple

from ..errors import CacheIntegrityError

FULL_WORTH_AGE = 10
"""Uses of cached states for which a state keeps about all of its worth."""
_STALE_ALLOWANCE = 64
_HALF_AN_OCTAVE = 2**-0.5


class CachedEntry(NamedTuple):
    """What the weight of a cached state may depend on. A tuple, because one is made for every push.

    Args:
        num_tokens: From the root to the end of the entry.
        lost_tokens: Tokens that a request matching up to here recomputes once the state is gone: all since the nearest
            state before it.
        num_branch_hits: Requests that started from it though cached text followed it.
        num_continuations: Texts known to have continued directly after it.
        is_end: Nothing cached follows it, so that the KV of its lost tokens leaves with it.
    """

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
        is_held: Whether it counts as just used and certain to be hit, whatever its age and kind.
    """

    kind: int = 0
    gain: float = 1.0
    is_held: bool = False


_Item = tuple[int, int, int, int, float, bool]
"""Last use, minus the entry's tokens (of states used at the same time, the deepest goes first), id, and its weight."""


class _Class:
    """Items of one kind and of about the same gain, all held or none, in their order: the least recently used first.

    Nearly all come in order, as time passes; the few whose weight changes long after their last use are kept apart.

    Attributes:
        first: The first item, stale or not; None if there is none.
    """

    __slots__ = ("first", "late", "run")

    def __init__(self) -> None:
        self.first: _Item | None = None
        self.run: deque[_Item] = deque()
        self.late: list[_Item] = []  # a heap

    def push(self, item: _Item) -> None:
        if self.run and item < self.run[-1]:
            heappush(self.late, item)
        else:
            self.run.append(item)
        if self.first is None or item < self.first:
            self.first = item

    def skip_stale(self, live: Mapping[int, _Item]) -> int:
        """Remove stale items from the heads of run and heap; return how many."""
        run, late, num_stale = self.run, self.late, 0
        # Identity, not equality: an id that was discarded and pushed again may have an equal, stale item.
        while run and live.get(run[0][2]) is not run[0]:
            run.popleft()
            num_stale += 1
        while late and live.get(late[0][2]) is not late[0]:
            heappop(late)
            num_stale += 1
        if run and late:
            self.first = min(run[0], late[0])
        else:
            self.first = run[0] if run else late[0] if late else None
        return num_stale

    def keep(self, is_kept: Callable[[_Item], bool]) -> None:
        self.run = deque(filter(is_kept, self.run))
        self.late = list(filter(is_kept, self.late))
        heapify(self.late)


class EvictionOrder:
    """Ids in the order of their worth, lowest first: likelihood of the kind x gain / (age + `FULL_WORTH_AGE`).

    Those that are held count as just used and certain to be hit. All other worths fall with time, but of one kind and
    gain the least recently used always comes first. So there is a queue for each kind and each class of gains, which
    are equal but for a factor of 2 ** .5, and another one for those that are held, and only the heads are compared.

    Replaced and discarded items stay in the queues until they surface or outnumber the live ones, so every operation is
    amortised O(log n + queues), and O(queues) for items that come in the order of their last use.
    """

    def __init__(self) -> None:
        self._live: dict[int, _Item] = {}
        self._classes: dict[int, dict[tuple[int, bool], _Class]] = {}  # by kind, then by what `_class_of` says
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, entry_id: int) -> bool:
        return entry_id in self._live

    def weight_of(self, entry_id: int) -> Weight:
        """Return the weight that an id was pushed with."""
        return Weight(*self._live[entry_id][3:])

    def kind_of(self, entry_id: int) -> int:
        """Return the kind that an id was pushed with."""
        return self._live[entry_id][3]

    def last_use_of(self, entry_id: int) -> int:
        """Return the last use that an id was pushed with."""
        return self._live[entry_id][0]

    def worth_of(self, entry_id: int, now: int, likelihood: Callable[[int], float]) -> float:
        """Return what an id is worth; see `first`."""
        last_used, _, _, kind, gain, is_held = self._live[entry_id]
        return gain / FULL_WORTH_AGE if is_held else likelihood(kind) * gain / (now + FULL_WORTH_AGE - last_used)

    def push(self, entry_id: int, last_used: int, num_tokens: int, weight: Weight) -> bool:
        """Add an id and return True, or replace its entry and return False.

        Args:
            last_used: A logical time.
            num_tokens: Of ids used at the same time, that with the most tokens is evicted first.

        Raises:
            ValueError: If the gain is not a number of at least 0.
        """
        if not weight[1] >= 0:
            raise ValueError(f"need a gain of at least 0, found {weight} for {entry_id}")
        is_new = entry_id not in self._live
        item = self._live[entry_id] = (last_used, -num_tokens, entry_id, *weight)
        kind, gain, is_held = weight
        classes, of_class = self._classes.get(kind), _class_of(gain, is_held)
        if classes is None:
            classes = self._classes[kind] = {}
        queue = classes.get(of_class)
        if queue is None:
            queue = classes[of_class] = _Class()
        queue.push(item)
        self._num_stale += not is_new
        if self._num_stale > len(self._live) + _STALE_ALLOWANCE:
            self._compact()
        return is_new

    def discard(self, entry_id: int) -> bool:
        """Remove an id; return False, with nothing changed, if it is absent."""
        if self._live.pop(entry_id, None) is None:
            return False
        self._num_stale += 1
        if self._num_stale > len(self._live) + _STALE_ALLOWANCE:
            self._compact()
        return True

    def first(self, now: int, likelihood: Callable[[int], float], kinds: Container[int] | None = None) -> int:
        """Return the id to evict first.

        Args:
            likelihood: Of a hit, by kind; at most 1.
            kinds: Only ids of these kinds; None: of any.

        Raises:
            CacheIntegrityError: If there is none.
        """
        first, least, age_at_0, live = None, inf, now + FULL_WORTH_AGE, self._live
        for kind, classes in self._classes.items():
            if kinds is not None and kind not in kinds:
                continue
            chance, has_empty = likelihood(kind), False
            for of_class, queue in classes.items():
                item = queue.first
                if item is None or live.get(item[2]) is not item:
                    self._num_stale -= queue.skip_stale(live)
                    item = queue.first
                    if item is None:
                        has_empty = True
                        continue
                worth = item[4] / FULL_WORTH_AGE if of_class[1] else chance * item[4] / (age_at_0 - item[0])
                if worth < least or first is None or (worth == least and item < first):
                    first, least = item, worth
            if has_empty:
                self._classes[kind] = {of_class: queue for of_class, queue in classes.items() if queue.first}
        if first is None:
            raise CacheIntegrityError("need an entry to evict, found none; ask for no more than is evictable")
        return first[2]

    def clear(self) -> None:
        """Remove every id."""
        self._live.clear()
        self._classes.clear()
        self._num_stale = 0

    def _is_live(self, item: _Item) -> bool:
        return self._live.get(item[2]) is item

    def _compact(self) -> None:
        for classes in self._classes.values():
            for queue in classes.values():
                queue.keep(self._is_live)
        self._num_stale = 0


def _class_of(gain: float, is_held: bool) -> tuple[int, bool]:
    """Return what entries of one kind share a queue by: gains that are about equal, and whether they are held."""
    fraction, exponent = frexp(gain)
    return 2 * exponent + (fraction >= _HALF_AN_OCTAVE), is_held
