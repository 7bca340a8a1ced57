"""Kernels that store fp16 states compile for a Hopper GPU, once for all layers and with few spilled registers."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron_mamba_cache.recurrences.batches import ReplayBatch
from megatron_mamba_cache.recurrences.mamba2 import verify
from megatron_mamba_cache.recurrences.mamba2.replay import coefficients, outputs_mma, outputs_sums
from megatron_mamba_cache.recurrences.mamba2.replay.outputs import replay_tiled
from megatron_mamba_cache.recurrences.mamba2.replay.tiling import ReplayTiling
from megatron_mamba_cache.recurrences.stochastic_rounding import rounding_seed
from tests.kernels.kernel_stand_ins import CompiledInsteadOfLaunched
from tests.kernels.packed_batches import VerifySpec, pack_verify
from tests.kernels.replay_steps import int32, poisoned_ring
from tests.kernels.ssm_steps import SSMShape, random_steps
from tests.kernels.test_replay_compilation import SHAPE_8B, stack_bytes

Compile = Callable[[ModuleType, str], CompiledInsteadOfLaunched]
FP16 = torch.float16
KERNELS = {"sums": (outputs_sums, "_state_sums_kernel"), "mma": (outputs_mma, "_state_mma_kernel")}


def replay(shape: SSMShape, tokens: torch.dtype, pool: torch.dtype, kernel: str, layer: int = 0) -> None:
    """Launch a step of two requests that may have nine tokens."""
    steps, numbers = random_steps(2, "cpu", shape, dtype=tokens), int32([0, 1], "cpu")
    ring = poisoned_ring(2, 16, 9, shape, "cpu", (tokens, tokens))
    rows = ReplayBatch(int32([0, 1, 2], "cpu"), numbers, numbers, numbers * 16, numbers * 17, 9)
    states, tiling = (
        torch.empty(1, *shape.state, dtype=pool),
        ReplayTiling(kernel, 32, 1, 200 if kernel == "mma" else 255),
    )
    replay_tiled(steps.tokens, steps.weights, states, ring, rows, 16, tiling, seed=rounding_seed(pool, layer))


@pytest.mark.parametrize("kernel", KERNELS)
def test_replay_kernels_compile_once_for_the_fp16_states_of_all_layers(
    kernel: str, compile_for_hopper: Compile, tmp_path: Path
) -> None:
    compile_for_hopper(coefficients, "_coefficients_kernel")
    compiled = compile_for_hopper(*KERNELS[kernel])
    for layer in (0, 7, 14):
        replay(SHAPE_8B, torch.bfloat16, FP16, kernel, layer)
    assert len(compiled.compiled) == 1 and stack_bytes(compiled, tmp_path) <= 64


@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16, FP16])
def test_replay_by_sums_compiles_for_float32_tokens(pool: torch.dtype, compile_for_hopper: Compile) -> None:
    compile_for_hopper(coefficients, "_coefficients_kernel")
    compiled = compile_for_hopper(*KERNELS["sums"])
    replay(SSMShape(heads=4, head_dim=32, d_state=16, groups=2), torch.float32, pool, "sums")
    assert len(compiled.compiled) == 1


def test_window_kernel_with_fp16_states_spills_no_registers(compile_for_hopper: Compile, tmp_path: Path) -> None:
    compiled, steps = compile_for_hopper(verify, "_state_verify_kernel"), random_steps(1, "cpu", SHAPE_8B)
    for layer in (0, 7):
        pool = torch.empty(1, *SHAPE_8B.state, dtype=FP16)
        rows = pack_verify([VerifySpec(1, (0,))], "cpu")
        verify.state_verify(steps.tokens, steps.weights, pool, rows, seed=rounding_seed(FP16, layer))
    assert len(compiled.compiled) == 1 and stack_bytes(compiled, tmp_path) == 0
