from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.config import CacheConfig
from megatron_mamba_cache.policy.eviction import CachedEntry
from megatron_mamba_cache.policy.eviction_rules import EVICTION_RULES, block_cost_worth, state_cost_worth
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from tests.policy.small_cache import BLOCK, cached_states, frozen, request, serve, small_cache

ENTRIES = st.builds(
    CachedEntry,
    last_used=st.integers(0, 10**9),
    num_tokens=st.integers(1, 10**6),
    floor=st.floats(0, 1e12),
    lost_tokens=st.integers(1, 10**6),
    num_hits=st.integers(0, 10**9),
    num_continuations=st.integers(0, 10**6),
)


def states_at(cache: PrefixCache) -> list[int]:
    """Return the positions of the cached states."""
    return sorted(cache.kv.depth(block) * BLOCK for block in cached_states(cache))


def other(number: int) -> list[int]:
    """Return a prompt of two blocks that shares nothing."""
    return [number] * (2 * BLOCK + 1)


def test_every_rule_of_the_settings_exists() -> None:
    assert {CacheConfig(eviction=name).eviction for name in EVICTION_RULES} == {"cost", "lru"}


@given(ENTRIES)
def test_a_state_that_stands_for_more_tokens_is_worth_more(entry: CachedEntry) -> None:
    assert state_cost_worth(entry._replace(lost_tokens=2 * entry.lost_tokens + 10**6)) > state_cost_worth(entry)


@given(ENTRIES)
def test_a_point_where_texts_part_is_worth_more_than_an_end_and_an_end_more_than_the_inside(entry: CachedEntry) -> None:
    inside, end, parting = (state_cost_worth(entry._replace(floor=0.0, num_continuations=n)) for n in (1, 0, 2))
    assert inside < end < parting


@given(ENTRIES)
def test_hits_never_make_an_entry_worth_less_nor_keep_it_for_ever(entry: CachedEntry) -> None:
    for worth in (state_cost_worth, block_cost_worth):
        more = entry._replace(num_hits=entry.num_hits + 1)
        assert worth(entry) <= worth(more) <= entry.floor + 9 * entry.lost_tokens


@given(ENTRIES, st.floats(1, 1e12))
def test_worth_rises_with_the_floor_of_the_last_use(entry: CachedEntry, rise: float) -> None:
    for worth in (state_cost_worth, block_cost_worth):
        assert worth(entry._replace(floor=entry.floor + rise)) > worth(entry)


def test_a_shared_prefix_outlives_prompts_that_never_come_back() -> None:
    prefix, skipped = [1] * (4 * BLOCK), {}
    for eviction in ("lru", "cost"):
        cache = small_cache(num_blocks=64, num_slots=5, eviction=eviction)
        for number in range(4):
            serve(cache, request(number, [*prefix, *other(10 + number)]))
        for number in range(20):
            serve(cache, request(100 + number, other(100 + number)))
        skipped[eviction] = serve(cache, request(999, [*prefix, *other(99)]))
    assert skipped == {"lru": 0, "cost": len(prefix)}


def test_the_end_of_a_conversation_outlives_its_earlier_turns() -> None:
    cache = small_cache(num_blocks=64, num_slots=5, eviction="cost")
    text = [1] * (2 * BLOCK)
    for turn in range(4):
        serve(cache, request(turn, [*text, 2]))
        text += [turn] * (2 * BLOCK)
    assert states_at(cache)[-1] == 8 * BLOCK
    for number in range(2):
        serve(cache, request(100 + number, other(100 + number)))
    assert 8 * BLOCK in states_at(cache)
    assert serve(cache, request(999, [*text, 2])) == 8 * BLOCK


def test_equal_requests_leave_equal_caches() -> None:
    caches = [small_cache(num_blocks=20, num_slots=5, eviction="cost") for _ in range(2)]
    for cache in caches:
        for number in range(30):
            serve(cache, request(number, [1] * (BLOCK * (number % 3)) + other(number % 7)), reply=[3] * 6)
    assert frozen(caches[0]) == frozen(caches[1])
