"""The ways to choose what is evicted: least recently used, or what is expected to save the least.

"cost" evicts what is expected to save the fewest tokens for its size: the hits that an entry may still see, times the
tokens that each of them saves. It ages as Greedy-Dual does, by the worth of what was evicted last: where reuse becomes
less likely as 1 / age, to keep what is worth more than that floor is the best that can be done.

A state is as large as dozens of KV blocks, and stands for all tokens since the state before it, so that its cost
varies. Most states are behind the times: a conversation goes on from its end, not from where an earlier turn began. A
KV block's tokens are in proportion to its size, so that only its hits count.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .eviction import CachedEntry, Worth, lru_worth

_MOST_HITS = 8
_HITS_AT_END = 0.5
_HITS_INSIDE = 0.01


@dataclass(frozen=True, slots=True)
class EvictionRule:
    """What states and KV blocks are worth."""

    state_worth: Worth
    block_worth: Worth


def state_cost_worth(entry: CachedEntry) -> float:
    """Return the tokens that a state is expected to save, above the floor of its last use."""
    return entry.floor + entry.lost_tokens * _expected_hits(entry)


def block_cost_worth(entry: CachedEntry) -> float:
    """Return the hits that a KV block is expected to see, above the floor of its last use."""
    return entry.floor + min(max(entry.num_hits, 1), _MOST_HITS)


EVICTION_RULES: Mapping[str, EvictionRule] = {
    "lru": EvictionRule(lru_worth, lru_worth),
    "cost": EvictionRule(state_cost_worth, block_cost_worth),
}


def _expected_hits(entry: CachedEntry) -> float:
    """Guess how many more requests will start from a state; past ones count where texts part, up to a few."""
    if entry.num_continuations > 1:
        return 1 + min(entry.num_hits, _MOST_HITS)
    return _HITS_INSIDE if entry.num_continuations else _HITS_AT_END
