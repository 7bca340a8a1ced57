"""Rules that choose what to evict: the least recently used state, or the one that saves least per byte.

"cost" multiplies the tokens to recompute for each byte that becomes free by the likelihood of a hit, and divides by the
age: recorded sessions come back at a rate that falls as 1 / age. A text's last state leaves together with the KV before
it; a state inside known text leaves alone. The likelihood of a hit depends on the load, so it is learned: the share of
each kind of state that was hit.
"""

from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Protocol

from .eviction import CachedEntry, Weight
from .identifiers import BlockId


class HeldStates:
    """States that are held until a time, by the KV block at which each state ends."""

    def __init__(self) -> None:
        self._now = 0
        self.until: dict[BlockId, int] = {}
        """When each held state is held no longer; changed here only."""
        self._ends: list[tuple[int, BlockId]] = []  # heap by time; an entry is checked again when its time has come
        self._next_look: dict[BlockId, int] = {}  # earliest time of each block in the heap

    def hold(self, block: BlockId, until: int) -> bool:
        """Hold a state until a time, unless it is already held longer; return whether it was not held before."""
        if until <= self._now:
            return False
        was_held = block in self.until
        self.until[block] = max(until, self.until.get(block, 0))
        self._look_at(block, until)
        return not was_held

    def release(self, block: BlockId) -> None:
        """Stop holding a state; do nothing if it is not held."""
        self.until.pop(block, None)

    def pass_time(self, now: int) -> list[BlockId]:
        """Advance the time; return the blocks of the states whose hold has expired."""
        self._now = max(now, self._now)
        over = []
        while self._ends and self._ends[0][0] <= self._now:
            time, block = heappop(self._ends)
            if self._next_look.get(block) == time:
                del self._next_look[block]
            until = self.until.get(block)
            if until is not None and until <= self._now:
                del self.until[block]
                over.append(block)
            elif until is not None:
                self._look_at(block, until)
        return over

    def clear(self) -> None:
        """Stop holding all states; keep the time."""
        self.until.clear()
        self._ends.clear()
        self._next_look.clear()

    def _look_at(self, block: BlockId, time: int) -> None:
        """Schedule a check of a block at a time, unless an earlier check is scheduled."""
        if time < self._next_look.get(block, time + 1):
            self._next_look[block] = time
            heappush(self._ends, (time, block))


_MOST_BRANCH_HITS = 3
ENDS = range(_MOST_BRANCH_HITS + 1)
"""Kinds of states that are the last of their text, in every rule: by the requests that parted there from more text."""
_INSIDE, _PROMPT_END, _BRANCH = ENDS.stop, ENDS.stop + 1, ENDS.stop + 2
_PRIORS = (0.5, 0.7, 0.9, 1.0, 0.03, 0.1, *([0.3] * (_MOST_BRANCH_HITS + 1)))
_END, _INNER = Weight(ENDS[0]), Weight(_INSIDE)
_PRIOR_STATES = 4
_MOST_COUNTED = 1024


class EvictionRule(Protocol):
    """Compute weights of cached states. Equal calls give equal priorities on every rank."""

    def weigh(self, entry: CachedEntry) -> Weight:
        """Return the priority of a state without the effect of its age."""

    def likelihood(self, kind: int) -> float:
        """Return the likelihood that states of a kind are hit, at most 1 (the value for held states)."""

    def count_state(self, kind: int) -> None:
        """Count a state whose kind is new or has changed."""

    def count_hit(self, kind: int) -> None:
        """Count a hit of a state of this kind."""


class LeastRecentlyUsed:
    """Evict the least recently used state; states of the same age rank equally."""

    def __init__(self, state_len: float = 0.0) -> None:
        pass

    def weigh(self, entry: CachedEntry) -> Weight:
        return _END if entry.is_end else _INNER

    def likelihood(self, kind: int) -> float:
        return 1.0

    def count_state(self, kind: int) -> None:
        """Do nothing."""

    def count_hit(self, kind: int) -> None:
        """Do nothing."""


class RecomputeCost:
    """Evict the state that is expected to save the fewest tokens of recomputation per byte.

    Args:
        state_len: Number of tokens whose KV takes as many bytes as one state.
    """

    def __init__(self, state_len: float = 0.0) -> None:
        self._state_len = state_len
        self._num_states = [0.0] * len(_PRIORS)
        self._num_hits = [0.0] * len(_PRIORS)

    def weigh(self, entry: CachedEntry) -> Weight:
        kind = _kind_of(entry)
        num_kept = self._state_len + entry.lost_tokens if kind in ENDS else self._state_len
        return Weight(kind, entry.lost_tokens / max(num_kept, 1.0))

    def likelihood(self, kind: int) -> float:
        """Return which share of the last thousand or so states of a kind was hit."""
        known = self._num_hits[kind] + _PRIOR_STATES * _PRIORS[kind]
        return known / (self._num_states[kind] + _PRIOR_STATES)

    def count_state(self, kind: int) -> None:
        self._num_states[kind] += 1
        if self._num_states[kind] >= _MOST_COUNTED:
            self._num_states[kind] /= 2
            self._num_hits[kind] /= 2

    def count_hit(self, kind: int) -> None:
        self._num_hits[kind] += 1


EVICTION_RULES: Mapping[str, Callable[[float], EvictionRule]] = {"lru": LeastRecentlyUsed, "cost": RecomputeCost}
"""By name, what makes a rule of the tokens whose KV takes as many bytes as a state."""


def _kind_of(entry: CachedEntry) -> int:
    num_hits = min(entry.num_branch_hits, _MOST_BRANCH_HITS)
    if entry.is_end:
        return ENDS[num_hits]
    if num_hits or entry.num_continuations > 1:
        return _BRANCH + num_hits
    return _PROMPT_END if entry.ends_prompt else _INSIDE
