"""Fixtures for the kernel tests."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, groupby
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import driver, interpreter

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from tests.kernels.kernel_stand_ins import AbsentHopper, CompiledInsteadOfLaunched

_OPS = ("op", "ops")


@pytest.hookimpl(tryfirst=True)  # before tests marked slow are skipped
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the interpreter, mark cases of a test slow that have no pair of values that its others lack.

    Compiled kernels and references run with all combinations of parameters; the interpreter takes seconds for a case.
    """
    cases = [
        item
        for item in items
        if INTERPRETED and hasattr(item, "callspec") and not any(map(item.get_closest_marker, ("slow", "gpu")))
    ]
    for _, same in groupby(cases, key=lambda item: item.nodeid.partition("[")[0]):
        for item in _without_new_pairs(list(same)):
            item.add_marker(pytest.mark.slow)


def _without_new_pairs(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases that are left when the others have every pair of parameters' values with each op."""
    pairs = {case: set(_pairs(case.callspec.params)) for case in cases}  # type: ignore[attr-defined]
    missing = set[tuple[object, ...]]().union(*pairs.values())
    if not missing:
        return []
    left = list(cases)
    while missing:
        best = max(left, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        left.remove(best)
    return left


def _pairs(params: dict[str, object]) -> Iterator[tuple[object, ...]]:
    op = tuple(repr(params[name]) for name in _OPS if name in params)
    others = sorted((name, repr(value)) for name, value in params.items() if name not in _OPS)
    return ((op, *pair) for pair in combinations(others, 2))


@pytest.fixture(autouse=True, scope="session")
def interpreter_rounds_to_bf16() -> Iterator[None]:
    """Make interpreted kernels round fp32 to the nearest bf16 like compiled ones; Triton's interpreter truncates."""
    convert = interpreter._convert_float

    def convert_rounding(values: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(values, source, target, mode)
        bf16 = torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
        return bf16.view(torch.int16).numpy().view(np.uint16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert_rounding)
        yield


@pytest.fixture(autouse=True, scope="session")
def interpreter_repeats_no_work() -> Iterator[None]:
    """Skip redundant work in Triton's interpreter; results stay the same."""
    builder, patch_language = interpreter.interpreter_builder, interpreter._patch_lang

    @cache
    def patch_language_once(kernel: FunctionType) -> SimpleNamespace:
        """Keep Triton's language patched, because a process that interprets kernels compiles none."""
        patch_language(kernel)
        return SimpleNamespace(restore=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_language_once)
        # The interpreter repeats sums and products in int64 for an assertion that is only active with `debug`.
        assert not builder.options.debug
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture
def compile_for_hopper(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str], CompiledInsteadOfLaunched]:
    """Return a function that replaces launches of a kernel by compilations for a Hopper GPU."""
    if INTERPRETED:
        pytest.skip("interpreted kernels cannot be compiled")
    if torch.cuda.is_available():
        pytest.skip("compiled for the GPU at hand by the other tests")
    monkeypatch.setattr(driver, "_active", AbsentHopper())

    def stand_in(module: ModuleType, name: str) -> CompiledInsteadOfLaunched:
        kernel = CompiledInsteadOfLaunched(getattr(module, name))
        monkeypatch.setattr(module, name, kernel)
        monkeypatch.setattr(module, "launches_kernel", lambda tensor: True, raising=False)
        return kernel

    return stand_in
