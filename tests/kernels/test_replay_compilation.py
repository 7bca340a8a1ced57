"""The replay kernels compile for a Hopper GPU, in few variants and without register spills; no GPU is needed."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton

from megatron_mamba_cache.recurrences.batches import ReplayBatch
from megatron_mamba_cache.recurrences.gated_delta.replay import factors
from megatron_mamba_cache.recurrences.gated_delta.replay import outputs as delta_outputs
from megatron_mamba_cache.recurrences.gated_delta.replay import outputs_sums as delta_outputs_sums
from megatron_mamba_cache.recurrences.gated_delta.replay import tiling as delta_tiling
from megatron_mamba_cache.recurrences.gated_delta.replay.outputs import delta_replay
from megatron_mamba_cache.recurrences.mamba2.replay import coefficients, outputs, outputs_mma, outputs_sums
from megatron_mamba_cache.recurrences.mamba2.replay.outputs import replay_tiled
from megatron_mamba_cache.recurrences.mamba2.replay.tiling import PORTABLE, ReplayTiling
from megatron_mamba_cache.recurrences.replay import boundary_folds, fold_mma
from megatron_mamba_cache.recurrences.replay.boundary_folds import fold_portably
from megatron_mamba_cache.recurrences.replay.fold_mma import fold_by_mma
from megatron_mamba_cache.recurrences.replay.ring import BoundaryFolds
from megatron_mamba_cache.recurrences.replay.tiling import hopper_width
from tests.kernels import delta_steps
from tests.kernels.delta_steps import DeltaShape
from tests.kernels.kernel_stand_ins import CompiledInsteadOfLaunched
from tests.kernels.replay_steps import int32, layered, poisoned_ring
from tests.kernels.ssm_steps import SSMShape, random_steps

Compile = Callable[[ModuleType, str], CompiledInsteadOfLaunched]
SHAPE_8B = SSMShape(heads=128, head_dim=64, d_state=128, groups=8)
MODULES = {"portable": outputs, "sums": outputs_sums, "mma": outputs_mma}
KERNELS = {"portable": "_state_replay_kernel", "sums": "_state_sums_kernel", "mma": "_state_mma_kernel"}
FORMS = {
    ("sums", torch.float32): ReplayTiling("sums", 32, num_warps=1, max_registers=255),
    ("sums", torch.bfloat16): ReplayTiling("sums", 32, num_warps=1, max_registers=255),
    ("mma", torch.float32): ReplayTiling("mma", 32, num_warps=1, max_registers=128),
    ("mma", torch.bfloat16): ReplayTiling("mma", 32, num_warps=1, max_registers=168),
    ("portable", torch.float32): PORTABLE,
}
POOL_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
_MOST_SPILLED = 64  # bytes of stack per thread: a few registers of the fold


def replay(
    shape: SSMShape, pool_dtype: torch.dtype, tiling: ReplayTiling, num_rows: int = 2, max_tokens: int = 1
) -> None:
    """Launch a step in which each request has the maximum number of tokens."""
    ring_len = 16
    steps = random_steps(1, "cpu", shape, dtype=torch.bfloat16)
    num_tokens = num_rows * max_tokens
    steps = steps[[0] * num_tokens]
    ring = poisoned_ring(num_rows, ring_len, 8, shape, "cpu", (torch.bfloat16, torch.bfloat16))
    numbers = int32(list(range(num_rows)), "cpu")
    cu_tokens = int32([row * max_tokens for row in range(num_rows + 1)], "cpu")
    rows = ReplayBatch(cu_tokens, numbers, numbers, numbers * 16, numbers * 17, max_tokens)
    pool = torch.empty(1, *shape.state, dtype=pool_dtype)  # never accessed, as nothing is launched
    replay_tiled(steps.tokens, steps.weights, pool, ring, rows, ring_len, tiling, after_conv=True)


def replay_delta(
    shape: DeltaShape,
    pool_dtype: torch.dtype,
    tiling: delta_tiling.ReplayTiling,
    num_rows: int = 2,
    max_tokens: int = 1,
    ring_len: int = 16,
) -> None:
    """Launch a step of a Gated DeltaNet layer whose requests have as many tokens as they may have."""
    steps = delta_steps.random_steps(1, "cpu", shape, dtype=torch.bfloat16)[[0] * num_rows * max_tokens]
    ring = poisoned_ring(num_rows, ring_len, 8, shape.of_ring, "cpu", (torch.float32, torch.bfloat16))
    numbers = int32(list(range(num_rows)), "cpu")
    cu_tokens = int32([row * max_tokens for row in range(num_rows + 1)], "cpu")
    rows = ReplayBatch(cu_tokens, numbers, numbers, numbers * ring_len, numbers * (ring_len + 1), max_tokens)
    pool = torch.empty(1, *shape.state, dtype=pool_dtype)  # nothing is launched
    delta_replay(steps.tokens, steps.gates, pool, ring, rows, ring_len, tiling, after_conv=True)


def stack_bytes(kernel: CompiledInsteadOfLaunched, tmp_path: Path) -> int:
    """Return the stack size in bytes per thread of the last compiled kernel."""
    file = tmp_path / "kernel.cubin"
    file.write_bytes(kernel.cubins[-1])
    dump = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(file)], capture_output=True, text=True, check=True
    )
    return max(int(size) for size in re.findall(r"STACK:(\d+)", dump.stdout))


@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_state_replay_kernels_keep_states_in_registers(
    form: str, dtype: torch.dtype, compile_for_hopper: Compile, tmp_path: Path
) -> None:
    weighing = compile_for_hopper(coefficients, "_coefficients_kernel")
    kernel = compile_for_hopper(MODULES[form], KERNELS[form])
    replay(SHAPE_8B, dtype, FORMS[form, dtype], max_tokens=8)
    assert stack_bytes(kernel, tmp_path) <= _MOST_SPILLED and stack_bytes(weighing, tmp_path) == 0
    if form == "mma":
        assert "mma.sync.aligned.m16n8k16" in kernel.ptx[-1] and kernel.shared_bytes[-1] == 0
    if form == "sums":
        assert kernel.shared_bytes[-1] == 0
    if form != "portable":
        accesses = {4: "v4", 2: "v2"}[dtype.itemsize] if form == "mma" else "v4"
        num_bytes = {"v4": 16, "v2": 8}[accesses]
        num_loads = SHAPE_8B.d_state * 32 * dtype.itemsize // (32 * num_bytes)
        assert len(re.findall(rf"ld\.global\.(?:\w+::\w+\.)*{accesses}", kernel.ptx[-1])) >= num_loads


@pytest.mark.parametrize("form", ["sums", "mma"])
def test_state_replay_does_not_recompile_for_other_batches(form: str, compile_for_hopper: Compile) -> None:
    weighing = compile_for_hopper(coefficients, "_coefficients_kernel")
    kernel = compile_for_hopper(MODULES[form], KERNELS[form])
    shape = SSMShape(heads=4, head_dim=64, d_state=16, groups=2)
    tiling = ReplayTiling(form, 64, num_warps=1, max_registers=255)
    for num_rows, max_tokens in ((1, 1), (2, 4), (3, 2), (16, 8), (5, 5)):
        replay(shape, torch.float32, tiling, num_rows, max_tokens)
    assert len(kernel.compiled) == 1
    assert len(weighing.compiled) == 2  # one for a single token per request, one for up to eight


@pytest.mark.parametrize(
    ("head_dim", "d_state", "width"),
    [
        (64, 128, 32),
        (64, 64, 64),
        (80, 128, 16),
        (64, 256, 16),
        (48, 16, 16),
        (40, 128, None),
        (64, 96, None),
        (64, 8, None),
    ],
)
def test_state_replay_warps_process_heads_in_whole_tiles(head_dim: int, d_state: int, width: int | None) -> None:
    assert hopper_width(head_dim, d_state) == width


@pytest.mark.parametrize("form", FORMS)
def test_state_replay_kernels_launched_early_wait_for_their_inputs(
    form: tuple[str, torch.dtype], compile_for_hopper: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first kernel waits before it writes and before it lets the second start; the second waits for the first."""
    kernel_name, dtype = form
    module = MODULES[kernel_name]
    for each in (coefficients, module):
        monkeypatch.setattr(each, "overlapping", lambda device: {"OVERLAPS": True, "launch_pdl": True})
    weighing = compile_for_hopper(coefficients, "_coefficients_kernel")
    kernel = compile_for_hopper(module, KERNELS[kernel_name])
    replay(SSMShape(heads=4, head_dim=64, d_state=128, groups=2), dtype, FORMS[form])

    check_waits(weighing.ptx[-1], kernel.ptx[-1])


def check_waits(first: str, second: str) -> None:
    """Check the PTX of a step's two kernels."""
    before, after = first.split("griddepcontrol.wait")
    assert not re.search(r"\b(?:st|atom|red)\.global|griddepcontrol", before)
    assert "griddepcontrol.launch_dependents" in after
    assert second.index("griddepcontrol.launch_dependents") < second.index("griddepcontrol.wait")
    assert second.count("griddepcontrol.wait") == 2  # also for padding, as the next kernel waits only for this one


def fold_states(fold: Callable[..., None], pool_dtype: torch.dtype, *others: None) -> None:
    """Launch boundary folds for one, few and many requests."""
    ring = poisoned_ring(1, 16, 4, SHAPE_8B, "cpu", (torch.bfloat16, torch.bfloat16))
    for number in (1, 5, 300):
        folds = BoundaryFolds(*(int32([0] * number, "cpu") for _ in range(5)))
        pools, rings = layered(torch.empty(1, *SHAPE_8B.state, dtype=pool_dtype), ring)
        fold(pools, rings, folds, 16, *others)


@POOL_DTYPES
def test_boundary_state_kernel_moves_states_in_16_byte_accesses(
    dtype: torch.dtype, compile_for_hopper: Compile
) -> None:
    kernel = compile_for_hopper(boundary_folds, "_fold_boundaries_kernel")
    fold_states(fold_portably, dtype, None)
    (ptx,) = set(kernel.ptx)
    num_accesses = SHAPE_8B.d_state * boundary_folds.WIDTH * dtype.itemsize // (128 * 16)
    assert ptx.count("st.global.v4.b32") == num_accesses


@POOL_DTYPES
def test_tensor_core_boundary_state_kernel_keeps_states_in_registers(
    dtype: torch.dtype, compile_for_hopper: Compile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fold_mma, "num_multiprocessors", lambda device: 132)
    kernel = compile_for_hopper(fold_mma, "_fold_boundaries_kernel")
    fold_states(fold_by_mma, dtype)
    (ptx,) = set(kernel.ptx)
    assert "mma.sync.aligned.m16n8k16" in ptx and kernel.shared_bytes[-1] <= 4 and stack_bytes(kernel, tmp_path) == 0
    accesses = {4: "v4.b32", 2: "v2.b32"}[dtype.itemsize]
    assert ptx.count(f"st.global.{accesses}") == SHAPE_8B.d_state * 32 // (32 * 4)


SHAPE_QWEN = DeltaShape(key_heads=16, value_heads=48, key_dim=128, value_dim=128)


DELTA_TILINGS = pytest.mark.parametrize("tiling", [delta_tiling.PORTABLE, delta_tiling.SUMS], ids=["portable", "sums"])


def delta_kernel(compile_for_hopper: Compile, tiling: delta_tiling.ReplayTiling) -> CompiledInsteadOfLaunched:
    """Return the stand-in for a tiling's kernel of outputs."""
    portable = compile_for_hopper(delta_outputs, "_delta_replay_kernel")
    return portable if tiling.kernel == "portable" else compile_for_hopper(delta_outputs_sums, "_delta_sums_kernel")


@POOL_DTYPES
@DELTA_TILINGS
def test_delta_replay_kernels_keep_states_in_registers(
    tiling: delta_tiling.ReplayTiling, dtype: torch.dtype, compile_for_hopper: Compile, tmp_path: Path
) -> None:
    weighing = compile_for_hopper(factors, "_factors_kernel")
    kernel = delta_kernel(compile_for_hopper, tiling)
    replay_delta(SHAPE_QWEN, dtype, tiling, max_tokens=8)
    assert stack_bytes(kernel, tmp_path) == stack_bytes(weighing, tmp_path) == 0
    columns = 4 if tiling.kernel == "sums" else 16 // dtype.itemsize  # of an access
    accesses = "v4" if columns * dtype.itemsize == 16 else "v2"
    num_loads = 128 * tiling.width // (32 * tiling.num_warps * columns)
    assert len(re.findall(rf"ld\.global\.(?:\w+::\w+\.)*{accesses}", kernel.ptx[-1])) >= num_loads


@pytest.mark.parametrize(("key_dim", "ring_len"), [(128, 16), (64, 32), (64, 4), (16, 8)])
def test_delta_sums_kernel_moves_only_sums_between_lanes(
    key_dim: int, ring_len: int, compile_for_hopper: Compile, tmp_path: Path
) -> None:
    """Two sums over key_dim per token, of four columns per lane, each over four lanes; registers limit the programs."""
    compile_for_hopper(factors, "_factors_kernel")
    kernel = delta_kernel(compile_for_hopper, delta_tiling.SUMS)
    replay_delta(DeltaShape(2, 4, key_dim, 64), torch.float32, delta_tiling.SUMS, ring_len=ring_len)
    (ptx,) = kernel.ptx
    programs_by_registers = 65536 // (32 * delta_tiling.SUMS.max_registers)
    assert kernel.shared_bytes[0] * programs_by_registers <= 227 * 1024 and stack_bytes(kernel, tmp_path) == 0
    num_copies = 2  # of the code that finishes a token
    assert ptx.count("shfl.sync") == num_copies * 2 * 4 * 2
    assert not re.search(r"ld\.global\.(?:\w+::\w+\.)*b16", ptx)


@DELTA_TILINGS
def test_delta_replay_does_not_recompile_for_other_batches(
    tiling: delta_tiling.ReplayTiling, compile_for_hopper: Compile
) -> None:
    """One kernel for any number of tokens: another one might sum in another order."""
    weighing = compile_for_hopper(factors, "_factors_kernel")
    kernel = delta_kernel(compile_for_hopper, tiling)
    for num_rows, max_tokens in ((1, 1), (2, 4), (3, 2), (16, 8), (5, 5)):
        replay_delta(DeltaShape(2, 4, 16, 32), torch.float32, tiling, num_rows, max_tokens)
    assert len(kernel.compiled) == len(weighing.compiled) == 1


@DELTA_TILINGS
def test_delta_replay_kernels_launched_early_wait_for_their_inputs(
    tiling: delta_tiling.ReplayTiling, compile_for_hopper: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (factors, delta_outputs, delta_outputs_sums):
        monkeypatch.setattr(module, "overlapping", lambda device: {"OVERLAPS": True, "launch_pdl": True})
    weighing = compile_for_hopper(factors, "_factors_kernel")
    kernel = delta_kernel(compile_for_hopper, tiling)
    replay_delta(SHAPE_QWEN, torch.float32, tiling)
    check_waits(weighing.ptx[-1], kernel.ptx[-1])
