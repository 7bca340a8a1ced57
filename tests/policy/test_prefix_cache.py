"""Examples of prompt tokens that requests skip, share or must not share."""

import pytest

from megatron_mamba_cache.policy.admission import Refusal
from megatron_mamba_cache.policy.slot_owners import SlotOwner
from tests.policy.small_cache import (
    BLOCK,
    ENOUGH,
    NewCache,
    admit,
    cached_states,
    candidate_of,
    decode,
    drop_states,
    new_spec,
    planned,
    prefill,
    run_step,
    serve,
    small_cache,
)

A, B, C, D = ([token] * BLOCK for token in (1, 2, 3, 4))


# What is skipped.


def test_repeated_prompt_computes_only_tokens_after_its_last_full_block(new_cache: NewCache) -> None:
    cache = new_cache()
    prompt = [*A, *B, *C, *D, 5, 6, 7]
    assert [serve(cache, new_spec(index, prompt)) for index in range(3)] == [0, 16, 16]
    assert cache.counters.prefill_tokens_computed == 19 + 3 + 3


def test_repeated_prompt_of_whole_blocks_computes_the_last_block(new_cache: NewCache) -> None:
    cache = new_cache()
    assert [serve(cache, new_spec(index, [*A, *B, *C])) for index in range(2)] == [0, 8]


def test_repeated_prompt_of_one_block_is_computed_again(new_cache: NewCache) -> None:
    cache = new_cache()
    assert [serve(cache, new_spec(index, A)) for index in range(2)] == [0, 0]
    assert serve(cache, new_spec(2, [*A, 9])) == BLOCK


def test_prompt_shorter_than_a_block_is_never_cached(new_cache: NewCache) -> None:
    cache = new_cache()
    assert [serve(cache, new_spec(index, [1, 2, 3])) for index in range(2)] == [0, 0]
    assert (cache.kv.num_cached, cached_states(cache)) == (0, [])


def test_prompt_with_three_cached_blocks_resumes_at_the_only_state(new_cache: NewCache) -> None:
    cache = new_cache(stride=1)
    request = prefill(cache, new_spec(0, [*A, *B, *C, 9]))
    for block in request.block_ids[1:]:
        cache.slots.drop(block)
    plan = planned(cache, new_spec(1, [*A, *B, *C, 8]))
    assert (plan.match.blocks, plan.match.skip_tokens) == (tuple(request.block_ids[:3]), BLOCK)


def test_whole_prompt_is_computed_when_only_its_kv_is_cached(new_cache: NewCache) -> None:
    cache = new_cache()
    request = prefill(cache, new_spec(0, [*A, *B, 9]))
    drop_states(cache)
    plan = planned(cache, new_spec(1, [*A, *B, 9]))
    assert (len(plan.match.blocks), plan.match.skip_tokens) == (2, 0)
    second = admit(cache, new_spec(1, [*A, *B, 9]))
    assert second.block_ids[:2] == request.block_ids[:2] and second.num_shared_blocks == 2


def test_request_that_matches_only_kv_caches_a_state_at_the_match_end(new_cache: NewCache) -> None:
    cache = new_cache()
    prefill(cache, new_spec(0, [*A, *B, *C, 9]))
    request = admit(cache, new_spec(1, [*A, *D, *D, 9]))
    assert (request.computed, request.num_shared_blocks) == (0, 1)
    assert [state.position for state in request.reserved] == [BLOCK, 3 * BLOCK]


def test_third_request_with_a_common_prefix_resumes_at_the_end_of_the_prefix(new_cache: NewCache) -> None:
    cache = new_cache()
    assert serve(cache, new_spec(0, [*A, *B, 9])) == 0
    assert serve(cache, new_spec(1, [*A, *C, 9])) == 0
    assert serve(cache, new_spec(2, [*A, *D, 9])) == BLOCK


def test_blocks_of_a_running_reply_are_shared_with_an_equal_prompt(new_cache: NewCache) -> None:
    cache = new_cache(checkpoints="none")
    request = prefill(cache, new_spec(0, [*A, 5, 6]), first_token=7)
    decode(cache, request, [8, *B, 9])
    held = list(request.block_ids)
    turn = [*A, 5, 6, 7, 8, *B, 9, 9, 9, 9]
    plan = planned(cache, new_spec(1, turn))
    assert plan.match.blocks == tuple(held[:3])
    assert plan.match.skip_tokens == BLOCK
    request = admit(cache, new_spec(1, turn))
    assert 3 * BLOCK in [state.position for state in request.reserved]


def test_reply_blocks_are_cached_only_with_decode_checkpoints(new_cache: NewCache) -> None:
    matched = {}
    for checkpoints in ("none", "rolling"):
        cache = new_cache(checkpoints=checkpoints)
        serve(cache, new_spec(0, [*A, 9]), [*B, *C])
        plan = planned(cache, new_spec(1, [*A, 9, 0, *B, *C, 9]))
        matched[checkpoints] = len(plan.match.blocks), plan.match.skip_tokens
    assert matched == {"none": (1, BLOCK), "rolling": (3, 3 * BLOCK)}


def test_no_second_state_is_cached_at_a_position_that_has_a_state(new_cache: NewCache) -> None:
    cache = new_cache(stride=1)
    serve(cache, new_spec(0, [*A, *B, *C]))
    request = admit(cache, new_spec(1, [*A, *B, *C]))
    assert (request.computed, request.reserved) == (2 * BLOCK, [])
    again = admit(cache, new_spec(2, [*A, *B, *C, *D], may_skip=False))
    assert [state.position for state in again.reserved] == [4 * BLOCK]


def test_request_with_prompt_log_probs_does_not_reuse_the_cache_but_fills_it(new_cache: NewCache) -> None:
    cache = new_cache()
    assert serve(cache, new_spec(0, [*A, *B, 9], may_skip=False)) == 0
    assert serve(cache, new_spec(1, [*A, *B, 9], may_skip=False)) == 0
    assert serve(cache, new_spec(2, [*A, *B, 9])) == 2 * BLOCK


def test_ten_identical_prompts_share_the_blocks_of_the_first() -> None:
    cache = small_cache(num_blocks=4, num_slots=13)
    first = prefill(cache, new_spec(0, [*A, *B, *C]))
    available = cache.kv.num_available
    requests = [first, *(prefill(cache, new_spec(index, [*A, *B, *C])) for index in range(1, 10))]
    assert cache.kv.num_available == available
    assert [cache.kv.num_refs(block) for block in first.block_ids] == [10, 10, 10]
    cache.check_integrity(requests)


def test_requests_with_a_common_prefix_compute_2008_of_3800_tokens() -> None:
    cache = small_cache(num_blocks=64, num_slots=32, block_size=256)
    a, b = list(range(256)), list(range(1000, 1256))
    r1, r2, r3 = ([seed + index for index in range(288)] for seed in (2000, 3000, 4000))
    tails = [a + [7] * 44, a + b + r1, a + b + r2, a + b + r3, a + b + r1[:256] + [8] * 332]
    computed = []
    for index, prompt in enumerate(tails):
        before = cache.counters.prefill_tokens_computed
        serve(cache, new_spec(index, prompt))
        computed.append(cache.counters.prefill_tokens_computed - before)
    assert computed == [300, 544, 544, 288, 332]
    assert (sum(computed), sum(map(len, tails))) == (2008, 3800)


def test_prompts_of_whole_blocks_compute_one_block_each() -> None:
    cache = small_cache(num_blocks=64, num_slots=32, block_size=256)
    a, b = list(range(256)), list(range(1000, 1256))
    for index, prompt in enumerate((a, a, a + b, a + b)):
        serve(cache, new_spec(index, prompt))
    assert cache.counters.prefill_tokens_computed == 1024


# Tenants, flushes, a cache switched off.


def test_tenants_never_share_cached_blocks(new_cache: NewCache) -> None:
    cache = new_cache()
    assert serve(cache, new_spec(0, [*A, *B, 9], tenant="red")) == 0
    plan = planned(cache, new_spec(1, [*A, *B, 9], tenant="blue"))
    assert (plan.match.blocks, plan.match.skip_tokens) == ((), 0)
    assert serve(cache, new_spec(2, [*A, *B, 9], tenant="red")) == 2 * BLOCK


def test_disabled_prefix_cache_registers_no_block(new_cache: NewCache) -> None:
    cache = new_cache(enabled=False)
    assert [serve(cache, new_spec(index, [*A, *B, 9]), [1] * 9) for index in range(2)] == [0, 0]
    assert (cache.kv.num_cached, cache.counters.states_reserved) == (0, 0)


@pytest.mark.parametrize("weights_version", [None, "1"])
def test_no_cached_prefix_is_matched_after_a_flush(new_cache: NewCache, weights_version: str | None) -> None:
    cache = new_cache()
    serve(cache, new_spec(0, [*A, *B, 9]))
    candidate = candidate_of(cache, new_spec(1, [*A, *B, 9]))
    cache.flush(weights_version)
    plan = cache.plan(candidate, ENOUGH)
    assert not isinstance(plan, Refusal) and plan.match.blocks == ()
    assert (cache.kv.num_cached, cached_states(cache)) == (0, [])


def test_block_keys_depend_on_tenant_weights_version_and_flush_count(new_cache: NewCache) -> None:
    cache = new_cache()
    roots = {cache.root_of(""), cache.root_of("red")}
    for weights_version in (None, "1", "0"):
        cache.flush(weights_version)
        roots.add(cache.root_of(""))
    assert len(roots) == 5


def test_request_admitted_before_a_flush_caches_nothing_after_it(new_cache: NewCache) -> None:
    cache = new_cache()
    decoding = prefill(cache, new_spec(0, [*A, *B, 9]))
    prefilling = admit(cache, new_spec(1, [*C, *D, 9]))
    assert prefilling.reserved
    cache.flush()
    run_step(cache, [prefilling])
    decode(cache, decoding, [5] * 2 * BLOCK)
    cache.check_integrity([decoding, prefilling])
    for prompt in ([*A, *B, 9, 0, *([5] * BLOCK)], [*C, *D, 9]):
        assert planned(cache, new_spec(2, prompt)).match.blocks == ()
    assert (cache.slots.num_reserved, cached_states(cache)) == (0, [])


def test_flushed_state_is_freed_after_the_step_that_reads_it(new_cache: NewCache) -> None:
    cache = new_cache()
    serve(cache, new_spec(0, [*A, *B, 9]))
    request = admit(cache, new_spec(1, [*A, *B, 8]))
    assert request.source_slot is not None
    source = request.source_slot
    cache.flush()
    cache.check_integrity([request])
    assert cache.slots.owner_of(source) is SlotOwner.CACHED
    run_step(cache, [request])
    assert cache.slots.owner_of(source) is SlotOwner.FREE
    cache.check_integrity([request])


def test_requests_from_before_a_flush_are_cached_after_a_new_prefill(new_cache: NewCache) -> None:
    cache = new_cache()
    request = prefill(cache, new_spec(0, [*A, *B, 9]))
    cache.flush()
    cache.release(request)
    assert [serve(cache, new_spec(index, [*A, *B, 9])) for index in (0, 1)] == [0, 2 * BLOCK]


# Identical content in one step.


def test_equal_prompts_in_one_step_leave_one_copy_of_each_block(new_cache: NewCache) -> None:
    cache = new_cache()
    requests = [admit(cache, new_spec(index, [*A, *B, 9], may_skip=False)) for index in range(2)]
    own = [list(request.block_ids) for request in requests]
    assert not set(own[0]) & set(own[1])
    run_step(cache, requests)
    assert requests[1].block_ids == [*own[0][:2], own[1][2]]
    assert [cache.kv.num_refs(block) for block in own[0]] == [2, 2, 1]
    assert [cache.kv.num_refs(block) for block in own[1]] == [0, 0, 1]
    assert cached_states(cache) == [own[0][1]]
    cache.check_integrity(requests)
    for request in requests:
        cache.release(request)
    assert (cache.kv.num_cached, cache.kv.num_referenced) == (2, 0)


def test_equal_replies_leave_one_copy_of_each_block(new_cache: NewCache) -> None:
    cache = new_cache()
    requests = [prefill(cache, new_spec(index, [*A, 9]), first_token=5) for index in range(2)]
    for token in (6, 7, 8, 8, 8, 8):
        for request in requests:
            if request.computed == len(request.block_ids) * BLOCK:
                cache.grow(request)
            cache.schedule_decode(request)
        run_step(cache, requests, token)
    assert requests[0].block_ids[:2] == requests[1].block_ids[:2]
    assert requests[0].block_ids[2] != requests[1].block_ids[2]
    cache.check_integrity(requests)


def test_request_that_switched_to_shared_blocks_extends_their_chain(new_cache: NewCache) -> None:
    cache = new_cache()
    requests = [admit(cache, new_spec(index, [*A, *B, 9], may_skip=False)) for index in range(2)]
    run_step(cache, requests)
    cache.release(requests[0])
    decode(cache, requests[1], [5] * BLOCK)
    third = requests[1].block_ids[2]
    assert cache.kv.parent_of(third) == requests[1].block_ids[1]
    assert cache.kv.depth(third) == 3
    cache.check_integrity(requests[1:])


def test_duplicate_state_of_the_same_prefix_is_released(new_cache: NewCache) -> None:
    cache = new_cache(stride=1)
    requests = [admit(cache, new_spec(0, [*A, *B, 9]), budget=6), admit(cache, new_spec(1, [*A, 8], may_skip=False))]
    assert [len(request.reserved) for request in requests] == [1, 0]
    run_step(cache, requests)
    assert len(cached_states(cache)) == 1 and cache.slots.num_reserved == 0
