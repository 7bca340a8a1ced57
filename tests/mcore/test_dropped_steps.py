"""Dropping a running step, or an engine's memory, loses no token."""

import asyncio
from collections.abc import Callable

import pytest
import torch
from megatron.core.inference.contexts.dynamic_context import TensorStateDeallocatedError
from megatron.core.inference.engines.dynamic_engine import EngineSuspendedError

from megatron_mamba_cache.errors import CacheIntegrityError
from megatron_mamba_cache.mcore.step_report import failure_reason
from megatron_mamba_cache.policy import block_growth
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from megatron_mamba_cache.policy.scheduler import FAILURES_BEFORE_REFUSAL
from tests.mcore.engine_runs import EngineRun, cache_config, greedy, megatron_request, some_tokens, tiny_hybrid
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.injected_errors import InjectedError, raise_once

pytestmark = pytest.mark.usefixtures("either_form")


def suspend_and_resume(run: EngineRun) -> None:
    run.engine.suspend()
    run.engine.resume()


DROPS: dict[str, Callable[[EngineRun], None]] = {
    "suspend": lambda run: run.engine.suspend(),
    "suspend and resume": suspend_and_resume,
    "reset of the context": lambda run: run.context.reset(),
}


def start_run(**settings: object) -> EngineRun:
    subject = tiny_hybrid()
    run = EngineRun.start(subject, cache_config(subject.sizes, **settings))
    run.add(1, some_tokens(20), 12)
    run.add(2, some_tokens(37, seed=3), 12)
    return run


def step_while(run: EngineRun, act: Callable[[EngineRun], None]) -> None:
    """Run a step, and call a function during its forward."""

    async def step_and_act() -> None:
        step = asyncio.ensure_future(run.engine.async_step())
        while not run.context.is_computing:
            await asyncio.sleep(0)
        act(run)
        with pytest.raises(CacheIntegrityError, match="the step was dropped during its forward pass"):
            await step

    run.engine._loop.run_until_complete(step_and_act())


@pytest.mark.parametrize("name", DROPS)
@pytest.mark.parametrize("resident_pools", [False, True])
@pytest.mark.parametrize("num_graphs", [0, 2])
@pytest.mark.parametrize("num_steps", [0, 4])
def test_abandoning_a_running_step_loses_and_repeats_no_token(
    name: str, resident_pools: bool, num_graphs: int, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_without_cuda(monkeypatch)
    run = start_run(resident_pools=resident_pools, num_cuda_graphs=num_graphs)
    for _ in range(num_steps):
        run.step()
    step_while(run, DROPS[name])
    if run.engine.is_suspended:
        run.engine.resume()
    run.finish()
    run.assert_exact()
    run.assert_nothing_held()


def test_closing_the_engine_ends_the_running_step() -> None:
    run = start_run()
    run.step()
    step_while(run, lambda run: run.engine.close())
    assert not run.context.is_computing and not run.context.running_requests


def test_stepping_a_closed_engine_fails_its_requests_one_by_one() -> None:
    run = start_run(max_requests=1)
    run.step()
    assert [request.request_id for request in run.context.running_requests] == [1] and list(
        run.engine.waiting_request_ids
    ) == [2]
    run.engine.close()
    for num_failed in range(2 * FAILURES_BEFORE_REFUSAL):
        assert len(run.engine.failed_request_ids) == num_failed // FAILURES_BEFORE_REFUSAL
        with pytest.raises(TensorStateDeallocatedError, match="closed"):
            run.engine.step_modern()
        if num_failed == 0:
            assert list(run.engine.waiting_request_ids) == [1, 2]
    assert run.engine.failed_request_ids == [1, 2] and not run.engine.waiting_request_ids
    reports = [record.merge() for record in run.engine.step_modern()["finished_request_records"]]
    assert [request.request_id for request in reports] == [1, 2]
    assert all("TensorStateDeallocatedError" in (failure_reason(request) or "") for request in reports)
    assert not run.engine.requests and not run.engine.has_unfinished_requests()


def test_stepping_a_suspended_engine_raises_and_fails_no_request() -> None:
    run = start_run(max_requests=1)
    run.step()
    run.engine.suspend()
    for _ in range(2 * FAILURES_BEFORE_REFUSAL):
        with pytest.raises(EngineSuspendedError):
            run.engine.step_modern()
    assert run.engine.resume_request_ids == [1, 2] and not run.engine.failed_request_ids
    run.engine.resume()
    run.finish()
    run.assert_exact()


def test_resetting_a_suspended_engine_removes_its_requests() -> None:
    run = start_run()
    run.step()
    run.engine.suspend()
    run.engine.reset()
    assert not run.engine.requests and not run.engine.has_unfinished_requests()


def test_closing_an_engine_without_requests_does_nothing() -> None:
    run = start_run()
    run.finish()
    run.engine.close()
    for act in (run.engine.flush, run.engine.reset, run.engine.create_cuda_graphs, run.engine.step_modern):
        act()
    assert run.context.graphs is None and run.engine.cancel_request(1) is False


@pytest.mark.parametrize("digest_steps", [0, 1, 2])
def test_rank_digest_includes_steps_run_by_the_caller(digest_steps: int) -> None:
    subject = tiny_hybrid()
    run = EngineRun.start(subject, cache_config(subject.sizes, rank_digest_steps=digest_steps))
    context, model = run.context, run.engine.controller.inference_wrapped_model
    prompt, tokens = some_tokens(20), []
    context.add_request(megatron_request(5, prompt, greedy(3)))
    for _ in range(3):
        context.initialize_attention_state()
        with torch.inference_mode():
            logits = model.compute_step()
        context.mamba_slot_allocator.commit_intermediate_states()
        best = logits.squeeze(0)[-1:].argmax(-1)
        tokens += best.tolist()
        context.update_requests([1], best)
    assert subject.oracle.check_greedy(prompt, tokens, 1e-5).first_mismatch is None


def test_requests_advanced_by_a_failed_step_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run()
    for _ in range(3):
        run.step()
    context, model = run.context, run.engine.controller.inference_wrapped_model
    context.initialize_attention_state()
    with torch.inference_mode():
        best = model.compute_step().squeeze(0).argmax(-1)
    raise_once(monkeypatch, context.runner.requests, "grow")
    with pytest.raises(InjectedError):
        context.update_requests([1, 1], best)
    assert [request.scheduled for request in context.running_requests] == [0, 0]
    context.runner.drop_failed_step()
    assert not context.running_requests and not context.is_computing
    context.check_integrity()


def test_evicted_request_is_released_once_when_block_allocation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tiny_hybrid()
    settings = {"kv_blocks": 5, "paused_blocks": 1, "max_sequence_length": 64, "prefix_caching": False}
    run = EngineRun.start(subject, cache_config(subject.sizes, **settings))
    for request_id in range(3):
        run.add(request_id, some_tokens(10, seed=request_id), 40)
    plan, raised = block_growth.plan_preemption, []

    def plan_and_fail(*arguments: object) -> object:
        planned = plan(*arguments)
        if planned.evicted and planned.grants and not raised:
            raised.append(True)
            monkeypatch.setattr(PrefixCache, "grow", fail_once)
        return planned

    grow = PrefixCache.grow

    def fail_once(*arguments: object) -> None:
        monkeypatch.setattr(PrefixCache, "grow", grow)
        raise InjectedError("growing")

    monkeypatch.setattr(block_growth, "plan_preemption", plan_and_fail)
    while run.engine.has_unfinished_requests():
        try:
            run.step()
        except InjectedError:
            run.context.check_integrity()
    assert raised
    run.assert_exact()
    run.assert_nothing_held()
