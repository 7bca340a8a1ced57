"""Stand-ins for a kernel: one counts launches, the other compiles for a GPU that is not present."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.knobs import HookChain
from triton.runtime import driver

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED


class CountedKernel:
    """Stand-in for a kernel that counts its launches."""

    def __init__(self, kernel: object) -> None:
        self.kernel = kernel
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        self.launches += 1
        return self.kernel[grid]


@contextmanager
def launches_expected(module: ModuleType, name: str, *, of_kernel: bool, device: str) -> Iterator[CountedKernel]:
    """Check that the kernel is launched if and only if `of_kernel` is True and it can run on `device`."""
    with pytest.MonkeyPatch.context() as patch:
        counted = CountedKernel(getattr(module, name))
        patch.setattr(module, name, counted)
        yield counted
    assert (counted.launches > 0) == (of_kernel and (device == "cuda" or INTERPRETED))


class AbsentHopper:
    """The part of a CUDA driver that Triton needs to compile."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_anew(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Context manager: let Triton compile for a Hopper GPU, without hooks and with an empty cache."""
    monkeypatch.setattr(driver, "_active", AbsentHopper())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(directory))
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    monkeypatch.setattr(knobs.runtime, "kernel_load_end_hook", HookChain())


class CompiledInsteadOfLaunched:
    """Stand-in for a kernel that compiles instead of launching, and records functions and hashes."""

    def __init__(self, kernel: object) -> None:
        self.kernel = kernel
        self.ptx: list[str] = []
        self.cubins: list[bytes] = []
        self.shared_bytes: list[int] = []
        self.compiled: set[str] = set()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_only(**arguments: object) -> None:
            compiled = self.kernel.warmup(grid=grid, **arguments)
            assert compiled.asm["cubin"]
            self.ptx.append(compiled.asm["ptx"])
            self.cubins.append(compiled.asm["cubin"])
            self.shared_bytes.append(compiled.metadata.shared)
            self.compiled.add(compiled.hash)

        return compile_only


def global_accesses(ptx: str, kind: str = "ld|st") -> set[str]:
    """Return the widths, such as `v2.b64`, of all global loads and stores in PTX."""
    return set(re.findall(rf"(?:{kind})\.global\.(?:\w+::\w+\.)*((?:v\d\.)?b\d+)", ptx))
