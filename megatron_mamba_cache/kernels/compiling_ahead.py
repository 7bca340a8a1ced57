"""Compile many of Triton's kernels at once, before they are launched.

Triton compiles a kernel when it is first launched, one after another. Its compiler leaves Python's lock while it works,
so that threads compile several. What is compiled depends on the arguments of launches: `compiling_ahead` lets a
computation go through its launches without launching anything.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import get_ident
from typing import Any

import torch
import triton
from triton.runtime import JITFunction

from .compilation import WATCH, CompilationWatch

_MOST_THREADS = 16


class LoadingExecutor(ThreadPoolExecutor):
    """Compiles kernels in threads, and loads each at once, for which some versions of Triton compile its launcher."""

    def submit(self, compile_kernel: Callable[[], Any], /) -> "Future[Any]":  # type: ignore[override]
        """Compile and load a kernel; the result is the kernel."""
        return super().submit(_compile_and_load, compile_kernel)


def _compile_and_load(compile_kernel: Callable[[], Any]) -> Any:
    kernel = compile_kernel()
    with suppress(Exception):  # the launch raises it again
        kernel.run  # noqa: B018 (loads it)
    return kernel


@contextmanager
def compiling_ahead(device: torch.device, watch: CompilationWatch = WATCH) -> Iterator[None]:
    """Let this thread's launches in the block compile their kernels and do nothing else; all are loaded at its end.

    What kernels would have written is undefined, so nothing that lasts may be computed from it. A kernel that does not
    compile is left to its first launch, which raises. Other threads launch as ever.
    """
    own_thread, run = get_ident(), JITFunction.run

    def run_or_compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup or get_ident() == own_thread, **options)

    set_device = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
    with (
        watch.compiling_ahead(),
        LoadingExecutor(num_threads(), "compiling", *set_device) as executor,
        triton.AsyncCompileMode(executor, ignore_errors=True),
    ):
        JITFunction.run = run_or_compile
        try:
            yield
        finally:
            JITFunction.run = run


def num_threads() -> int:
    """Return how many kernels are compiled at once: one for each core, shared with the processes of other GPUs."""
    num_cores = len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count())
    return min(max(num_cores, 2), _MOST_THREADS)
