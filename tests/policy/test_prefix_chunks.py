"""Requests that wait for a prefix, prefill chunks and partial blocks."""

import pytest

from megatron_mamba_cache.policy.admission import Refusal
from tests.policy.small_cache import (
    BLOCK,
    admit,
    cached_states,
    decode,
    drop_states,
    new_spec,
    outcome,
    planned,
    prefill,
    run_step,
    serve,
    small_cache,
)

A, B, C, D = ([token] * BLOCK for token in (1, 2, 3, 4))


# Waiting for a prefix.


def test_request_waits_for_a_shared_prefix_computed_in_this_step() -> None:
    cache = small_cache()
    request = admit(cache, new_spec(0, [*A, *B, 9]))
    assert outcome(cache, [*A, *B, 8]) is Refusal.WAITS_FOR_PREFIX
    run_step(cache, [request])
    assert planned(cache, new_spec(1, [*A, *B, 8])).match.skip_tokens == 2 * BLOCK


@pytest.mark.parametrize("prompt", [[*B, *A, 9], [*A, *C, 9], [*A, *B]])
def test_request_that_cannot_use_the_pending_state_does_not_wait(prompt: list[int]) -> None:
    cache = small_cache()
    admit(cache, new_spec(0, [*A, *B, 9]))
    assert not isinstance(outcome(cache, prompt), Refusal)


@pytest.mark.parametrize("settings", [{"tenant": "blue"}, {"may_skip": False}])
def test_request_that_cannot_reuse_the_prefix_does_not_wait(settings: dict[str, object]) -> None:
    cache = small_cache()
    admit(cache, new_spec(0, [*A, *B, 9]))
    assert not isinstance(outcome(cache, [*A, *B, 9], **settings), Refusal)


def test_request_does_not_wait_when_no_slot_is_free_for_the_state() -> None:
    cache = small_cache(num_slots=2)
    other = prefill(cache, new_spec(0, [5]))
    request = admit(cache, new_spec(1, [*A, *B, 9]))
    cache.release(other)
    assert request.reserved == [] and cache.counters.states_skipped_no_room == 1
    assert not isinstance(outcome(cache, [*A, *B, 9]), Refusal)


@pytest.mark.parametrize("leave", ["abort", "release", "flush"])
def test_request_does_not_wait_for_an_aborted_or_released_request(leave: str) -> None:
    cache = small_cache()
    request = admit(cache, new_spec(0, [*A, *B, 9]))
    if leave == "flush":
        cache.flush()
    else:
        getattr(cache, leave)(request)
    assert not isinstance(outcome(cache, [*A, *B, 9]), Refusal)


def test_request_does_not_wait_for_a_state_past_its_own_prompt() -> None:
    cache = small_cache()
    serve(cache, new_spec(0, [*A, *B, 9]))
    admit(cache, new_spec(1, [*A, *B, *C, 9]))
    plan = planned(cache, new_spec(2, [*A, *B, 9]))
    assert plan.match.skip_tokens == 2 * BLOCK


# Chunks and partial blocks.


def test_partial_block_is_never_cached() -> None:
    cache = small_cache()
    request = prefill(cache, new_spec(0, [*A, 5, 6]), first_token=7)
    assert cache.kv.key_of(request.block_ids[1]) is None
    decode(cache, request, [8])
    assert (request.computed, cache.kv.key_of(request.block_ids[1])) == (7, None)
    decode(cache, request, [9])
    assert (request.computed, cache.kv.key_of(request.block_ids[1])) != (8, None)


def test_block_is_not_cached_until_its_last_sampled_token_is_computed() -> None:
    cache = small_cache()
    request = prefill(cache, new_spec(0, [*A, 5, 6, 7]), first_token=8)
    assert request.length == 2 * BLOCK
    cache.release(request)
    assert len(planned(cache, new_spec(1, [*A, 5, 6, 7, 8, 9])).match.blocks) == 1


@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("budget", range(1, 15))
def test_chunks_of_any_size_cache_the_same_blocks_as_one_chunk(budget: int, align: bool) -> None:
    prompt = [*A, *B, *C, 9]
    whole = small_cache()
    keys = [whole.kv.key_of(block) for block in prefill(whole, new_spec(0, prompt)).block_ids]
    cache = small_cache(align=align)
    request = admit(cache, new_spec(0, prompt), budget)
    run_step(cache, [request])
    while request.is_prefilling:
        full_blocks = request.block_ids[: request.computed // BLOCK]
        assert [cache.kv.key_of(block) for block in full_blocks] == keys[: len(full_blocks)]
        assert all(cache.kv.key_of(block) is None for block in request.block_ids[len(full_blocks) :])
        cache.schedule_chunk(request, min(request.computed + budget, len(prompt)))
        run_step(cache, [request])
        cache.check_integrity([request])
    assert [cache.kv.key_of(block) for block in request.block_ids] == keys


def test_chunk_ending_inside_a_block_caches_only_full_blocks() -> None:
    cache = small_cache(align=False)
    request = admit(cache, new_spec(0, [*A, *B, 9]), budget=6)
    run_step(cache, [request])
    assert cached_states(cache) == []
    assert len(planned(cache, new_spec(1, [*A, *B, 9])).match.blocks) == 1


def test_shared_blocks_are_not_rewritten_when_recomputed() -> None:
    cache = small_cache()
    first = prefill(cache, new_spec(0, [*A, *B, *C, 9]))
    drop_states(cache)
    request = admit(cache, new_spec(1, [*A, *B, *C, 8]), budget=6)
    run_step(cache, [request])
    assert (request.computed, request.num_shared_blocks, request.num_published_blocks) == (BLOCK, 3, 3)
    assert request.block_ids[:3] == first.block_ids[:3]
    cache.check_integrity([first, request])
