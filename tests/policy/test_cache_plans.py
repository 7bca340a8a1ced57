"""Admission plans change nothing, and are refused if the cache has changed since."""

import pytest

from megatron_mamba_cache.errors import CacheCapacityError, CacheIntegrityError
from megatron_mamba_cache.policy.admission import Refusal
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from tests.policy.small_cache import (
    BLOCK,
    ENOUGH,
    NewCache,
    admit,
    candidate_of,
    drop_states,
    frozen,
    new_spec,
    prefill,
    serve,
    small_cache,
)

A, B, C, D = ([token] * BLOCK for token in (1, 2, 3, 4))


@pytest.mark.parametrize("prompt", [[*A, *B, 9], [*A, *B, *C, 9], [*D, 9], A * 20])
@pytest.mark.parametrize("budget", [0, 3, ENOUGH])
def test_planning_an_admission_changes_no_cache_state(prompt: list[int], budget: int) -> None:
    cache = small_cache(num_blocks=9, num_slots=4)
    serve(cache, new_spec(0, [*A, *B, 9]))
    admit(cache, new_spec(1, [*A, *B, *C, 5]))
    candidate = candidate_of(cache, new_spec(2, prompt))
    before = frozen(cache)
    cache.plan(candidate, budget)
    assert frozen(cache) == before


def test_planning_after_a_flush_only_recomputes_the_block_keys(new_cache: NewCache) -> None:
    cache = new_cache()
    candidate = candidate_of(cache, new_spec(0, [*A, *B, 9]))
    cache.flush()
    before = frozen(cache)
    cache.plan(candidate, ENOUGH)
    assert frozen(cache) == before
    assert candidate.epoch == cache.epoch
    assert candidate.chain.keys == candidate_of(cache, candidate.spec).chain.keys


def remove_the_state(cache: PrefixCache) -> None:
    drop_states(cache)


def remove_the_blocks(cache: PrefixCache) -> None:
    cache.kv.release(cache.kv.allocate(cache.kv.num_available))


def remove_the_free_blocks(cache: PrefixCache) -> None:
    cache.kv.allocate(cache.kv.num_free)


def remove_every_key(cache: PrefixCache) -> None:
    cache.flush()


def remove_the_free_slots(cache: PrefixCache) -> None:
    for _ in range(cache.slots.count_by_owner()["free"]):
        cache.slots.take_live()


@pytest.mark.parametrize(
    "remove",
    [remove_the_state, remove_the_blocks, remove_the_free_blocks, remove_every_key, remove_the_free_slots],
    ids=lambda remove: remove.__name__,
)
def test_admission_with_a_stale_plan_raises_and_changes_nothing(new_cache: NewCache, remove: object) -> None:
    cache = new_cache()
    serve(cache, new_spec(0, [*A, *B, 9]))
    candidate = candidate_of(cache, new_spec(1, [*A, *B, 8]))
    plan = cache.plan(candidate, ENOUGH)
    assert not isinstance(plan, Refusal) and plan.match.skip_tokens == 2 * BLOCK
    remove(cache)  # type: ignore[operator]
    before = frozen(cache)
    with pytest.raises(CacheIntegrityError):
        cache.admit(candidate, plan)
    assert frozen(cache) == before


def test_admission_raises_if_planned_blocks_now_hold_another_prefix() -> None:
    cache = small_cache(num_blocks=4)
    serve(cache, new_spec(0, [*A, *B, 9]))
    candidate = candidate_of(cache, new_spec(1, [*A, *B, 8]))
    plan = cache.plan(candidate, ENOUGH)
    assert not isinstance(plan, Refusal) and len(plan.match.blocks) == 2
    serve(cache, new_spec(2, [*C, *C, *C, *C]))
    assert all(cache.kv.key_of(block) for block in plan.match.blocks)
    before = frozen(cache)
    with pytest.raises(CacheIntegrityError, match="no longer cached"):
        cache.admit(candidate, plan)
    assert frozen(cache) == before


def test_failed_block_allocation_for_a_request_changes_nothing() -> None:
    cache = small_cache(num_blocks=2)
    request = prefill(cache, new_spec(0, [*A, *B]))
    before = frozen(cache)
    with pytest.raises(CacheCapacityError, match="buffer-size-gb"):
        cache.grow(request)
    assert frozen(cache) == before and len(request.block_ids) == 2
