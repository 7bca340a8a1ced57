"""Compile many of Triton's kernels at once, before they are launched.

Triton compiles a kernel when it is first launched, one after another. Its compiler leaves Python's lock while it works,
so that threads compile several. What is compiled depends on the arguments of launches: `compiling_ahead` lets a
computation go through its launches without launching anything.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Lock, get_ident
from typing import Any

import torch
import triton
from triton.runtime import JITFunction, _async_compile

from .compilation import WATCH, CompilationWatch

_MOST_THREADS = 16


class LoadingExecutor(ThreadPoolExecutor):
    """Compiles kernels in threads, and loads each at once, for which some versions of Triton compile its launcher."""

    def __init__(self, num_threads: int, device: torch.device) -> None:
        begin = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
        super().__init__(num_threads, "compiling", *begin)
        self._lock = Lock()
        self._futures: list[Future[Any]] = []
        self._num_busy, self._busy_since, self._seconds = 0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """The time in which any kernel was being compiled or loaded."""
        return self._seconds

    def submit(self, compile_kernel: Callable[[], Any], /) -> "Future[Any]":  # type: ignore[override]
        """Compile and load a kernel; the result is the kernel."""
        future = super().submit(self._compile_and_load, compile_kernel)
        self._futures.append(future)
        return future

    def abandon(self) -> None:
        """Leave what has not begun to compile."""
        self.shutdown(wait=False, cancel_futures=True)
        for future in self._futures:
            if future.cancelled():
                future.set_running_or_notify_cancel()  # else who waits for it waits for ever
        self._futures.clear()

    def _compile_and_load(self, compile_kernel: Callable[[], Any]) -> Any:
        self._note_busy(1)
        try:
            kernel = compile_kernel()
            with suppress(Exception):  # the launch raises it again
                kernel.run  # noqa: B018 (loads it)
        finally:
            self._note_busy(-1)
        return kernel

    def _note_busy(self, more: int) -> None:
        now = time.perf_counter()
        with self._lock:
            if self._num_busy:
                self._seconds += now - self._busy_since
            self._num_busy, self._busy_since = self._num_busy + more, now


class _Launches:
    """Turns the launches of some threads into compilations. Several may begin and end in any order."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._threads: set[int] = set()
        self._run: Callable[..., Any] | None = None

    @contextmanager
    def only_compile(self) -> Iterator[None]:
        """Let launches of this thread in the block compile only."""
        with self._lock:
            if not self._threads:
                self._run, JITFunction.run = JITFunction.run, self._replacement(JITFunction.run)
            self._threads.add(get_ident())
        try:
            yield
        finally:
            with self._lock:
                self._threads.remove(get_ident())
                if not self._threads:
                    JITFunction.run = self._run

    def _replacement(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_or_compile(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            return run(kernel, *args, grid=grid, warmup=warmup or get_ident() in self._threads, **options)

        return run_or_compile


_LAUNCHES = _Launches()


@contextmanager
def compiling_ahead(device: torch.device, watch: CompilationWatch = WATCH) -> Iterator[None]:
    """Let this thread's launches in the block compile their kernels and do nothing else; all are loaded at its end.

    What kernels would have written is undefined, so nothing that lasts may be computed from it, and no index. A kernel
    that does not compile is left to its first launch, which raises. Other threads launch as ever. If the block raises,
    what has not begun to compile is left too.
    """
    executor, mode_before = LoadingExecutor(num_threads(), device), _async_compile.active_mode.get()

    @contextmanager
    def abandoning() -> Iterator[None]:
        try:
            yield
        except BaseException:
            executor.abandon()
            raise

    try:
        with (
            watch.compiling_ahead(),
            abandoning(),  # if the mode's wait is interrupted
            triton.AsyncCompileMode(executor, ignore_errors=True),
            abandoning(),
            _LAUNCHES.only_compile(),
        ):
            yield
    finally:
        executor.shutdown()
        _async_compile.active_mode.set(mode_before)  # Triton 3.6 and 3.7 leave theirs if their wait is interrupted
        watch.add_seconds(executor.seconds)


def num_threads() -> int:
    """Return how many kernels are compiled at once: one for each core, shared with the processes of other GPUs."""
    num_processes = max(torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    return min(max(len(os.sched_getaffinity(0)) // num_processes, 2), _MOST_THREADS)
