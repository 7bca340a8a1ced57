"""Kernels for quantized weights compile for a Hopper GPU on a machine without one: without spills, and a few times."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton

from megatron_mamba_cache.kernels.experts import quantized_experts
from megatron_mamba_cache.kernels.experts.quantized_experts import quantized_grouped_gemm
from megatron_mamba_cache.kernels.experts.reference_experts import ExpertOrder
from megatron_mamba_cache.kernels.quantized import few_token_gemm
from megatron_mamba_cache.kernels.quantized.few_token_gemm import multiply_few_tokens, num_counters
from megatron_mamba_cache.kernels.quantized.quantized_matrix import QuantizedForm, QuantizedMatrix
from tests.kernels.kernel_stand_ins import CompiledInsteadOfLaunched

Compile = Callable[[ModuleType, str], CompiledInsteadOfLaunched]
FORMS = {
    "FP8 rows": QuantizedForm(8, has_factors=True),
    "FP8 blocks": QuantizedForm(8, torch.float32, False, 128, 128),
    "NVFP4": QuantizedForm(4, torch.float8_e4m3fn, True, 1, 16),
}
FEW_BYTES = 32
"""Of a thread, that a compiler may put in memory."""


def weight(form: str, *shape: int) -> QuantizedMatrix:
    return FORMS[form].empty(shape, torch.device("cpu"))


def spilled_bytes(cubin: bytes, directory: Path) -> int:
    """Return how many bytes of each thread a kernel keeps in memory."""
    file = directory / "kernel.cubin"
    file.write_bytes(cubin)
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", found)[1])


@pytest.mark.parametrize("form", FORMS)
def test_few_tokens_compile_once_a_range_and_read_codes_in_wide_copies(
    form: str, compile_for_hopper: Compile, tmp_path: Path
) -> None:
    kernel = compile_for_hopper(few_token_gemm, "_few_tokens_kernel")
    matrix = weight(form, 4096, 2048)
    counters = torch.zeros(num_counters(matrix), dtype=torch.int32)
    for count in (1, 2, 7, 16, 17, 32, 33, 64):
        multiply_few_tokens(torch.empty(count, 2048, dtype=torch.bfloat16), matrix, counters)
    assert len(kernel.compiled) == 3
    assert max(spilled_bytes(cubin, tmp_path) for cubin in kernel.cubins) <= FEW_BYTES
    for ptx in kernel.ptx:
        assert "wgmma.mma_async" in ptx
        widths = set(re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, (0x\w+),", ptx))
        assert widths - ({"0x8"} if form == "NVFP4" else set()) == {"0x10"}  # its scales are few


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ["none", "gated_silu"])
def test_experts_compile_without_spills_whatever_tokens_choose(
    form: str, activation: str, compile_for_hopper: Compile, tmp_path: Path
) -> None:
    kernel = compile_for_hopper(quantized_experts, "_quantized_experts_kernel")
    matrix = weight(form, 4, 1024, 512)
    for num_pairs in (8, 16, 64):
        pairs, starts = torch.zeros(num_pairs, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
        order = ExpertOrder(pairs, pairs[:, None], starts)
        x = torch.empty(num_pairs // 8, 512, dtype=torch.bfloat16)
        quantized_grouped_gemm(x, matrix, order, top_k=8, activation=activation)
    assert len(kernel.compiled) == 1
    assert spilled_bytes(kernel.cubins[0], tmp_path) == 0
