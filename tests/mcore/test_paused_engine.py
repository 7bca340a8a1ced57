"""A paused engine computes nothing, keeps its states and queues requests; an aborted request returns its tokens."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from megatron.core.inference.inference_request import Status

from megatron_mamba_cache.mcore.pausable_engine import ABORTED
from tests.mcore.engine_runs import EngineRun, cache_config, greedy, some_tokens, tiny_hybrid
from tests.mcore.graph_stand_ins import capture_without_cuda
from tests.mcore.overlapped_runs import RUNS, is_ahead, start, step_until_ahead

NUM_TOKENS = 40


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture on any machine."""
    capture_without_cuda(monkeypatch)


def scored(num_tokens: int = NUM_TOKENS) -> Any:
    return greedy(num_tokens, return_log_probs=True, skip_prompt_log_probs=True)


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_paused_engine_computes_nothing_and_then_continues_from_its_states(
    num_steps: int, settings: dict[str, Any]
) -> None:
    run = start(**settings)
    for _ in range(num_steps):
        run.step()
    for _ in range(2):  # a repeated call changes nothing
        run.engine.pause()
        assert run.engine.is_paused and not run.engine.has_unfinished_requests()
    run.add(3, some_tokens(30, seed=3), NUM_TOKENS)
    steps, prefilled = run.counters.steps, run.counters.prefill_tokens_computed
    for _ in range(3):
        assert run.step() == []
    assert run.counters.steps == steps and list(run.engine.waiting_request_ids) == [3]
    for _ in range(2):
        run.engine.resume_generation()
    run.finish()
    assert [len(run.tokens(request_id)) for request_id in range(4)] == [NUM_TOKENS] * 4
    assert run.counters.prefill_tokens_computed - prefilled == 30  # only those of the new request
    run.assert_exact()


def test_step_launched_before_a_pause_is_computed_when_pause_returns_and_lands_after_it() -> None:
    run = start()
    step_until_ahead(run)
    waited = run.context.overlapped_step
    run.engine.pause()
    assert run.context.overlapped_step is waited
    known = [len(run.engine.get_request(request_id).generated_tokens) for request_id in range(3)]
    run.engine.resume_generation()
    run.step()
    assert [len(run.engine.get_request(request_id).generated_tokens) for request_id in range(3)] == [
        count + 1 for count in known
    ]
    run.finish()
    run.assert_exact()


def test_request_that_cannot_run_is_reported_while_the_engine_is_paused() -> None:
    run = EngineRun.start(tiny_hybrid())
    run.engine.pause()
    run.add(0, some_tokens(9), greedy(100_000))
    assert run.step() == [0] and run.finished[0].status is Status.FAILED


def test_suspended_engine_stays_paused_after_resume() -> None:
    run = start()
    run.engine.pause()
    run.engine.suspend()
    run.engine.resume()
    assert run.engine.is_paused and run.step() == [] and not run.context.running_requests
    run.engine.resume_generation()
    run.finish()
    run.assert_exact()


@pytest.mark.parametrize("is_paused", [True, False], ids=["paused", "between steps"])
@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_aborted_requests_return_their_tokens_and_leave_the_others_alone(
    settings: dict[str, Any], is_paused: bool
) -> None:
    run = start(num_requests=1, **settings)
    run.add(1, some_tokens(25, seed=1), scored())
    run.add(2, some_tokens(26, seed=2), scored())
    for _ in range(6):
        run.step()
    run.add(3, some_tokens(70, seed=3), scored())  # never admitted
    entries = {request_id: run.engine.requests[request_id] for request_id in (1, 3)}
    if is_paused:
        run.engine.pause()
    first, unknown, waiting = run.engine.abort([1, 7, 3])
    run.context.check_integrity()
    assert unknown == waiting == ([], []) and run.engine.abort([1, 3]) == [([], []), ([], [])]
    assert 0 < len(first.tokens) == len(first.log_probs) < NUM_TOKENS
    for request_id, found in ((1, first), (3, waiting)):
        record = entries[request_id].future.result()
        assert getattr(record[0].sampling_params, ABORTED) and record[-1].status is Status.COMPLETED
        assert record.merge().generated_tokens == found.tokens
    run.engine.resume_generation()
    run.finish()
    assert run.tokens(2) and 1 not in run.finished
    run.assert_exact()
    run.add(4, some_tokens(25, seed=1), scored())  # the same request, not aborted
    run.finish()
    assert run.tokens(4)[: len(first.tokens)] == first.tokens
    assert list(run.finished[4].generated_log_probs)[: len(first.tokens)] == pytest.approx(first.log_probs, abs=1e-4)


def test_aborting_all_running_requests_frees_everything() -> None:
    run = start()
    step_until_ahead(run)
    assert all(tokens for tokens, _ in run.engine.abort(range(3)))
    assert not is_ahead(run) and not run.engine.has_unfinished_requests()
    run.assert_nothing_held()


def test_abort_includes_tokens_from_before_an_interruption() -> None:
    run = start()
    for _ in range(4):
        run.step()
    run.engine.suspend()
    before = [entry.record[0].generated_tokens for entry in run.engine.requests.values()]
    assert [tokens for tokens, _ in run.engine.abort([0])] == [before[0]]
    run.engine.resume()
    for _ in range(3):
        run.step()
    ((tokens, _),) = run.engine.abort([1])
    assert tokens[: len(before[1])] == before[1] and len(tokens) > len(before[1])
    run.finish()
    run.assert_exact()


def test_abort_during_a_step_raises_and_changes_nothing() -> None:
    run = start()

    async def step_and_abort() -> None:
        step = asyncio.ensure_future(run.engine.async_step())
        while not run.context.is_computing:
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="between steps"):
            run.engine.abort([0, 1])
        await step

    run.engine._loop.run_until_complete(step_and_abort())
    run.finish()
    assert [len(run.tokens(request_id)) for request_id in range(3)] == [NUM_TOKENS] * 3


def served(serve: Callable[[EngineRun], Any], **settings: Any) -> None:
    """Await `serve` while `run_engine` runs in the same loop."""

    async def run_both() -> None:
        subject = tiny_hybrid()
        run = EngineRun.start(subject, cache_config(subject.sizes, **settings))
        task = asyncio.ensure_future(run.engine.run_engine())
        await asyncio.sleep(0)
        await asyncio.wait_for(serve(run), 60)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(run_both())


def test_other_thread_pauses_and_aborts_between_the_steps_of_a_running_engine() -> None:
    async def serve(run: EngineRun) -> None:
        futures = [run.engine.add_request(number, some_tokens(30, seed=number), scored(300)) for number in range(2)]
        for number in range(10):  # calls that would raise during a step
            await asyncio.to_thread(run.engine.abort, [100 + number])
            await asyncio.to_thread(run.engine.pause)
            assert not run.context.is_computing
            steps = run.counters.steps
            await asyncio.sleep(0.002)
            assert run.counters.steps == steps
            await asyncio.to_thread(run.engine.resume_generation)
        await asyncio.to_thread(run.engine.pause)
        ((tokens, log_probs),) = await asyncio.to_thread(run.engine.abort, [0])
        assert (await futures[0]).merge().generated_tokens == tokens and len(log_probs) == len(tokens)
        run.engine.resume_generation()
        assert len((await futures[1]).merge().generated_tokens) == 300

    served(serve)


def test_coroutine_in_the_engines_loop_pauses_it_after_the_step_in_progress() -> None:
    async def serve(run: EngineRun) -> None:
        future = run.engine.add_request(0, some_tokens(30), scored())
        while not run.context.is_computing:
            await asyncio.sleep(0)
        run.engine.pause()
        while run.context.is_computing:
            await asyncio.sleep(0)
        steps = run.counters.steps
        await asyncio.sleep(0.01)
        assert run.counters.steps == steps and not is_ahead(run) and not future.done()
        run.engine.resume_generation()
        assert len((await future).merge().generated_tokens) == NUM_TOKENS

    served(serve)
