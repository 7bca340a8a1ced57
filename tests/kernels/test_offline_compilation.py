"""Kernels compile for a Hopper GPU on a machine without one, and move 16 bytes an access where they can.

The interpreter accepts programs that the compiler refuses.
"""

import re
from collections.abc import Callable

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from megatron_mamba_cache.kernels import align_copy as align_copy_module
from megatron_mamba_cache.kernels.align_copy import align_copy
from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from tests.kernels.align_steps import StepRow, device_rows

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="interpreted kernels cannot be compiled"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU at hand by the other tests"),
]


class AbsentHopper:
    """As much of a driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class CompiledInsteadOfLaunched:
    """Stand for a kernel; keep what each launch would run."""

    def __init__(self, kernel: object) -> None:
        self.kernel = kernel
        self.ptx: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_only(**arguments: object) -> None:
            compiled = self.kernel.warmup(grid=grid, **arguments)
            assert compiled.asm["cubin"]
            self.ptx.append(compiled.asm["ptx"])

        return compile_only


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> CompiledInsteadOfLaunched:
    kernel = CompiledInsteadOfLaunched(align_copy_module._align_copy_kernel)
    monkeypatch.setattr(align_copy_module, "_align_copy_kernel", kernel)
    monkeypatch.setattr(align_copy_module, "launches_kernel", lambda tensor: True)
    monkeypatch.setattr(driver, "_active", AbsentHopper())
    return kernel


def global_accesses(ptx: str) -> set[str]:
    """Return the widths of the loads and stores of global memory, as in `v2.b64`."""
    return set(re.findall(r"(?:ld|st)\.global\.(?:\w+::\w+\.)*((?:v\d\.)?b\d+)", ptx))


ROW_COUNTS = {"b32", "b64"}


@pytest.mark.parametrize(
    ("conv_dim", "ssm_shape", "dtype", "pool_accesses"),
    [
        (10240, (128, 128, 64), torch.bfloat16, {"v2.b64"}),
        (6144, (64, 128, 64), torch.float32, {"v2.b64"}),
        (63, (5, 5, 20), torch.bfloat16, {"b16", "b64"}),
        (1, (1, 1, 1), torch.bfloat16, {"b16"}),
    ],
)
def test_align_copy_compiles_with_wide_accesses(
    conv_dim: int,
    ssm_shape: tuple[int, int, int],
    dtype: torch.dtype,
    pool_accesses: set[str],
    compiled: CompiledInsteadOfLaunched,
) -> None:
    conv, ssm = torch.empty(2, 1, 6, conv_dim, dtype=dtype), torch.empty(2, 1, *ssm_shape, dtype=dtype)
    rows = device_rows([StepRow(28, 5, 4, 5, (0, 0, 0, 0, 0), 0)], "cpu")
    align_copy(conv, ssm, rows, 16, 3)
    (ptx,) = compiled.ptx
    assert global_accesses(ptx) == pool_accesses | ROW_COUNTS
