"""Triton's compilations are counted and timed; the kernels are compiled for a GPU that is not present."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from megatron_mamba_cache.kernels import compilation
from megatron_mamba_cache.kernels.compilation import Compilations, CompilationWatch
from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from tests.kernels.kernel_stand_ins import compile_anew

pytestmark = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="compiles for a GPU that is not there")


def triton_kernel() -> triton.JITFunction:
    """Return a Triton kernel that has not been compiled before."""

    @triton.jit
    def add(x, NUMBER: tl.constexpr):
        tl.store(x, tl.load(x) + NUMBER)

    return add


def gluon_kernel() -> triton.JITFunction:
    """Return a Gluon kernel that has not been compiled before."""

    @gluon.jit
    def add(x, NUMBER: gl.constexpr):
        gl.store(x, gl.load(x) + NUMBER)

    return add


def broken_kernel() -> triton.JITFunction:
    """Return a kernel that fails to compile."""

    @triton.jit
    def add(x, NUMBER: tl.constexpr):
        tl.static_assert(NUMBER == 0, "refused")

    return add


def compile_kernel(kernel: triton.JITFunction, number: int = 1) -> object:
    return kernel.warmup(torch.zeros(16), NUMBER=number, grid=(1,))


@pytest.fixture(autouse=True)
def absent_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compile_anew(monkeypatch, tmp_path)


@pytest.fixture
def watch() -> CompilationWatch:
    """Return an installed `CompilationWatch`."""
    watch = CompilationWatch()
    watch.install()
    return watch


@pytest.mark.parametrize("make", [triton_kernel, gluon_kernel])
def test_compilation_of_each_kernel_variant_is_counted_once(
    make: Callable[[], triton.JITFunction], watch: CompilationWatch
) -> None:
    kernel, began = make(), time.perf_counter()
    assert watch.total == Compilations(0, 0.0)
    compile_kernel(kernel)
    first = watch.total
    assert first.num_kernels == 1 and 0 < first.seconds <= time.perf_counter() - began
    compile_kernel(kernel)
    assert watch.total == first
    compile_kernel(kernel, number=2)
    assert watch.total.since(first).num_kernels == 1


def test_existing_triton_compile_hooks_are_still_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **event: called.append("before"))
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **event: called.append("after"))
    watch = CompilationWatch()
    watch.install()
    compile_kernel(triton_kernel())
    assert called == ["before", "after"] and watch.total.num_kernels == 1


def test_compilation_prevented_by_a_hook_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **event: True)
    watch = CompilationWatch()
    watch.install()
    assert compile_kernel(triton_kernel()) is None
    assert watch.total == Compilations()


def test_installing_the_compile_watch_twice_counts_each_kernel_once(watch: CompilationWatch) -> None:
    watch.install()
    ours = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook
    called = []

    def before(**event: object) -> object:
        called.append("before")
        return ours[0](**event)

    def after(**event: object) -> object:
        called.append("after")
        return ours[1](**event)

    knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = before, after
    watch.install()
    compile_kernel(triton_kernel())
    assert called == ["before", "after"] and watch.total.num_kernels == 1


def test_compile_hooks_of_other_code_are_called_after_reinstalling_the_watch(watch: CompilationWatch) -> None:
    called = []
    knobs.runtime.jit_cache_hook = knobs.runtime.jit_post_compile_hook = lambda **event: called.append(1)
    compile_kernel(triton_kernel())
    assert watch.total.num_kernels == 0
    watch.install()
    compile_kernel(triton_kernel())
    assert watch.total.num_kernels == 1 and len(called) == 4


def test_failed_kernel_compilation_is_not_counted_or_logged_later(
    watch: CompilationWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[SpokenLine] = []
    monkeypatch.setattr(compilation, "ProgressLine", lambda message: lines.append(SpokenLine(message)) or lines[-1])
    with pytest.raises(Exception, match="refused"):
        compile_kernel(broken_kernel())
    assert watch.total == Compilations()
    compile_kernel(triton_kernel())
    assert watch.total.num_kernels == 1
    names = [maker.__name__ for maker in (broken_kernel, triton_kernel)]
    assert [line.message for line in lines] == [
        f"Triton compiles {name}.<locals>.add at its first use, once per machine" for name in names
    ]
    assert all(line.has_ended for line in lines)


class SpokenLine:
    """Stand-in for a progress line."""

    def __init__(self, message: str) -> None:
        self.message = message
        self.has_ended = False

    def end(self) -> None:
        """Count the calls."""
        self.has_ended = True


def event(*, is_manual_warmup: bool) -> dict[str, object]:
    """Return the arguments that Triton passes to its hooks."""
    return {"fn": SimpleNamespace(module="m", name="f"), "key": "k", "is_manual_warmup": is_manual_warmup}


@pytest.mark.parametrize("is_manual_warmup", [False, True])
def test_compilation_time_includes_loading_a_launched_kernel(is_manual_warmup: bool, watch: CompilationWatch) -> None:
    runtime = knobs.runtime
    runtime.jit_cache_hook(**event(is_manual_warmup=is_manual_warmup))
    runtime.jit_post_compile_hook(**event(is_manual_warmup=is_manual_warmup))
    compiled = watch.total
    time.sleep(0.02)
    for _ in range(2):  # the second time as for another device
        runtime.kernel_load_end_hook(None, None, "f", {}, "hash")
    loading = watch.total.since(compiled)
    assert loading.num_kernels == 0
    assert loading.seconds == 0 if is_manual_warmup else 0.02 <= loading.seconds < 10
