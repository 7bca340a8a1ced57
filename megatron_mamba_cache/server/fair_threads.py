"""A thread pool that serves API keys round-robin, so that one key cannot block the others."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Found = TypeVar("_Found")


class FairThreads:
    """Thread pool that starts queued work round-robin over owners (API keys). The queue length is unlimited.

    Call all methods in the same event loop.
    """

    def __init__(self, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, "fair")
        self._num_free = num_threads
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # queued work by owner; the first owner is next

    async def run(self, owner: str, work: Callable[[], _Found]) -> _Found:
        """Run `work` in a thread; return its result or raise its error.

        Work that is cancelled while queued never starts. Work that is cancelled while running occupies its thread until
        it ends; its result is then discarded.
        """
        await self._turn(owner)
        loop = asyncio.get_running_loop()

        def is_over(_work: Future[_Found]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._pass_on)

        running = self._executor.submit(work)
        running.add_done_callback(is_over)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Cancel queued work and return; each thread ends after its current work."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, owner: str) -> None:
        """Wait until a thread is free, and reserve it for the owner."""
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Pass a thread to the next owner with queued work; if there is none, add it to the free threads."""
        while self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # moves the owner to the end of the order
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
