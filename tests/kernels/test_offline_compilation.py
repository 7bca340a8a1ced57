"""Kernels compile for a Hopper GPU on a machine without one, and move 16 bytes an access where they can.

The interpreter accepts programs that the compiler refuses.
"""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from megatron_mamba_cache.kernels import align_copy as align_copy_module
from megatron_mamba_cache.kernels import gated_norm, kv_append, slot_copies
from megatron_mamba_cache.kernels.align_copy import align_copy
from megatron_mamba_cache.kernels.gated_norm import gated_group_norm
from megatron_mamba_cache.kernels.kv_append import append_kv
from megatron_mamba_cache.kernels.slot_copies import copy_slots, zero_slots
from tests.kernels.align_steps import StepRow, device_rows
from tests.kernels.kernel_stand_ins import CompiledInsteadOfLaunched, global_accesses

Compile = Callable[[ModuleType, str], CompiledInsteadOfLaunched]
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
    compile_for_hopper: Compile,
) -> None:
    compiled = compile_for_hopper(align_copy_module, "_align_copy_kernel")
    conv, ssm = torch.empty(2, 1, 6, conv_dim, dtype=dtype), torch.empty(2, 1, *ssm_shape, dtype=dtype)
    rows = device_rows([StepRow(28, 5, 4, 5, (0, 0, 0, 0, 0), 0)], "cpu")
    align_copy(conv, ssm, rows, 16, 3)
    (ptx,) = compiled.ptx
    assert global_accesses(ptx) == pool_accesses | ROW_COUNTS


SLOT_SHAPES = pytest.mark.parametrize(
    ("conv_shape", "ssm_shape", "dtype", "accesses"),
    [
        ((6, 10240), (128, 128, 64), torch.bfloat16, {"v2.b64"}),
        ((3, 6144), (64, 128, 64), torch.float32, {"v2.b64"}),
        ((3, 21), (5, 5, 20), torch.bfloat16, {"b16", "b64"}),
    ],
)


@SLOT_SHAPES
@pytest.mark.parametrize("name", ["copy", "zero"])
def test_slot_copies_compile_with_wide_accesses(
    name: str,
    conv_shape: tuple[int, ...],
    ssm_shape: tuple[int, ...],
    dtype: torch.dtype,
    accesses: set[str],
    compile_for_hopper: Compile,
) -> None:
    compiled = compile_for_hopper(slot_copies, f"_{name}_slots_kernel")
    pools = [torch.empty(2, 2, *shape, dtype=dtype) for shape in (conv_shape, ssm_shape)]
    slots = torch.zeros(3, dtype=torch.int32)
    if name == "copy":
        copy_slots(pools, slots, slots + 1)
    else:
        zero_slots(pools, slots)
    (ptx,) = compiled.ptx
    assert global_accesses(ptx) == accesses | {"b32"}


@pytest.mark.parametrize(
    ("kv_heads", "dim", "dtype", "accesses"),
    [(8, 128, torch.bfloat16, {"v4.b32"}), (2, 128, torch.float32, {"v4.b32"}), (1, 1, torch.bfloat16, {"b16"})],
)
def test_kv_append_compiles_with_wide_accesses(
    kv_heads: int, dim: int, dtype: torch.dtype, accesses: set[str], compile_for_hopper: Compile
) -> None:
    compiled = compile_for_hopper(kv_append, "_append_kv_kernel")
    joint = torch.empty(5, kv_heads, 3 * dim, dtype=dtype)
    caches, places = torch.empty(2, 3, 4, kv_heads, dim, dtype=dtype), torch.zeros(5, dtype=torch.int32)
    append_kv(joint[:, :, dim : 2 * dim], joint[:, :, 2 * dim :], caches[0], caches[1], places, places)
    (ptx,) = compiled.ptx
    assert global_accesses(ptx) == accesses | {"b32"}


@pytest.mark.parametrize(("channels", "group_size"), [(8192, 1024), (4096, 512), (8192, 8192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gated_norm_compiles_with_wide_accesses(
    channels: int, group_size: int, dtype: torch.dtype, compile_for_hopper: Compile
) -> None:
    compiled = compile_for_hopper(gated_norm, "_gated_group_norm_kernel")
    rows = torch.empty(3, 2 * channels + 128, dtype=dtype)
    gated_group_norm(rows[:, :channels], rows[:, -channels:], torch.empty(channels, dtype=dtype), group_size, 1e-5)
    (ptx,) = compiled.ptx
    assert global_accesses(ptx) == {"v4.b32"}
