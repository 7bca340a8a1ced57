from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.config import CacheConfig
from megatron_mamba_cache.policy.eviction import CachedEntry, Weight
from megatron_mamba_cache.policy.eviction_rules import (
    ENDS,
    EVICTION_RULES,
    EvictionRule,
    LeastRecentlyUsed,
    RecomputeCost,
)
from megatron_mamba_cache.policy.identifiers import BlockId, BlockKey
from megatron_mamba_cache.policy.pools import CachePools
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from megatron_mamba_cache.policy.slot_pool import SlotPool
from tests.policy.small_cache import BLOCK, cached_states, frozen, new_spec, serve, small_cache
from tests.policy.split_space import SplitSpace

STATE_LEN = 1000.0
LOST = st.integers(10, 100_000)
ENTRIES = st.builds(
    CachedEntry,
    num_tokens=st.integers(1, 10**6),
    lost_tokens=st.integers(0, 10**6),
    num_branch_hits=st.integers(0, 9),
    num_continuations=st.integers(0, 9),
    is_end=st.booleans(),
    ends_prompt=st.booleans(),
)


def priority(rule: EvictionRule, entry: CachedEntry) -> float:
    """Return a state's priority at age 0, up to a constant factor."""
    weight = rule.weigh(entry)
    return rule.likelihood(weight.kind) * weight.gain


def end(lost_tokens: int) -> CachedEntry:
    return CachedEntry(lost_tokens, lost_tokens)


def inside(lost_tokens: int) -> CachedEntry:
    return CachedEntry(lost_tokens, lost_tokens, num_continuations=1, is_end=False)


def prompt_end(lost_tokens: int) -> CachedEntry:
    return inside(lost_tokens)._replace(ends_prompt=True)


def branch(lost_tokens: int, num_hits: int = 0) -> CachedEntry:
    return CachedEntry(lost_tokens, lost_tokens, num_hits, num_continuations=2, is_end=False)


def states_at(cache: PrefixCache) -> list[int]:
    """Return the positions of the cached states."""
    return sorted(cache.kv.depth(block) * BLOCK for block in cached_states(cache))


def other(number: int) -> list[int]:
    """Return a prompt of two blocks that shares no block with other prompts."""
    return [number] * (2 * BLOCK + 1)


def test_every_configurable_eviction_rule_exists() -> None:
    assert {CacheConfig(eviction=name).eviction for name in EVICTION_RULES} == {"cost", "lru"}


# Least recently used.


@given(ENTRIES)
def test_lru_rule_gives_all_states_the_same_priority(entry: CachedEntry) -> None:
    assert priority(EVICTION_RULES["lru"](STATE_LEN), entry) == 1.0


@given(ENTRIES, st.sampled_from(sorted(EVICTION_RULES)))
def test_every_eviction_rule_has_separate_kinds_for_states_at_text_ends(entry: CachedEntry, name: str) -> None:
    assert (EVICTION_RULES[name](STATE_LEN).weigh(entry).kind in ENDS) == entry.is_end


def test_lru_ignores_hit_counts() -> None:
    rule = LeastRecentlyUsed()
    for kind in range(3):
        rule.count_state(kind)
        rule.count_hit(kind)
    assert {rule.likelihood(kind) for kind in range(3)} == {1.0}


# Cost: what a state saves.


@given(LOST, LOST)
def test_state_that_saves_more_tokens_has_a_higher_priority(lost: int, more: int) -> None:
    rule = RecomputeCost(STATE_LEN)
    for entry_of in (end, inside, prompt_end, branch):
        assert priority(rule, entry_of(lost)) < priority(rule, entry_of(lost + more))


@given(LOST)
def test_gain_at_a_text_end_is_tokens_per_byte_of_state_and_kv(lost: int) -> None:
    assert RecomputeCost(STATE_LEN).weigh(end(lost)).gain == pytest.approx(lost / (STATE_LEN + lost))


@given(LOST)
def test_gain_inside_a_cached_text_is_tokens_per_byte_of_the_state(lost: int) -> None:
    rule = RecomputeCost(STATE_LEN)
    for entry_of in (inside, prompt_end, branch):
        assert rule.weigh(entry_of(lost)).gain == pytest.approx(lost / STATE_LEN)


@given(LOST)
def test_cost_rule_orders_states_by_hit_likelihood_per_byte(lost: int) -> None:
    rule = RecomputeCost(STATE_LEN)
    kinds = (end, branch, prompt_end, inside)
    ends, branches, prompt_ends, insides = (rule.likelihood(_kind(rule, entry_of(lost))) for entry_of in kinds)
    assert ends > branches > prompt_ends > insides
    for entry_of, likelihood in ((branch, branches), (prompt_end, prompt_ends), (inside, insides)):
        bytes_for_one = (STATE_LEN + lost) / STATE_LEN  # that an end keeps for one byte of a state
        assert (priority(rule, entry_of(lost)) < priority(rule, end(lost))) == (bytes_for_one < ends / likelihood)


@pytest.mark.parametrize(
    "entry",
    [
        CachedEntry(8, 8, num_continuations=2, is_end=False),
        CachedEntry(8, 8, num_branch_hits=1, num_continuations=1, is_end=False),
        CachedEntry(8, 8, num_branch_hits=1, num_continuations=0, is_end=False),
    ],
)
def test_state_with_several_continuations_or_branch_hits_has_a_branch_kind(entry: CachedEntry) -> None:
    kind_of = partial(_kind, RecomputeCost(STATE_LEN))
    assert kind_of(entry) not in {kind_of(end(8)), kind_of(inside(8))}
    as_end = kind_of(entry._replace(is_end=True))
    assert as_end in ENDS and (as_end == kind_of(end(8))) == (not entry.num_branch_hits)


def test_prompt_end_has_its_own_kind_only_inside_an_unbranched_text() -> None:
    kind_of = partial(_kind, RecomputeCost(STATE_LEN))
    assert kind_of(prompt_end(8)) not in {kind_of(end(8)), kind_of(inside(8)), kind_of(branch(8))}
    for entry in (end(8), branch(8), branch(8, 1)):
        assert kind_of(entry._replace(ends_prompt=True)) == kind_of(entry)


def _kind(rule: EvictionRule, entry: CachedEntry) -> int:
    return rule.weigh(entry).kind


@given(ENTRIES, st.floats(0, 1e6))
def test_every_state_has_a_finite_non_negative_priority(entry: CachedEntry, state_len: float) -> None:
    rule = EVICTION_RULES["cost"](state_len)
    assert 0 <= priority(rule, entry) < float("inf")


# Cost: how likely hits are.


def teach(rule: EvictionRule, entry: CachedEntry, num_states: int, num_hits: int) -> None:
    """Count states of the entry's kind, and hits of some of them."""
    kind = _kind(rule, entry)
    for number in range(num_states):
        rule.count_state(kind)
        if number * num_hits // num_states != (number + 1) * num_hits // num_states:
            rule.count_hit(kind)


@pytest.mark.parametrize("entry", [end(8), inside(8), prompt_end(8), branch(8), branch(8, 1), branch(8, 3)])
@pytest.mark.parametrize("percent", [0, 5, 50, 100])
def test_hit_likelihood_is_learned_separately_for_each_kind(entry: CachedEntry, percent: int) -> None:
    rule, untaught = RecomputeCost(STATE_LEN), RecomputeCost(STATE_LEN)
    kind = _kind(rule, entry)
    teach(rule, entry, 1000, 10 * percent)
    assert rule.likelihood(kind) == pytest.approx(percent / 100, abs=0.02)
    known_kinds = (end(8), inside(8), prompt_end(8), *(branch(8, hits) for hits in range(9)))
    others = {_kind(rule, known) for known in known_kinds} - {kind}
    assert others
    assert all(rule.likelihood(known) == untaught.likelihood(known) for known in others)


def test_one_state_without_a_hit_changes_the_likelihood_little() -> None:
    rule = RecomputeCost(STATE_LEN)
    before = rule.likelihood(_kind(rule, end(8)))
    teach(rule, end(8), 1, 0)
    assert 0.75 * before < rule.likelihood(_kind(rule, end(8))) < before


def test_hit_likelihood_adapts_when_the_workload_changes() -> None:
    rule = RecomputeCost(STATE_LEN)
    teach(rule, end(8), 20_000, 20_000)
    teach(rule, end(8), 3_000, 0)
    assert rule.likelihood(_kind(rule, end(8))) < 0.15


def test_text_end_states_without_hits_lose_priority() -> None:
    rule = RecomputeCost(STATE_LEN)
    teach(rule, end(1000), 2000, 0)
    teach(rule, inside(1000), 2000, 400)
    assert priority(rule, end(1000)) < priority(rule, inside(1000))


# What the slot pool counts.


class Recorder(LeastRecentlyUsed):
    """LRU rule that records its calls; a state with a successor has kind 1, any other kind 0."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[int] = []
        self.hits: list[int] = []

    def weigh(self, entry: CachedEntry) -> Weight:
        return Weight(kind=min(entry.num_continuations, 1))

    def count_state(self, kind: int) -> None:
        self.states.append(kind)

    def count_hit(self, kind: int) -> None:
        self.hits.append(kind)


class BranchRecorder(Recorder):
    """Rule that records the number of branch hits of states."""

    def weigh(self, entry: CachedEntry) -> Weight:
        return Weight(entry.num_branch_hits)


class EndRecorder(Recorder):
    """Rule that records states at text ends separately from other states."""

    def weigh(self, entry: CachedEntry) -> Weight:
        return Weight(ENDS[0] if entry.is_end else ENDS.stop)


class OnlyPromptEnds(LeastRecentlyUsed):
    """Rule that gives priority only to states at prompt ends."""

    def weigh(self, entry: CachedEntry) -> Weight:
        return Weight(gain=float(entry.ends_prompt))


def pool_of_two_states(rule: EvictionRule) -> tuple[SlotPool, Sequence[BlockId]]:
    """Return a full pool with a state at block 0 and one after it at block 1, of one path."""
    pool, path = SlotPool(2, rule), [BlockId(0), BlockId(1)]
    for block, anchor in zip(path, (None, path[0]), strict=True):
        pool.publish(pool.reserve()[0], block, block + 1, anchor)
    pool.touch_path(path)
    return pool, path


def held_path(rule: EvictionRule) -> tuple[CachePools, Sequence[BlockId]]:
    """Return full pools and the two blocks of a held text, each with a state."""
    pools = CachePools.over(SplitSpace(2, 2), rule, block_size=1)
    path = pools.kv.allocate(2)
    for depth, (block, anchor) in enumerate(zip(path, (None, path[0]), strict=True), start=1):
        pools.kv.register(block, BlockKey(depth), anchor)
        pools.slots.publish(pools.slots.reserve()[0], block, depth, anchor)
    return pools, path


def test_state_is_counted_once_until_it_is_hit_or_changes_kind() -> None:
    rule = Recorder()
    pool, path = pool_of_two_states(rule)
    assert rule.states == [0, 1]
    pool.touch_path(path)
    assert rule.states == [0, 1]
    pool.pin(path[1])
    pool.unpin(path[1])
    pool.touch_path(path)
    assert (rule.states, rule.hits) == ([0, 1, 0], [0])


def test_repeated_hits_on_a_state_are_counted_once() -> None:
    rule = Recorder()
    pool, path = pool_of_two_states(rule)
    for _ in range(3):
        pool.pin(path[0])
    assert rule.hits == [1]


def test_state_that_becomes_a_text_end_is_counted_as_a_text_end_when_evicted() -> None:
    rule = EndRecorder()
    pools, path = held_path(rule)
    pools.slots.touch_path(path)
    pools.kv.release(path)
    assert rule.states == [ENDS[0], ENDS.stop]
    pools.slots.drop(path[1])
    pools.slots.evict()
    assert rule.states == [ENDS[0], ENDS.stop, ENDS[0]]


def test_resuming_at_the_last_state_of_a_text_is_not_a_branch_hit() -> None:
    rule = BranchRecorder()
    pools, path = held_path(rule)
    for block in path:
        pools.slots.pin(block)
        pools.slots.unpin(block)
    pools.slots.touch_path(path)
    assert rule.states == [0, 1]


# Together.


def test_cost_rule_keeps_a_shared_prefix_that_lru_loses_to_one_off_prompts() -> None:
    prefix, skipped = [1] * (4 * BLOCK), {}
    for eviction in ("lru", "cost"):
        cache = small_cache(num_blocks=64, num_slots=5, eviction=eviction)
        for number in range(4):
            serve(cache, new_spec(number, [*prefix, *other(10 + number)]))
        for number in range(20):
            serve(cache, new_spec(100 + number, other(100 + number)))
        skipped[eviction] = serve(cache, new_spec(999, [*prefix, *other(99)]))
    assert skipped == {"lru": 0, "cost": len(prefix)}


def test_last_state_of_a_conversation_is_evicted_after_its_earlier_states() -> None:
    cache = small_cache(num_blocks=64, num_slots=5, eviction="cost")
    text = [1] * (2 * BLOCK)
    for turn in range(4):
        serve(cache, new_spec(turn, [*text, 2]))
        text += [turn] * (2 * BLOCK)
    assert states_at(cache)[-1] == 8 * BLOCK
    for number in range(2):
        serve(cache, new_spec(100 + number, other(100 + number)))
    assert 8 * BLOCK in states_at(cache)
    assert serve(cache, new_spec(999, [*text, 2])) == 8 * BLOCK


def test_dropping_the_prompt_end_state_marks_the_state_before_it() -> None:
    pool, path = SlotPool(3, OnlyPromptEnds()), [BlockId(block) for block in range(3)]
    for block in path:
        pool.publish(pool.reserve()[0], block, block + 1, BlockId(block - 1) if block else None)
    for prompt_len in (1, 2):
        pool.touch_path(path, prompt_len)
        assert [pool.priority_of(block) > 0 for block in path] == [prompt_len == block + 1 for block in path]
    pool.touch_path(path)
    assert pool.priority_of(path[1]) > 0
    pool.drop(path[1])
    assert [pool.priority_of(block) > 0 for block in (path[0], path[2])] == [True, False]


def test_eviction_clock_advances_per_request_not_per_written_state() -> None:
    pool = SlotPool(4)
    for block in range(4):
        pool.publish(pool.reserve()[0], BlockId(block), block + 1)
    worths = {pool.priority_of(BlockId(block)) for block in range(4)}
    assert max(worths) - min(worths) < 0.001 * max(worths)
    pool.touch_path([BlockId(0)])
    assert pool.priority_of(BlockId(1)) < 0.95 * pool.priority_of(BlockId(0))


@pytest.mark.parametrize("slabs", [None, (6, 4, 1)], ids=["split", "slabs"])
def test_equal_request_sequences_leave_equal_caches(slabs: tuple[int, int, int] | None) -> None:
    caches = [small_cache(num_blocks=20, num_slots=5, slabs=slabs, eviction="cost") for _ in range(2)]
    for cache in caches:
        for number in range(30):
            serve(cache, new_spec(number, [1] * (BLOCK * (number % 3)) + other(number % 7)), reply=[3] * 6)
        assert cache.slots.num_evicted
    assert frozen(caches[0]) == frozen(caches[1])
