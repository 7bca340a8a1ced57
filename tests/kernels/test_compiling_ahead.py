"""Kernels are compiled in threads before their launch; here for a GPU that is not present."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import JITFunction

from megatron_mamba_cache.kernels import compilation
from megatron_mamba_cache.kernels.compilation import Compilations, CompilationWatch, compiling_ahead, num_threads
from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from tests.kernels.kernel_stand_ins import compile_anew

pytestmark = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="compiles for a GPU that is not there")
CPU = torch.device("cpu")


@triton.jit
def _add_kernel(x, NUMBER: tl.constexpr):
    tl.static_assert(NUMBER != 3, "refused")
    tl.store(x, tl.load(x) + NUMBER)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CompilationWatch:
    """Return an installed `CompilationWatch` with all counts 0."""
    compile_anew(monkeypatch, tmp_path)
    _add_kernel.device_caches.clear()
    watch = CompilationWatch()
    watch.install()
    return watch


def launch(number: int) -> Any:
    return _add_kernel[(1,)](torch.zeros(16), NUMBER=number)


def compile_only(number: int) -> Any:
    return _add_kernel.warmup(torch.zeros(16), NUMBER=number, grid=(1,))


def test_launches_while_compiling_ahead_compile_but_do_not_run(watch: CompilationWatch) -> None:
    began = time.perf_counter()
    with compiling_ahead(CPU, watch):
        for number in (1, 2, 1, 2):
            launch(number)  # would raise if launched, as there is no driver
    compiled = watch.total
    print(compiled)
    assert compiled.num_kernels == 2 and 0 < compiled.seconds <= time.perf_counter() - began
    assert "st.global" in compile_only(1).asm["ptx"]
    assert watch.total == compiled, "it was compiled again"
    compile_only(4)
    assert watch.total.since(compiled).num_kernels == 1


def test_compiling_ahead_skips_kernels_already_compiled(watch: CompilationWatch) -> None:
    compile_only(1)
    before = watch.total
    with compiling_ahead(CPU, watch):
        launch(1)
    assert watch.total.since(before) == Compilations()


def test_kernel_that_fails_to_compile_ahead_raises_when_launched(watch: CompilationWatch) -> None:
    with compiling_ahead(CPU, watch):
        launch(3)
        launch(1)
    assert watch.total.num_kernels == 1
    with pytest.raises(triton.CompilationError, match="refused"):
        compile_only(3).result()  # Triton 3.7 keeps the error and raises it at the launch
    compile_only(5)  # the watch then ends the log line of the failed compilation


def test_other_threads_launch_kernels_while_one_compiles_ahead(
    watch: CompilationWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, bool]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        calls.append((options["NUMBER"], warmup))

    monkeypatch.setattr(JITFunction, "run", run)
    with compiling_ahead(CPU, watch):
        launch(1)
        other = threading.Thread(target=launch, args=(2,))
        other.start()
        other.join()
    launch(4)
    assert calls == [(1, True), (2, False), (4, False)]


def test_threads_that_compile_ahead_may_finish_in_any_order(
    watch: CompilationWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, bool]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        calls.append((options["NUMBER"], warmup))

    monkeypatch.setattr(JITFunction, "run", run)
    begun, may_end = threading.Event(), threading.Event()

    def in_another_block() -> None:
        with compiling_ahead(CPU, watch):
            begun.set()
            may_end.wait(10)
            launch(4)
        launch(5)

    other = threading.Thread(target=in_another_block)
    with compiling_ahead(CPU, watch):
        other.start()
        begun.wait(10)
        launch(1)
    launch(2)
    may_end.set()
    other.join(10)
    launch(6)
    assert calls == [(1, True), (2, False), (4, True), (5, False), (6, False)] and JITFunction.run is run


class _SlowKernel:
    """Stand-in for a kernel that compiles slowly."""

    run = None


@pytest.mark.parametrize("where", ["block", "wait"])
def test_pending_kernel_compilations_are_dropped_after_an_error(
    where: str, watch: CompilationWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def compile_slowly(*_: Any, **__: Any) -> Any:
        begun.append(time.sleep(0.3))
        return _SlowKernel()

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(compilation, "num_threads", lambda: 1)
    monkeypatch.setattr(triton.compiler, "compile", compile_slowly)
    if where == "wait":
        monkeypatch.setattr(triton.runtime._async_compile, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt), compiling_ahead(CPU, watch):
        for number in range(10, 20):
            launch(number)
        if where == "block":
            raise KeyboardInterrupt
    monkeypatch.undo()
    print(f"{len(begun)} of 10 began to compile")
    assert len(begun) <= 2 and triton.runtime._async_compile.active_mode.get() is None


def test_compile_hooks_chained_twice_count_a_kernel_once(watch: CompilationWatch) -> None:
    ours = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **event: ours(**event)
    watch.install()
    with compiling_ahead(CPU, watch):
        launch(1)
        launch(2)
    assert watch.total.num_kernels == 2


def test_compilation_time_excludes_time_without_compilations(watch: CompilationWatch) -> None:
    with compiling_ahead(CPU, watch):
        time.sleep(0.5)
    assert watch.total == Compilations()


def test_compiling_ahead_raises_if_triton_already_compiles_async(watch: CompilationWatch) -> None:
    with ThreadPoolExecutor(1) as executor, triton.AsyncCompileMode(executor) as mode:
        with pytest.raises(RuntimeError, match="already active"), compiling_ahead(CPU, watch):
            raise AssertionError("the block began")
        assert triton.runtime._async_compile.active_mode.get() is mode


def test_kernel_launches_run_again_after_an_error_while_compiling_ahead(watch: CompilationWatch) -> None:
    run = JITFunction.run
    with pytest.raises(ZeroDivisionError), compiling_ahead(CPU, watch):
        assert JITFunction.run is not run
        raise ZeroDivisionError
    assert JITFunction.run is run and triton.runtime._async_compile.active_mode.get() is None


@pytest.mark.parametrize(
    ("num_cores", "num_gpus", "num_local", "expected"),
    [(1, 0, None, 2), (16, 1, None, 16), (192, 8, None, 16), (64, 8, None, 8), (64, 1, "8", 8)],
)
def test_number_of_compiler_threads_is_the_number_of_cores_per_gpu(
    num_cores: int, num_gpus: int, num_local: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if num_local:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", num_local)
    monkeypatch.setattr(compilation.os, "sched_getaffinity", lambda process: set(range(num_cores)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert num_threads() == expected
