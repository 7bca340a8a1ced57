"""Fixtures of kernel tests."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from triton.runtime import driver

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from tests.kernels.kernel_stand_ins import AbsentHopper, CompiledInsteadOfLaunched


@pytest.fixture
def compile_for_hopper(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str], CompiledInsteadOfLaunched]:
    """Return a function that makes the launches of a module's kernel compile for an absent Hopper GPU instead."""
    if INTERPRETED:
        pytest.skip("interpreted kernels cannot be compiled")
    if torch.cuda.is_available():
        pytest.skip("compiled for the GPU at hand by the other tests")
    monkeypatch.setattr(driver, "_active", AbsentHopper())

    def stand_in(module: ModuleType, name: str) -> CompiledInsteadOfLaunched:
        kernel = CompiledInsteadOfLaunched(getattr(module, name))
        monkeypatch.setattr(module, name, kernel)
        monkeypatch.setattr(module, "launches_kernel", lambda tensor: True)
        return kernel

    return stand_in
