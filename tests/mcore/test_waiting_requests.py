"""The number of calls of a step for waiting requests does not grow with the queue."""

from collections.abc import Callable
from typing import Any

import pytest

from megatron_mamba_cache.mcore import engine as engine_module
from megatron_mamba_cache.policy import block_growth
from megatron_mamba_cache.policy.admission import BRANCH_WINDOW
from megatron_mamba_cache.policy.scheduler import MOST_PASSED_OVER
from tests.mcore.engine_runs import EngineRun, cache_config, some_tokens, tiny_hybrid

BLOCK = 16


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Return a list that counts the calls of `owner.name` from now on."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = [0]

    def wrapper(*arguments: Any, **settings: Any) -> Any:
        calls[0] += 1
        return original(*arguments, **settings)

    monkeypatch.setattr(owner, name, wrapper)
    return calls


@pytest.mark.parametrize("prefix_len", [0, 2 * BLOCK], ids=["unrelated prompts", "one prefix"])
def test_step_work_is_equal_for_100_and_10000_waiting_requests(
    prefix_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []
    for num_waiting in (100, 10_000):
        run = EngineRun.start(tiny_hybrid())
        for request_id in range(num_waiting):
            run.add(request_id, [*some_tokens(prefix_len), *some_tokens(BLOCK + 2, seed=1 + request_id)], 1)
        plans = counted(monkeypatch, run.context.cache, "plan")
        keys = counted(monkeypatch, run.context.cache, "_keys_of")
        run.step()
        run.step()
        looked_at.append((plans[0], keys[0]))
    assert looked_at[0] == looked_at[1]
    num_plans, num_keys = looked_at[0]
    assert 0 < num_plans <= 2 * (MOST_PASSED_OVER + 2) and num_keys <= num_plans + BRANCH_WINDOW


def test_request_queued_after_many_deferred_requests_is_eventually_admitted() -> None:
    run = EngineRun.start(tiny_hybrid(), cache_config(tiny_hybrid().sizes, max_requests=4))
    for request_id in range(MOST_PASSED_OVER + 2):
        run.add(request_id, [*some_tokens(2 * BLOCK), request_id], 1)
    last = MOST_PASSED_OVER + 2
    run.add(last, some_tokens(5, seed=9), 3)
    run.step()
    assert last in run.engine.waiting_request_ids
    run.finish()
    assert len(run.tokens(last)) == 3
    run.assert_exact()


def test_prompt_is_parsed_once_when_the_request_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    run = EngineRun.start(tiny_hybrid())
    reads = counted(monkeypatch, engine_module, "spec_of")
    for request_id in range(3):
        run.add(request_id, some_tokens(20, seed=request_id))
    assert reads[0] == 3
    run.finish()
    assert reads[0] == 3
    run.assert_exact()


def test_block_plan_is_reused_while_requests_stay_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tiny_hybrid()
    run = EngineRun.start(subject, cache_config(subject.sizes, kv_blocks=6, paused_blocks=3, max_requests=2))
    run.add(0, some_tokens(2 * BLOCK + 1, seed=1), 2 * BLOCK - 1)
    run.add(1, some_tokens(3 * BLOCK - 4, seed=2), BLOCK)
    plans = counted(monkeypatch, block_growth, "plan_preemption")
    num_paused = 0
    while run.engine.requests:
        run.step()
        num_paused += any(request.is_paused for request in run.context.running_requests)
    assert num_paused > plans[0] >= 1
    run.assert_exact()
