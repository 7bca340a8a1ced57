"""Eviction rules: evict the least recently used state, or the state expected to save the least per byte.

The rule "cost" ranks states by the tokens to recompute per freed byte, times the likelihood of a hit, divided by the
age: in recorded sessions, the rate of hits was proportional to 1 / age. Evicting a text's last state also frees the KV
before it; evicting an earlier state frees only the state. The likelihood of a hit depends on the workload, so it is
estimated as the share of states of the same kind that were hit.
"""

from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Protocol

from .eviction import CachedEntry, Weight
from .identifiers import BlockId


class HeldStates:
    """Set of states with raised priority until an expiry time; each is identified by the KV block before it."""

    def __init__(self) -> None:
        self._now = 0
        self.until: dict[BlockId, int] = {}
        """Expiry time of each held state; changed only by this class."""
        self._ends: list[tuple[int, BlockId]] = []  # heap of times at which to check if a hold has expired
        self._next_look: dict[BlockId, int] = {}  # time of the earliest check of each block

    def hold(self, block: BlockId, until: int) -> bool:
        """Hold a state at least until a time; return True if it was not held before. Ignore a time in the past."""
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
"""Kinds of states after which no block is cached, by the number of branch hits; the same for every rule."""
_INSIDE, _PROMPT_END, _BRANCH = ENDS.stop, ENDS.stop + 1, ENDS.stop + 2
_PRIORS = (0.5, 0.7, 0.9, 1.0, 0.03, 0.1, *([0.3] * (_MOST_BRANCH_HITS + 1)))
_END, _INNER = Weight(ENDS[0]), Weight(_INSIDE)
_PRIOR_STATES = 4
_MOST_COUNTED = 1024


class EvictionRule(Protocol):
    """Interface of rules that compute the weights of cached states. Equal calls give equal weights on every rank."""

    def weigh(self, entry: CachedEntry) -> Weight:
        """Return the factors of a state's priority that do not depend on its age."""

    def likelihood(self, kind: int) -> float:
        """Return the likelihood of a hit for states of a kind, between 0 and 1; ignored for held states."""

    def count_state(self, kind: int) -> None:
        """Count a new state of this kind, or a state that has changed to this kind."""

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
        """Do nothing, because this rule needs no counts."""

    def count_hit(self, kind: int) -> None:
        """Do nothing, because this rule needs no counts."""


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
        """Return the estimated share of hits among about the last thousand states of a kind."""
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
"""Rule classes by name; the argument is `state_len`, as in `RecomputeCost`."""


def _kind_of(entry: CachedEntry) -> int:
    num_hits = min(entry.num_branch_hits, _MOST_BRANCH_HITS)
    if entry.is_end:
        return ENDS[num_hits]
    if num_hits or entry.num_continuations > 1:
        return _BRANCH + num_hits
    return _PROMPT_END if entry.ends_prompt else _INSIDE
