"""Reasons for skipping nothing of a prompt, counted at a request's first admission."""

from typing import Any

import pytest

from tests.mcore.engine_runs import EngineRun, cache_config, greedy, some_tokens, tiny_hybrid

BLOCK = 16


def start_run(only_last: bool = True, **settings: Any) -> EngineRun:
    subject = tiny_hybrid()
    config = cache_config(subject.sizes, block_size_tokens=BLOCK, **settings)
    return EngineRun.start(subject, config, materialize_only_last_token_logits=only_last)


def reasons(run: EngineRun) -> dict[str, int]:
    return run.context.snapshot().counters.requests_without_hit


def test_miss_reason_is_short_prompt_for_one_block_and_new_prefix_for_more() -> None:
    run = start_run()
    run.run(0, some_tokens(BLOCK))
    run.run(1, some_tokens(BLOCK + 1, seed=1))
    assert reasons(run) == {"short_prompt": 1, "new_prefix": 1}


def test_cache_hit_has_no_miss_reason() -> None:
    run = start_run()
    run.run(0, some_tokens(50))
    run.run(1, some_tokens(50))
    assert run.engine.cached_tokens(1) and reasons(run) == {"new_prefix": 1}


def test_miss_reason_is_no_state_when_cached_blocks_have_no_state() -> None:
    run = start_run()
    run.run(0, some_tokens(60))
    run.run(1, [*some_tokens(40), *some_tokens(20, seed=1)])
    assert not run.engine.cached_tokens(1) and reasons(run) == {"new_prefix": 1, "no_state": 1}


def test_miss_reason_is_caching_off_when_the_cache_is_disabled() -> None:
    run = start_run(prefix_caching=False)
    run.run(0, some_tokens(50))
    assert reasons(run) == {"caching_off": 1}


def test_miss_reason_is_prompt_log_probs_when_they_are_requested() -> None:
    run = start_run(only_last=False)
    run.run(0, some_tokens(50))
    run.run(1, some_tokens(50), greedy(2, return_log_probs=True))
    assert reasons(run) == {"new_prefix": 1, "prompt_log_probs": 1}


@pytest.mark.parametrize("num_requests", [2, 4])
def test_request_readmitted_after_eviction_counts_no_second_miss(num_requests: int) -> None:
    run = start_run(kv_blocks=7, paused_blocks=2, max_tokens=128)
    for request_id in range(num_requests):
        run.add(request_id, some_tokens(15, seed=request_id), 60)
    run.finish()
    assert num_requests == 2 or run.counters.requests_evicted
    assert sum(reasons(run).values()) == num_requests
