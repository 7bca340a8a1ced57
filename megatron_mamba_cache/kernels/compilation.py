"""Count and log Triton compilations in this process, and compile kernels in parallel before their first launch.

Triton (and Gluon) compiles a kernel at its first launch for each combination of argument types, alignments and
constants. It calls hooks before and after, even if the kernel is in its disk cache and loads within milliseconds. The
compiler releases Python's GIL, so several threads can compile at the same time. `compiling_ahead` runs a computation
in which each launch is replaced by a compilation.
"""

import os
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock, get_ident, local
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime import JITFunction, _async_compile

from .progress import ProgressLine

_Hook = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Compilations:
    """Number of compiled kernels, and the seconds during which at least one was being compiled or loaded."""

    num_kernels: int = 0
    seconds: float = 0.0

    def since(self, earlier: "Compilations") -> "Compilations":
        """Return these totals minus the `earlier` totals."""
        return Compilations(self.num_kernels - earlier.num_kernels, self.seconds - earlier.seconds)


class CompilationWatch:
    """Counter of compilations: installs Triton hooks, which also call any hooks that were installed before."""

    def __init__(self) -> None:
        self.total = Compilations()  # since the hooks were installed
        self._lock = Lock()
        self._running: dict[Hashable, tuple[float, ProgressLine]] = {}
        self._thread = local()
        self._hooks: tuple[_Hook | None, _Hook | None] = (None, None)

    def install(self) -> None:
        """Install the hooks; if other code has replaced them since, chain to its hooks."""
        runtime = knobs.runtime
        before, after = self._hooks
        if before is None or runtime.jit_cache_hook is not before:
            before = runtime.jit_cache_hook = self._before(runtime.jit_cache_hook)
        if after is None or runtime.jit_post_compile_hook is not after:
            after = runtime.jit_post_compile_hook = self._after(runtime.jit_post_compile_hook)
        self._hooks = before, after
        runtime.kernel_load_end_hook.add(self._note_load)

    @contextmanager
    def compiling_ahead(self) -> Iterator[None]:
        """Context manager that counts kernels that other threads compile for this one; `add_seconds` adds the time."""
        self._thread.ahead = set()
        try:
            yield
        finally:
            self._thread.ahead = None

    def add_seconds(self, seconds: float) -> None:
        """Add the time that other threads spent on compilation."""
        with self._lock:
            self._add(0, seconds)

    @property
    def _ahead(self) -> set[Hashable] | None:
        """Kernels that other threads compile for this thread; None outside of `compiling_ahead`."""
        ahead: set[Hashable] | None = getattr(self._thread, "ahead", None)
        return ahead

    def _before(self, previous: _Hook | None) -> _Hook:
        def hook(**event: Any) -> Any:
            is_refused = previous(**event) if previous is not None else None
            if not is_refused and self._ahead is not None:
                self._ahead.add(_identity(event))
            elif not is_refused:
                self._begin(_identity(event), event["fn"].name)
            return is_refused

        return hook

    def _after(self, previous: _Hook | None) -> _Hook:
        def hook(**event: Any) -> Any:
            self._end(_identity(event), is_launched=not event["is_manual_warmup"])
            return previous(**event) if previous is not None else None

        return hook

    def _begin(self, identity: Hashable, name: str) -> None:
        self._thread.compiled_at = None
        with self._lock:
            for _, failed in self._running.values():  # Triton calls no hook for a failed compilation
                failed.end()
            line = ProgressLine(f"Triton compiles {name} at its first use, once per machine")
            self._running[identity] = time.perf_counter(), line

    def _end(self, identity: Hashable, *, is_launched: bool) -> None:
        now = time.perf_counter()
        with self._lock:
            if self._ahead is not None and identity in self._ahead:
                self._ahead.remove(identity)
                self._add(1, 0)
                return
            running = self._running.pop(identity, None)
            if running is None:  # already counted: the hooks were chained twice
                return
            began, line = running
            line.end()
            self._add(1, now - began)
        self._thread.compiled_at = now if is_launched else None

    def _note_load(self, *_: object) -> None:
        """Add the time between compilation and loading, in which some Triton versions compile the launcher."""
        compiled_at = getattr(self._thread, "compiled_at", None)
        self._thread.compiled_at = None
        if compiled_at is not None:
            with self._lock:
                self._add(0, time.perf_counter() - compiled_at)

    def _add(self, num_kernels: int, seconds: float) -> None:
        self.total = Compilations(self.total.num_kernels + num_kernels, self.total.seconds + seconds)


def _identity(event: dict[str, Any]) -> Hashable:
    return event["fn"].module, event["fn"].name, event["key"]


WATCH = CompilationWatch()
"""The counter for this process; installed when a model is prepared for serving."""


_MOST_THREADS = 16


class LoadingExecutor(ThreadPoolExecutor):
    """Thread pool that compiles kernels and loads each immediately, because loading may compile its launcher."""

    def __init__(self, num_threads: int, device: torch.device) -> None:
        begin = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
        super().__init__(num_threads, "compiling", *begin)
        self._lock = Lock()
        self._futures: list[Future[Any]] = []
        self._num_busy, self._busy_since = 0, 0.0
        self.seconds = 0.0  # time during which at least one kernel was being compiled or loaded

    def submit(self, compile_kernel: Callable[[], Any], /) -> "Future[Any]":  # type: ignore[override]
        """Compile and load a kernel in a thread; the future's result is the kernel."""
        future = super().submit(self._compile_and_load, compile_kernel)
        self._futures.append(future)
        return future

    def abandon(self) -> None:
        """Cancel the compilations that have not started."""
        self.shutdown(wait=False, cancel_futures=True)
        for future in self._futures:
            if future.cancelled():
                future.set_running_or_notify_cancel()  # otherwise, threads that wait for it never wake up
        self._futures.clear()

    def _compile_and_load(self, compile_kernel: Callable[[], Any]) -> Any:
        self._note_busy(1)
        try:
            kernel = compile_kernel()
            with suppress(Exception):  # the first launch raises the same error
                kernel.run  # noqa: B018 (loads it)
        finally:
            self._note_busy(-1)
        return kernel

    def _note_busy(self, more: int) -> None:
        now = time.perf_counter()
        with self._lock:
            if self._num_busy:
                self.seconds += now - self._busy_since
            self._num_busy, self._busy_since = self._num_busy + more, now


class _Launches:
    """Patch for Triton that turns the kernel launches of some threads into compilations; see `only_compile`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._threads: set[int] = set()
        self._run: Callable[..., Any] | None = None

    @contextmanager
    def only_compile(self) -> Iterator[None]:
        """Context manager in which this thread's kernel launches compile kernels instead of running them."""
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
    """Context manager in which this thread's kernel launches compile kernels in parallel instead of running them.

    All kernels are loaded when the context exits. Their outputs stay undefined, so the code in the context must not
    compute indices or persistent state from them. If a kernel fails to compile, its first real launch raises the error.
    Launches in other threads are not affected. If the code in the context raises, compilations that have not started
    are cancelled.
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
            abandoning(),  # cancels if the wait on exit from `AsyncCompileMode` is interrupted
            triton.AsyncCompileMode(executor, ignore_errors=True),
            abandoning(),
            _LAUNCHES.only_compile(),
        ):
            yield
    finally:
        executor.shutdown()
        _async_compile.active_mode.set(mode_before)  # Triton 3.6 and 3.7 do not reset it if their wait is interrupted
        watch.add_seconds(executor.seconds)


def num_threads() -> int:
    """Return the number of compiler threads, 2 to 16: the CPU cores divided by the number of GPU processes."""
    num_processes = max(torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    return min(max(len(os.sched_getaffinity(0)) // num_processes, 2), _MOST_THREADS)
