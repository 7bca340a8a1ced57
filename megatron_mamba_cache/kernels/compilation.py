"""Count and log what Triton compiles in this process, and compile many kernels at once before they are launched.

Triton, Gluon included, compiles a kernel when it is first launched with arguments of some types, alignments and
constants, and calls hooks before and after, also for a kernel in its disk cache, which takes milliseconds. Its compiler
leaves Python's lock while it works, so that threads compile several kernels; `compiling_ahead` lets a computation go
through its launches without launching anything.
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
    """Compiled kernels, and the seconds during which any was compiled or loaded."""

    num_kernels: int = 0
    seconds: float = 0.0

    def since(self, earlier: "Compilations") -> "Compilations":
        """Return what was compiled after `earlier`."""
        return Compilations(self.num_kernels - earlier.num_kernels, self.seconds - earlier.seconds)


class CompilationWatch:
    """Count compilations through Triton's hooks, and call the hooks installed before."""

    def __init__(self) -> None:
        self.total = Compilations()  # since the hooks were installed
        self._lock = Lock()
        self._running: dict[Hashable, tuple[float, ProgressLine]] = {}
        self._thread = local()
        self._hooks: tuple[_Hook | None, _Hook | None] = (None, None)

    def install(self) -> None:
        """Install the hooks; if others have replaced them since, install them again in front."""
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
        """Count the kernels that other threads compile for this one, but not the time, which `add_seconds` adds."""
        self._thread.ahead = set()
        try:
            yield
        finally:
            self._thread.ahead = None

    def add_seconds(self, seconds: float) -> None:
        """Add the time that other threads took to compile."""
        with self._lock:
            self._add(0, seconds)

    @property
    def _ahead(self) -> set[Hashable] | None:
        """Kernels that other threads compile for this one; None if it compiles them itself."""
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
            for _, failed in self._running.values():  # no hook reports a failed compilation
                failed.end()
            line = ProgressLine(f"Triton compiles {name} at its first use, which it does once on a machine")
            self._running[identity] = time.perf_counter(), line

    def _end(self, identity: Hashable, *, is_launched: bool) -> None:
        now = time.perf_counter()
        with self._lock:
            if self._ahead is not None and identity in self._ahead:
                self._ahead.remove(identity)
                self._add(1, 0)
                return
            running = self._running.pop(identity, None)
            if running is None:  # hooks that were chained twice
                return
            began, line = running
            line.end()
            self._add(1, now - began)
        self._thread.compiled_at = now if is_launched else None

    def _note_load(self, *_: object) -> None:
        """Count the time until a kernel is loaded, during which some versions of Triton compile its launcher."""
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
"""The watch of this process; installed when a model is prepared for serving."""


_MOST_THREADS = 16


class LoadingExecutor(ThreadPoolExecutor):
    """Compile kernels in threads, and load each at once: some versions of Triton then compile its launcher."""

    def __init__(self, num_threads: int, device: torch.device) -> None:
        begin = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
        super().__init__(num_threads, "compiling", *begin)
        self._lock = Lock()
        self._futures: list[Future[Any]] = []
        self._num_busy, self._busy_since = 0, 0.0
        self.seconds = 0.0  # during which any kernel was compiled or loaded

    def submit(self, compile_kernel: Callable[[], Any], /) -> "Future[Any]":  # type: ignore[override]
        """Compile and load a kernel; the result is the kernel."""
        future = super().submit(self._compile_and_load, compile_kernel)
        self._futures.append(future)
        return future

    def abandon(self) -> None:
        """Cancel compilations that have not begun."""
        self.shutdown(wait=False, cancel_futures=True)
        for future in self._futures:
            if future.cancelled():
                future.set_running_or_notify_cancel()  # otherwise a waiting thread would wait for ever
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
                self.seconds += now - self._busy_since
            self._num_busy, self._busy_since = self._num_busy + more, now


class _Launches:
    """Turn the launches of some threads into compilations; several may begin and end in any order."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._threads: set[int] = set()
        self._run: Callable[..., Any] | None = None

    @contextmanager
    def only_compile(self) -> Iterator[None]:
        """Only compile the launches of this thread in the block."""
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
    """Compile the kernels of this thread's launches in the block without launching them, and load them at its end.

    Results of the launches are undefined, so nothing lasting and no index may be computed from them. A kernel that does
    not compile is left to its first launch, which raises. Other threads launch as usual. If the block raises,
    compilations that have not begun are cancelled.
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
    """Return how many kernels to compile at once: one for each core, shared with the processes of other GPUs."""
    num_processes = max(torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    return min(max(len(os.sched_getaffinity(0)) // num_processes, 2), _MOST_THREADS)
