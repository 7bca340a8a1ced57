"""Requests that share prefixes: one copy of each block, waiting for each other, and stale plans."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from megatron_mamba_cache.errors import CacheIntegrityError
from megatron_mamba_cache.policy import scheduler
from megatron_mamba_cache.policy.admission import AdmissionPlan
from megatron_mamba_cache.policy.request_settings import RequestSpec, SamplingSettings
from megatron_mamba_cache.policy.requests import Candidate
from tests.mcore.engine_runs import EngineRun, cache_config, greedy, some_tokens, tiny_hybrid

BLOCK = 16


def start_run(*, keeps_all_logits: bool = False, **settings: Any) -> EngineRun:
    """Return an engine over the tiny model with blocks of 16 tokens."""
    subject = tiny_hybrid()
    config = cache_config(subject.sizes, block_size_tokens=BLOCK, **settings)
    return EngineRun.start(subject, config, materialize_only_last_token_logits=not keeps_all_logits)


def running_ids(run: EngineRun) -> list[int]:
    """Return the ids of the admitted requests."""
    return [request.request_id for request in run.context.running_requests]


# Sharing.


def test_second_of_two_identical_prompts_waits_and_shares_blocks() -> None:
    run = start_run(max_tokens=128)
    for request_id in (0, 1):
        run.add(request_id, some_tokens(50))
    run.step()
    assert running_ids(run) == [0] and run.counters.admissions_deferred == 1
    run.step()
    first, second = run.context.running_requests
    assert first.block_ids[:3] == second.block_ids[:3]
    assert [run.context.cache.kv.num_refs(block) for block in first.block_ids] == [2, 2, 2, 1]
    run.finish()
    assert run.engine.cached_tokens(1) == 48
    run.assert_exact()


def test_equal_blocks_computed_in_one_step_are_merged_into_one_copy() -> None:
    run = start_run(keeps_all_logits=True, max_tokens=128)
    for request_id in (0, 1):  # a request for prompt log-probs skips nothing, so it does not wait either
        run.add(request_id, some_tokens(50), greedy(8, return_log_probs=True))
    run.step()
    first, second = run.context.running_requests
    assert first.block_ids[:3] == second.block_ids[:3]
    assert [run.context.cache.kv.num_refs(block) for block in first.block_ids] == [2, 2, 2, 1]
    assert run.context.snapshot().kv_blocks["in_use"] == 5
    run.finish()
    run.assert_exact()


def test_identical_replies_share_their_blocks() -> None:
    run = start_run(max_tokens=128)
    for request_id in (0, 1):
        run.add(request_id, some_tokens(18), 40)
    while (
        not all(request.computed > 3 * BLOCK for request in run.context.running_requests)
        or len(run.context.running_requests) < 2
    ):
        run.step()
    first, second = run.context.running_requests
    assert first.block_ids[:3] == second.block_ids[:3]
    run.finish()
    run.assert_exact()


def test_next_conversation_turn_reuses_the_blocks_of_the_reply() -> None:
    run = start_run(max_tokens=128)
    run.run(0, some_tokens(18), 40)
    text = run.prompts[0] + run.tokens(0)
    before = run.counters.prompt_tokens_matched
    run.run(1, text + some_tokens(5))
    assert run.counters.prompt_tokens_matched - before == len(text) // BLOCK * BLOCK
    run.assert_exact()


def test_shared_blocks_are_never_written() -> None:
    run = start_run(keeps_all_logits=True)
    run.run(0, some_tokens(50))
    run.add(1, some_tokens(50), greedy(4, return_log_probs=True))  # computes every token over the shared blocks
    run.engine.schedule_waiting_requests()
    shared = run.context.running_requests[0].block_ids[:3]
    run.context.memory_buffer[:, :, shared] += 1
    marked = run.context.memory_buffer[:, :, shared].clone()
    run.context.initialize_attention_state()
    run.engine.controller.inference_wrapped_model.compute_step()
    assert torch.equal(run.context.memory_buffer[:, :, shared], marked)


# Waiting.


def test_request_waiting_for_a_prefix_does_not_block_later_requests() -> None:
    run = start_run(max_tokens=160)
    run.add(0, some_tokens(50))
    run.add(1, some_tokens(50))
    run.add(2, some_tokens(20, seed=1))
    run.step()
    assert running_ids(run) == [0, 2]
    run.step()
    assert running_ids(run) == [0, 2, 1]
    run.finish()
    run.assert_exact()


@pytest.mark.parametrize(("stride", "window", "waits"), [(None, 0, False), (None, 1, True), (1, 0, True)])
def test_request_waits_for_a_shared_prefix_only_if_its_state_is_kept(
    stride: int | None, window: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "BRANCH_WINDOW", window)
    run = start_run(max_tokens=160, boundary_stride=stride)
    run.add(0, some_tokens(5 * BLOCK + 3))
    # It shares two blocks; 0 reserves the fifth, or also where 1 parts from it, or all.
    run.add(1, some_tokens(2 * BLOCK) + some_tokens(9, seed=1))
    run.step()
    assert (running_ids(run) == [0]) == waits
    assert run.counters.admissions_deferred == waits
    run.finish()
    assert run.engine.cached_tokens(1) == (2 * BLOCK if waits else 0)
    run.assert_exact()


def test_state_that_a_request_resumes_from_is_not_evicted_in_the_same_step() -> None:
    run = start_run(cached_states=1, max_requests=2)
    run.run(0, some_tokens(33))
    run.add(1, some_tokens(33))  # takes a live slot and pins the one cached state
    run.add(2, some_tokens(40, seed=1))  # takes the other live slot; nothing is left for its boundary
    run.step()
    assert running_ids(run) == [1, 2] and run.engine.cached_tokens(1) == 32
    assert run.counters.states_skipped_no_room == 1
    assert run.context.mamba_slot_allocator.has_state(run.context.running_requests[0].block_ids[1])
    run.finish()
    run.assert_exact()


# Between planning and applying.


def _plan(run: EngineRun, prompt: Sequence[int]) -> tuple[Any, AdmissionPlan]:
    spec = RequestSpec(9, np.array(prompt, np.int64), len(prompt) + 4, SamplingSettings())
    candidate = Candidate(spec)
    plan = run.context.cache.plan(candidate, budget=64)
    assert isinstance(plan, AdmissionPlan) and plan.match.skip_tokens == 48
    return candidate, plan


def test_admission_raises_if_the_planned_state_was_dropped() -> None:
    run = start_run()
    run.run(0, some_tokens(50))
    run.run(1, some_tokens(70))  # its state keeps the blocks before it
    candidate, plan = _plan(run, some_tokens(50))
    run.context.cache.slots.drop(plan.match.blocks[2])
    with pytest.raises(CacheIntegrityError, match="token 48"):
        run.context.cache.admit(candidate, plan)
    run.assert_nothing_held()


def test_admission_raises_if_a_planned_block_was_evicted() -> None:
    run = start_run(kv_blocks=8)
    run.run(0, some_tokens(50))
    candidate, plan = _plan(run, some_tokens(50))
    kv = run.context.cache.kv
    kv.release(kv.allocate(kv.num_blocks))
    with pytest.raises(CacheIntegrityError, match="no longer cached"):
        run.context.cache.admit(candidate, plan)
    run.assert_nothing_held()


def test_releasing_an_unregistered_block_drops_its_state() -> None:
    run = EngineRun.start(tiny_hybrid(), cache_config(tiny_hybrid().sizes))
    allocator, states = run.context.block_allocator, run.context.mamba_slot_allocator
    blocks = allocator.allocate_memory_blocks(2)
    states.allocate_slots_batch(blocks.tolist())
    allocator.release_memory_blocks(blocks)
    assert not any(states.has_state(block) for block in blocks.tolist())
    run.context.check_integrity()
