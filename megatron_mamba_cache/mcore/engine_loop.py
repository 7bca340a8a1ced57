"""Event loop of an engine, which sleeps while there is no work and runs calls from other threads."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from megatron.core.utils import get_asyncio_loop

_Answer = TypeVar("_Answer")
_LOOK_EVERY_S = 1.0


class EngineLoop:
    """Event loop of a running `run_engine`. While it is not running, calls run in the caller's thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stepping = False
        self._has_news = asyncio.Event()
        self._between_steps: deque[Callable[[], None]] = deque()  # calls of other threads that wait for the step's end

    @property
    def current(self) -> asyncio.AbstractEventLoop:
        """Event loop for new futures: that of `run_engine`, else the caller's, else Megatron's shared loop."""
        return self._loop or get_asyncio_loop()

    def run(self, coroutine: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Run a coroutine from synchronous code until it completes, even inside a running loop.

        Raises:
            RuntimeError: If another thread steps the engine.
        """
        running_elsewhere = self._loop is not None and self._loop is not _running_loop() and self._loop.is_running()
        if running_elsewhere or self._is_stepping:
            coroutine.close()
            by = "run_engine()" if running_elsewhere else "another call"
            raise RuntimeError(
                f"{by} steps this engine in another thread; wait for the future of add_request() instead of stepping"
            )
        self._is_stepping = True
        try:
            return _run_here(coroutine) if _running_loop() is None else _run_in_thread(coroutine)
        finally:
            self._is_stepping = False

    @contextmanager
    def entered(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Context manager that makes calls run in `loop` while its body runs."""
        self._loop, self._has_news = loop, asyncio.Event()
        try:
            yield
        finally:
            self._loop = None
            self._make_calls()

    async def wait_until(self, has_work: Callable[[], bool]) -> None:
        """Wait between steps until `has_work` returns True; `call` and `wake` trigger a new check.

        Calls of `between_steps` run first.
        """
        self._make_calls()
        while not has_work():
            self._has_news.clear()
            await self._has_news.wait()
            self._make_calls()

    def wake(self) -> None:
        """Make the loop check for work; safe from any thread."""
        if (loop := self._loop) is not None:
            loop.call_soon_threadsafe(self._has_news.set)

    def call(self, act: Callable[[], _Answer]) -> _Answer:
        """Run `act` in the loop's thread between two callbacks, wake the loop, and return the result of `act`.

        Raises:
            RuntimeError: If the loop stops before it runs `act`.
        """
        loop = self._loop
        if loop is None:
            return act()
        if _running_loop() is not loop:
            return _Call(act).made_in(loop, loop.call_soon_threadsafe, self.wake)
        try:
            return act()
        finally:
            self._has_news.set()

    def between_steps(self, act: Callable[[], _Answer]) -> _Answer:
        """Run `act` like `call`, but from another thread only after the step in progress has ended."""
        loop = self._loop
        if loop is None or _running_loop() is loop:
            return self.call(act)

        def post(made: Callable[[], None]) -> None:
            self._between_steps.append(made)
            self.wake()

        return _Call(act).made_in(loop, post, self.wake)

    def _make_calls(self) -> None:
        while self._between_steps:
            self._between_steps.popleft()()


class _Call(Generic[_Answer]):
    """Function call that runs in the thread of an event loop."""

    def __init__(self, act: Callable[[], _Answer]) -> None:
        self._act = act
        self._answer: Future[_Answer] = Future()

    def made_in(
        self,
        loop: asyncio.AbstractEventLoop,
        post: Callable[[Callable[[], None]], object],
        on_done: Callable[[], None],
    ) -> _Answer:
        """Run the call in `loop`, to which `post` passes it; return its result, or raise its exception."""
        self._answer.add_done_callback(lambda _: on_done())
        post(self._make)
        while not wait([self._answer], timeout=_LOOK_EVERY_S).done:
            if not loop.is_running() and self._answer.cancel():
                raise RuntimeError(
                    "the event loop of run_engine() has stopped; call run_engine() again to add requests"
                )
        return self._answer.result()

    def _make(self) -> None:
        if not self._answer.set_running_or_notify_cancel():
            return
        try:
            self._answer.set_result(self._act())
        except BaseException as error:
            self._answer.set_exception(error)


def _run_here(coroutine: Coroutine[Any, Any, _Answer]) -> _Answer:
    loop = get_asyncio_loop()
    # Another engine may use the shared loop in another thread.
    return asyncio.run(coroutine) if loop.is_running() or loop.is_closed() else loop.run_until_complete(coroutine)


def _run_in_thread(coroutine: Coroutine[Any, Any, _Answer]) -> _Answer:
    """Run a coroutine in a new thread, because this thread's loop is running; both threads use the same CUDA device."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    with ThreadPoolExecutor(1) as thread:
        if device is not None:
            thread.submit(torch.cuda.set_device, device).result()
        return thread.submit(asyncio.run, coroutine).result()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
