"""Kernels are compiled in threads before they are launched. They are real ones, for a GPU that is not there."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.knobs import HookChain
from triton.runtime import JITFunction, driver

from megatron_mamba_cache.kernels import compiling_ahead as ahead
from megatron_mamba_cache.kernels.compilation import Compilations, CompilationWatch
from megatron_mamba_cache.kernels.compiling_ahead import compiling_ahead, num_threads
from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from tests.kernels.kernel_stand_ins import AbsentHopper

pytestmark = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="compiles for a GPU that is not there")
CPU = torch.device("cpu")


@triton.jit
def _add_kernel(x, NUMBER: tl.constexpr):
    tl.static_assert(NUMBER != 3, "refused")
    tl.store(x, tl.load(x) + NUMBER)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CompilationWatch:
    """Compile for a Hopper GPU, without other hooks and without what was compiled before."""
    monkeypatch.setattr(driver, "_active", AbsentHopper())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    monkeypatch.setattr(knobs.runtime, "kernel_load_end_hook", HookChain())
    _add_kernel.device_caches.clear()
    watch = CompilationWatch()
    watch.install()
    return watch


def launch(number: int) -> Any:
    return _add_kernel[(1,)](torch.zeros(16), NUMBER=number)


def compile_only(number: int) -> Any:
    return _add_kernel.warmup(torch.zeros(16), NUMBER=number, grid=(1,))


def test_launches_compile_and_do_nothing_else(watch: CompilationWatch) -> None:
    began = time.perf_counter()
    with compiling_ahead(CPU, watch):
        for number in (1, 2, 1, 2):
            launch(number)  # no driver could launch it
    compiled = watch.total
    print(compiled)
    assert compiled.num_kernels == 2 and 0 < compiled.seconds <= time.perf_counter() - began
    assert "st.global" in compile_only(1).asm["ptx"]
    assert watch.total == compiled, "it was compiled again"
    compile_only(4)
    assert watch.total.since(compiled).num_kernels == 1


def test_what_is_compiled_already_takes_no_time(watch: CompilationWatch) -> None:
    compile_only(1)
    before = watch.total
    with compiling_ahead(CPU, watch):
        launch(1)
    assert watch.total.since(before) == Compilations()


def test_a_kernel_that_does_not_compile_is_left_to_its_launch(watch: CompilationWatch) -> None:
    with compiling_ahead(CPU, watch):
        launch(3)
        launch(1)
    assert watch.total.num_kernels == 1
    with pytest.raises(triton.CompilationError, match="refused"):
        compile_only(3).result()  # Triton 3.7 has kept what failed, and raises when it is to be launched


def test_other_threads_launch_as_ever(watch: CompilationWatch, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_launches_launch_again_after_a_fault(watch: CompilationWatch) -> None:
    run = JITFunction.run
    with pytest.raises(ZeroDivisionError), compiling_ahead(CPU, watch):
        assert JITFunction.run is not run
        raise ZeroDivisionError
    assert JITFunction.run is run and triton.runtime._async_compile.active_mode.get() is None


@pytest.mark.parametrize(("num_cores", "num_gpus", "expected"), [(1, 0, 2), (16, 1, 16), (192, 8, 16), (64, 8, 8)])
def test_threads_are_as_many_as_cores_of_a_gpu(
    num_cores: int, num_gpus: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda process: set(range(num_cores)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert num_threads() == expected
