"""Recorded loads replayed through the policy, compared with manual counts and with a model."""

import random

import pytest

from megatron_mamba_cache.planning.caches import CacheSizes, empty_cache, tiered_cache
from megatron_mamba_cache.planning.plan import CopiesAtOnce, block_texts, plan, replay
from megatron_mamba_cache.planning.recorded_load import RecordedLoad, RecordedRequest
from megatron_mamba_cache.policy.tiers.copies import CopyTimes
from tests.policy.split_space import SplitSpace

GIB = 2**30
SIZES = CacheSizes(kv_bytes_per_token=1024, state_bytes=4 * 64 * 1024, block_size=64)


def asked(prompt_len: int, reply_len: int, *hashes: int, at: float = 0.0) -> RecordedRequest:
    return RecordedRequest(at, 0, prompt_len, reply_len, tuple((0, content) for content in hashes))


def load_of(*requests: RecordedRequest, tokens_per_id: int = 64) -> RecordedLoad:
    return RecordedLoad(tokens_per_id, requests)


def test_reply_repeated_by_the_next_prompt_is_cached() -> None:
    # 130 prompt tokens and a reply of 70 make 200; the next prompt has them and 60 more.
    load = load_of(asked(130, 70, 0, 1, 2), asked(260, 1, 0, 1, 3, 4, 5))
    first, second = block_texts(load, 64)
    assert first.keys == second.keys[:3]
    # A state is kept at 192: with 199 tokens computed, the last boundary of the reply.
    assert plan(load, SIZES, []).unlimited.skipped_tokens == 192


def test_reply_without_a_next_turn_is_unique() -> None:
    load = load_of(asked(128, 128, 0, 1), asked(192, 0, 0, 1, 7), asked(192, 0, 0, 1, 9))
    texts = block_texts(load, 64)
    assert texts[0].keys == [*texts[1].keys, texts[0].keys[3]]
    assert texts[2].keys[:2] == texts[0].keys[:2] and texts[2].keys[2] not in texts[0].keys


def test_reply_is_unknown_when_the_next_prompt_differs_after_the_last_block() -> None:
    # 330 tokens: a block of 256, and a whole run after it.
    other, same = asked(700, 1, 0, 1, 2, 3, 9, 5, 6, 7, 8, 10), asked(700, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 10)
    first, of_other, of_same = block_texts(load_of(asked(330, 300, 0, 1, 2, 3, 4, 5), other, same), 256)
    assert first.keys == of_same.keys[:2] and first.keys[1] != of_other.keys[1]


def test_reply_is_found_in_the_next_turn_although_the_prompt_is_repeated_before_it() -> None:
    load = load_of(asked(128, 64, 0, 1), asked(128, 0, 0, 1), asked(192, 0, 0, 1, 2))
    first, _, last = block_texts(load, 64)
    assert first.keys == last.keys


def test_equal_hash_with_a_different_prefix_is_a_different_block() -> None:
    texts = block_texts(load_of(asked(128, 0, 0, 1), asked(128, 0, 2, 1)), 64)
    assert not set(texts[0].keys) & set(texts[1].keys)


@pytest.mark.parametrize("block_size", [64, 128, 32])
def test_block_may_contain_several_hashes_or_part_of_one(block_size: int) -> None:
    load = load_of(asked(256, 0, 0, 1, 2, 3), asked(256, 0, 0, 1, 2, 4))
    first, second = block_texts(load, block_size)
    assert len(first.keys) == 256 // block_size
    shared = 192 // block_size
    assert first.keys[:shared] == second.keys[:shared] and first.keys[shared] != second.keys[shared]


def test_block_size_that_does_not_match_the_hash_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a block has 96 tokens and a hash covers 64 tokens"):
        block_texts(load_of(asked(64, 0, 0)), 96)


def test_prompt_that_does_not_fit_skips_no_tokens() -> None:
    short, long = asked(128, 1, 0, 1), asked(64 * 40, 1, *range(100, 140))
    load = load_of(short, long, long, short)
    slab = 4 * 64 * 1024  # a state, or four blocks
    result = plan(load, SIZES, [(8 * slab + 64 * 1024) / GIB])
    assert result.unlimited.skipped_tokens == 64 * 39 + 64
    assert result.caches[0].replayed.prompt_tokens == 2 * (128 + 64 * 40)
    assert result.caches[0].replayed.skipped_tokens == 64


def random_load(seed: int) -> RecordedLoad:
    """Return conversations that grow, branch and end, in random order."""
    rng = random.Random(seed)
    texts: list[list[int]] = [[rng.randrange(10**6)] for _ in range(4)]
    requests = []
    for index in range(60):
        text = rng.choice(texts)
        if rng.random() < 0.3:
            text = text[: rng.randrange(1, len(text) + 1)]
            texts.append(text := list(text))
        text += [rng.randrange(10**6) for _ in range(rng.randrange(1, 4))]
        requests.append(asked(64 * len(text) - rng.randrange(64), rng.randrange(90), *text, at=index))
    return load_of(*requests)


@pytest.mark.parametrize("seed", range(6))
def test_unlimited_cache_skips_only_tokens_of_earlier_requests(seed: int) -> None:
    load = random_load(seed)
    seen: set[int] = set()
    bound = 0
    for text in block_texts(load, 64):
        usable = text.keys[: (text.prompt_len - 1) // 64]
        shared = next((number for number, key in enumerate(usable) if key not in seen), len(usable))
        bound += 64 * shared
        seen.update(text.keys)
    result = plan(load, SIZES, [0.002, 0.004, 0.05])
    shares = [cache.replayed.share for cache in result.caches]
    print(f"seed {seed}: unlimited {result.unlimited.share:.3f} of at most {bound / result.unlimited.prompt_tokens:.3f}"
          f", small ones {shares}")  # fmt: skip
    assert 0.5 * bound <= result.unlimited.skipped_tokens <= bound
    assert shares[0] < shares[-1] == result.unlimited.share


def test_replay_releases_all_blocks_and_states() -> None:
    cache = empty_cache(SIZES.space(0.004), SIZES)
    replay(block_texts(random_load(9), 64), cache, max_tokens=256)
    cache.check_integrity([])
    assert cache.kv.num_referenced == cache.slots.num_live == cache.slots.num_reserved == 0
    assert cache.slots.num_evicted > 0


def test_no_tokens_are_skipped_without_room_for_a_state() -> None:
    cache = empty_cache(SplitSpace(100, 1), SIZES)  # the live state takes the one slot
    load = load_of(asked(128, 0, 0, 1), asked(192, 0, 0, 1, 2))
    assert replay(block_texts(load, 64), cache, 8192).skipped_tokens == 0


@pytest.mark.parametrize("seed", range(6))
def test_host_tier_raises_the_hit_rate_but_not_above_that_of_an_unlimited_cache(seed: int) -> None:
    load = random_load(seed)
    result = plan(load, SIZES, [0.002, 0.006], [0.0, 0.003, 0.1])
    shares = {(cache.cache_gb, cache.host_cache_gb): cache.replayed.share for cache in result.caches}
    print(f"seed {seed}: unlimited {result.unlimited.share:.3f}, {shares}")
    for device in (0.002, 0.006):
        assert shares[device, 0.0] <= shares[device, 0.1] <= result.unlimited.share
    assert shares[0.002, 0.0] < shares[0.002, 0.1]
    assert shares[0.006, 0.1] >= 0.9 * result.unlimited.share


def test_replay_with_a_host_tier_releases_all_memory() -> None:
    space, host = SIZES.space(0.004), SIZES.space(0.004)
    tiered = tiered_cache(space, host, SIZES, CopiesAtOnce(), CopyTimes(0, 0, 1))
    texts = block_texts(random_load(9), 64)
    for _ in range(2):
        replay(texts, tiered.cache, 256, tiered.tier.drain)
        tiered.cache.check_integrity([])
    cache, counters = tiered.cache, tiered.cache.counters
    assert cache.kv.num_referenced == cache.slots.num_live == cache.slots.num_reserved == 0
    assert counters.states_written_to_host and counters.states_restored_from_host and tiered.tier.host.slots.num_evicted
    cache.flush()
    assert cache.kv.num_free == cache.kv.num_blocks and tiered.tier.host.kv.num_free == tiered.tier.host.kv.num_blocks
