"""`run_engine` serves a request at any time, from any thread, and sleeps without one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from megatron.core.inference.inference_request import Status

from tests.mcore.engine_runs import EngineRun, greedy, some_tokens, tiny_hybrid

TIMEOUT_S = 30
NUM_TOKENS = 5


@asynccontextmanager
async def running_engine() -> AsyncIterator[EngineRun]:
    """Run an engine that sleeps without a request."""
    run = EngineRun.start(tiny_hybrid())
    task = asyncio.ensure_future(run.engine.run_engine())
    for _ in range(5):
        await asyncio.sleep(0)
    yield run
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def add(run: EngineRun, request_id: int, **settings: Any) -> "asyncio.Future[Any]":
    prompt = some_tokens(20 + request_id)
    run.prompts[request_id] = prompt
    return run.engine.add_request(request_id, prompt, greedy(NUM_TOKENS, **settings))


async def note_end(run: EngineRun, future: "asyncio.Future[Any]") -> None:
    record = await asyncio.wait_for(future, TIMEOUT_S)
    run.finished[record.request_id] = record.merge()


def assert_served(run: EngineRun, count: int) -> None:
    assert [len(run.tokens(request_id)) for request_id in range(count)] == [NUM_TOKENS] * count
    run.assert_exact()


def test_request_added_while_the_engine_idles_is_served() -> None:
    async def serve() -> None:
        async with running_engine() as run:
            for request_id in range(2):  # the engine idles before each
                await note_end(run, add(run, request_id))
                await asyncio.sleep(0.01)
            assert_served(run, 2)

    asyncio.run(serve())


def test_requests_added_from_other_threads_are_served() -> None:
    async def serve() -> None:
        async with running_engine() as run:
            first = await asyncio.to_thread(add, run, 0)
            others = await asyncio.gather(*(asyncio.to_thread(add, run, request_id) for request_id in range(1, 6)))
            await asyncio.gather(*(note_end(run, future) for future in (first, *others)))
            assert_served(run, 6)

    asyncio.run(serve())


def test_request_refused_by_an_idle_engine_reports_the_reason() -> None:
    async def serve() -> None:
        async with running_engine() as run:
            await note_end(run, run.engine.add_request(0, some_tokens(9), greedy(100_000)))
            assert run.finished[0].status is Status.FAILED

    asyncio.run(serve())


def test_add_request_raises_in_the_calling_thread() -> None:
    async def serve() -> None:
        async with running_engine() as run:
            future = add(run, 0)
            with pytest.raises(ValueError, match="request id 0 is in use"):
                await asyncio.to_thread(add, run, 0)
            await note_end(run, future)
            assert_served(run, 1)

    asyncio.run(serve())


def test_requests_of_a_suspended_engine_are_served_after_resume() -> None:
    async def serve() -> None:
        async with running_engine() as run:
            run.engine.suspend()
            future = add(run, 0)
            await asyncio.sleep(0.05)
            assert not future.done()
            run.engine.resume()
            await note_end(run, future)
            assert_served(run, 1)

    asyncio.run(serve())


def test_engine_runs_in_one_event_loop_after_another() -> None:
    run = EngineRun.start(tiny_hybrid())

    async def serve(request_id: int) -> None:
        task = asyncio.ensure_future(run.engine.run_engine())
        await asyncio.sleep(0)
        await note_end(run, add(run, request_id))
        task.cancel()
        await task

    for request_id in range(2):
        asyncio.run(serve(request_id))
    assert_served(run, 2)


def generate(run: EngineRun) -> None:
    """Serve one request to its end from synchronous code."""
    run.prompts[0] = some_tokens(20)
    (record,) = run.engine.generate([run.prompts[0]], greedy(NUM_TOKENS))
    run.finished[0] = record.merge()


def step(run: EngineRun) -> None:
    """Step until a request has ended, from synchronous code."""
    future = add(run, 0)
    while run.engine.has_unfinished_requests():
        run.engine.step_modern()
    run.finished[0] = future.result().merge()


async def run_loop(run: EngineRun) -> None:
    """Serve one request by `run_engine`, added before its first turn."""
    task = asyncio.ensure_future(run.engine.run_engine())
    await note_end(run, add(run, 0))
    task.cancel()
    await task


async def step_in_loop(run: EngineRun) -> None:
    """Step in the loop until a request has ended."""
    future = add(run, 0)
    while run.engine.has_unfinished_requests():
        await run.engine.async_step()
    await note_end(run, future)


async def built_in_a_loop() -> EngineRun:
    return EngineRun.start(tiny_hybrid())


async def built_in_a_thread() -> EngineRun:
    return await asyncio.to_thread(EngineRun.start, tiny_hybrid())


async def in_a_loop(serve: Callable[[EngineRun], None], run: EngineRun) -> None:
    serve(run)


BUILDS: dict[str, Callable[[], EngineRun]] = {
    "outside": lambda: EngineRun.start(tiny_hybrid()),
    "in a loop that has ended": lambda: asyncio.run(built_in_a_loop()),
    "in a thread of a loop that has ended": lambda: asyncio.run(built_in_a_thread()),
}
USES: dict[str, Callable[[EngineRun], None]] = {
    "generate": generate,
    "steps": step,
    "generate inside a loop": lambda run: asyncio.run(in_a_loop(generate, run)),
    "steps inside a loop": lambda run: asyncio.run(in_a_loop(step, run)),
    "generate in a thread of a loop": lambda run: asyncio.run(asyncio.to_thread(generate, run)),
    "run_engine": lambda run: asyncio.run(run_loop(run)),
    "awaited steps": lambda run: asyncio.run(step_in_loop(run)),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("build", BUILDS)
def test_engine_works_with_or_without_a_running_event_loop(build: str, use: str) -> None:
    run = BUILDS[build]()
    USES[use](run)
    assert_served(run, 1)


def test_engine_built_in_a_running_event_loop_serves_requests_there() -> None:
    async def serve() -> None:
        for use in (generate, step):
            run = await built_in_a_loop()
            use(run)
            assert_served(run, 1)
            run = await built_in_a_loop()
            await asyncio.to_thread(use, run)
            assert_served(run, 1)
        for use_in_loop in (run_loop, step_in_loop):
            run = await built_in_a_loop()
            await use_in_loop(run)
            assert_served(run, 1)

    asyncio.run(serve())


def test_step_error_inside_a_running_event_loop_is_raised_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> None:
        raise RuntimeError("no room")

    async def serve() -> None:
        run = EngineRun.start(tiny_hybrid())
        monkeypatch.setattr(run.engine, "async_step", fail)
        with pytest.raises(RuntimeError, match=r"^no room$"):
            run.engine.step_modern()

    asyncio.run(serve())


def test_error_for_stepping_from_a_second_thread_names_the_remedy() -> None:
    async def serve() -> None:
        async with running_engine() as run:
            with pytest.raises(RuntimeError, match=r"run_engine\(\) steps .* wait for the future of add_request\(\)"):
                await asyncio.to_thread(run.engine.step_modern)
            await note_end(run, add(run, 0))
            assert_served(run, 1)

    asyncio.run(serve())
