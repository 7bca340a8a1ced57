"""Rules for what to evict: the least recently used, or what is expected to save the least.

"cost" evicts what is expected to save the fewest tokens for its size: the hits that an entry may still get, times the
tokens that each hit saves. It ages entries as Greedy-Dual does, by the highest worth evicted so far: when the
likelihood of reuse falls as 1 / age, keeping what is worth more than this floor is optimal.

A state is as large as dozens of KV blocks and saves all tokens since the state before it, so its cost varies. Most
states are outdated: a conversation continues from its end, not from where an earlier turn began. A KV block's tokens
are proportional to its size, so only its hits count.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from .eviction import CachedEntry, Worth, lru_worth

_MOST_HITS = 8
_HITS_AT_END = 0.5
_HITS_INSIDE = 0.01


@dataclass(frozen=True, slots=True)
class EvictionRule:
    """The worth functions of states and of KV blocks."""

    state_worth: Worth
    block_worth: Worth


def state_cost_worth(entry: CachedEntry) -> float:
    """Return the tokens that a state is expected to save, plus the floor at its last use."""
    return entry.floor + entry.lost_tokens * _expected_hits(entry)


def block_cost_worth(entry: CachedEntry) -> float:
    """Return the hits that a KV block is expected to get, plus the floor at its last use."""
    return entry.floor + min(max(entry.num_hits, 1), _MOST_HITS)


EVICTION_RULES: Mapping[str, EvictionRule] = {
    "lru": EvictionRule(lru_worth, lru_worth),
    "cost": EvictionRule(state_cost_worth, block_cost_worth),
}


def _expected_hits(entry: CachedEntry) -> float:
    """Estimate how many more requests will start from a state; past hits count where texts branch, up to a few."""
    if entry.num_continuations > 1:
        return 1 + min(entry.num_hits, _MOST_HITS)
    return _HITS_INSIDE if entry.num_continuations else _HITS_AT_END
