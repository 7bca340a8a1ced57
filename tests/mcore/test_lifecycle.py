"""The cache's lifecycle: idle steps, flushes, new weights, suspends, lack of memory."""

from collections.abc import Callable
from typing import Any

import pytest

from megatron_mamba_cache.models.random_hybrid import random_hybrid_model
from tests.mcore.engine_runs import EngineRun, Hybrid, cache_config, hybrid, some_tokens, tiny_hybrid, tiny_sizes

pytestmark = pytest.mark.usefixtures("either_form")

BLOCK = 16


def start_run(**settings: Any) -> EngineRun:
    """Return an engine over the tiny model with blocks of 16 tokens."""
    subject = tiny_hybrid()
    return EngineRun.start(subject, cache_config(subject.sizes, block_size_tokens=BLOCK, **settings))


# What does not touch the cache.


def _idle_step(run: EngineRun) -> None:
    run.step()


def _reset(run: EngineRun) -> None:
    run.context.reset()


def _dummy_forward(run: EngineRun) -> None:
    run.engine.controller.dummy_forward()


@pytest.mark.parametrize("event", [_idle_step, _reset, _dummy_forward])
def test_idle_steps_and_dummy_forwards_keep_the_cache(event: Callable[[EngineRun], None]) -> None:
    run = start_run()
    run.run(0, some_tokens(50))
    before = run.context.snapshot()
    event(run)
    after = run.context.snapshot()
    assert (after.kv_blocks, after.state_slots) == (before.kv_blocks, before.state_slots)
    assert run.run(1, some_tokens(50)) == 2
    run.assert_exact()


# Flush, weights, tenants.


@pytest.mark.parametrize("steps_before", [1, 2, 6, 30])
def test_requests_started_before_a_flush_leave_no_cache_entries(steps_before: int) -> None:
    run = start_run(max_tokens=24)
    run.add(0, some_tokens(50), 40)
    for _ in range(steps_before):
        run.step()
    run.engine.flush()
    run.finish()
    assert run.context.snapshot().kv_blocks["cached"] == run.context.snapshot().state_slots["cached"] == 0
    text = run.prompts[0] + run.tokens(0)
    assert run.run(1, text) == len(text)
    assert run.run(2, text) < BLOCK  # what was prefilled after the flush is found
    run.assert_exact()


def test_waiting_requests_do_not_reuse_prefixes_from_before_a_flush() -> None:
    run = start_run(max_requests=1)
    run.run(0, some_tokens(50))
    run.add(1, some_tokens(20, seed=1))
    run.add(2, some_tokens(50))
    run.step()
    run.engine.flush()
    run.finish()
    assert run.engine.cached_tokens(2) == 0
    run.assert_exact()


def _switch_weights(run: EngineRun) -> None:
    run.engine.flush("2")


def _switch_weights_while_suspended(run: EngineRun) -> None:
    run.engine.suspend()
    run.engine.flush("2")
    run.engine.resume()


@pytest.mark.parametrize("switch", [_switch_weights, _switch_weights_while_suspended])
def test_new_weights_do_not_reuse_states_cached_with_old_weights(switch: Callable[[EngineRun], None]) -> None:
    old = random_hybrid_model(tiny_sizes(seed=1))  # a model of its own: its weights change
    new = hybrid(tiny_sizes(seed=2))
    subject = Hybrid(new.sizes, old, new.oracle, new.shape)
    run = EngineRun.start(subject, cache_config(subject.sizes, block_size_tokens=BLOCK))
    run.run(0, some_tokens(50))
    old.load_state_dict(new.model.state_dict())
    switch(run)
    assert run.context.weights_version == "2"
    assert run.run(1, some_tokens(50)) == 50
    assert run.run(2, some_tokens(50)) == 2
    run.assert_matches_oracle([1, 2]).assert_few_stops()
    run.assert_nothing_held()


def test_tenants_never_share_a_cached_prefix() -> None:
    run = start_run()
    computed = [run.run(i, some_tokens(50), tenant=tenant) for i, tenant in enumerate(("", "a", "b", "a", "", "b"))]
    assert computed == [50, 50, 50, 2, 2, 2]
    run.assert_exact()


# Suspend.


@pytest.mark.parametrize("steps_before", range(7))
def test_suspended_requests_continue_after_resume(steps_before: int) -> None:
    run = start_run(max_tokens=24)
    run.run(0, some_tokens(50), 3)
    run.add(1, some_tokens(50) + some_tokens(30, seed=1), 12)
    run.add(2, some_tokens(90, seed=2), 9)
    for _ in range(steps_before):
        run.step()
    run.engine.suspend()
    assert not run.context.running_requests
    run.engine.resume()
    run.finish()
    assert [len(run.tokens(request_id)) for request_id in range(3)] == [3, 12, 9]
    run.assert_exact()


def test_two_suspends_in_a_row_lose_no_token() -> None:
    run = start_run(max_tokens=24)
    run.add(0, some_tokens(50), 12)
    for num_steps in (5, 0, 1, 4):
        for _ in range(num_steps):
            run.step()
        run.engine.suspend()
        run.engine.resume()
    run.finish()
    assert len(run.tokens(0)) == 12
    run.assert_exact()


def test_suspend_drops_the_cache() -> None:
    run = start_run()
    run.run(0, some_tokens(50))
    run.engine.suspend()
    run.engine.resume()
    assert run.run(1, some_tokens(50)) == 50
    run.assert_exact()


# Memory pressure.


def test_paused_and_evicted_requests_generate_the_same_tokens() -> None:
    run = start_run(kv_blocks=7, paused_blocks=2, max_tokens=128)
    for request_id in range(4):
        run.add(request_id, some_tokens(15, seed=request_id), 60)
    run.finish()
    assert run.counters.requests_paused and run.counters.requests_evicted
    run.assert_exact()


def test_evicted_request_resumes_from_its_own_cached_prefix() -> None:
    run = start_run(kv_blocks=9, paused_blocks=0, max_tokens=128)
    for request_id in range(2):
        run.add(request_id, some_tokens(50, seed=request_id), 40)
    run.finish()
    assert run.counters.requests_evicted
    assert run.counters.prompt_tokens_skipped
    assert [run.engine.cached_tokens(request_id) for request_id in range(2)] == [0, 0]
    run.assert_exact()


# Ends.


@pytest.mark.parametrize("num_tokens", [1, 2, 100])
def test_request_ends_at_its_length_limit(num_tokens: int) -> None:
    run = start_run(max_sequence_length=112, max_tokens=24)
    run.run(0, some_tokens(112 - num_tokens), num_tokens)
    assert len(run.tokens(0)) == num_tokens
    run.assert_exact()


def test_request_added_while_suspended_runs_after_resuming() -> None:
    run = EngineRun.start(tiny_hybrid(), cache_config(tiny_hybrid().sizes))
    run.add(0, some_tokens(50), 6)
    run.step()
    run.engine.suspend()
    run.add(1, some_tokens(20, seed=1), 6)
    run.engine.resume()
    run.finish()
    run.assert_matches_oracle().assert_few_stops()
    run.assert_nothing_held()


def test_cancelling_a_requests_future_changes_no_token() -> None:
    run = EngineRun.start(tiny_hybrid(), cache_config(tiny_hybrid().sizes))
    run.add(0, some_tokens(20), 3)
    run.add(1, some_tokens(30, seed=2), 12)
    run.engine.requests[0].future.cancel()
    run.finish()
    run.assert_matches_oracle().assert_few_stops()


def test_boundary_stride_all_caches_a_state_after_every_block() -> None:
    sizes = tiny_hybrid().sizes
    run = EngineRun.start(tiny_hybrid(), cache_config(sizes, boundary_stride="all"))
    block = run.context.block_size_tokens
    run.run(0, some_tokens(4 * block + 1), 2)
    assert run.context.snapshot().state_slots["cached"] == 4
