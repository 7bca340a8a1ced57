"""Kernels for quantized weights compile for a Hopper GPU on a machine without one: without spills, and a few times."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton

from megatron_mamba_cache.kernels.experts import (
    coded_gemm_hopper,
    grouped_gemm_hopper,
    prompt_experts,
    prompt_gemm_hopper,
    quantized_experts,
    quantized_experts_hopper,
    quantized_pairs,
    quantized_sums,
)
from megatron_mamba_cache.kernels.experts.prompt_experts import grouped_prompt_gemm
from megatron_mamba_cache.kernels.experts.quantized_experts import quantized_grouped_gemm
from megatron_mamba_cache.kernels.experts.quantized_experts_hopper import (
    multiply_on_hopper as multiply_experts_on_hopper,
)
from megatron_mamba_cache.kernels.experts.quantized_pairs import quantized_pair_gemm
from megatron_mamba_cache.kernels.experts.quantized_sums import quantized_summed_gemm
from megatron_mamba_cache.kernels.experts.reference_experts import ExpertOrder
from megatron_mamba_cache.kernels.quantized import (
    activations,
    few_token_gemm,
    one_token_gemm,
    part_sums,
    prompt_gemm,
    split_token_hopper,
)
from megatron_mamba_cache.kernels.quantized import split_tokens as split_tokens_module
from megatron_mamba_cache.kernels.quantized.activations import (
    ActivationScheme,
    QuantizedActivations,
    quantize_activations,
)
from megatron_mamba_cache.kernels.quantized.few_token_gemm import multiply_few_tokens, num_counters
from megatron_mamba_cache.kernels.quantized.few_token_tiles import choose_hopper_tiles, choose_tiles, split_token_tiles
from megatron_mamba_cache.kernels.quantized.one_token_gemm import multiply_one_quantized_token
from megatron_mamba_cache.kernels.quantized.prompt_gemm import multiply_prompt_tokens
from megatron_mamba_cache.kernels.quantized.quantized_matrix import QuantizedForm, QuantizedMatrix
from megatron_mamba_cache.kernels.quantized.split_token_hopper import multiply_split_tokens
from megatron_mamba_cache.kernels.quantized.split_tokens import split_tokens
from tests.kernels.kernel_stand_ins import CompiledInsteadOfLaunched

Compile = Callable[[ModuleType, str], CompiledInsteadOfLaunched]
FORMS = {
    "FP8 rows": QuantizedForm(8, has_factors=True),
    "FP8 blocks": QuantizedForm(8, torch.float32, False, 128, 128),
    "NVFP4": QuantizedForm(4, torch.float8_e4m3fn, True, 1, 16),
}
COUNTS = (1, 2, 7, 16, 17, 32, 33, 64)
FEW_BYTES = 32
"""Of a thread, that a compiler may put in memory."""


MXFP4 = QuantizedForm(4, torch.float8_e8m0fnu, False, 1, 32)


def weight(form: str, *shape: int) -> QuantizedMatrix:
    return (MXFP4 if form == "MXFP4" else FORMS[form]).empty(shape, torch.device("cpu"))


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
    for count in COUNTS:
        multiply_few_tokens(torch.empty(count, 2048, dtype=torch.bfloat16), matrix, counters)
    assert len(kernel.compiled) == 3
    assert max(spilled_bytes(cubin, tmp_path) for cubin in kernel.cubins) <= FEW_BYTES
    for count, ptx in zip(COUNTS, kernel.ptx, strict=True):
        assert "wgmma.mma_async" in ptx
        widths = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, (0x\w+),", ptx)
        has_narrow = form == "NVFP4" or count <= 16  # its scales are few, and so are the tokens of a thread
        assert set(widths) - ({"0x8"} if has_narrow else set()) == {"0x10"}
        tiles = choose_tiles(matrix, count)
        bytes_of_thread = 2 * tiles.outputs * tiles.words // (32 * tiles.num_warps)
        assert widths.count("0x10") >= bytes_of_thread // 16 * tiles.num_stages  # one tile in flight a stage


@pytest.mark.parametrize("activation", ["none", "gated_silu"])
@pytest.mark.parametrize("form", ["FP8 rows", "FP8 blocks"])
def test_one_token_reads_codes_in_wide_loads_before_it_waits(
    form: str,
    activation: str,
    compile_for_hopper: Compile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = compile_for_hopper(one_token_gemm, "_one_quantized_token_kernel")
    monkeypatch.setattr(one_token_gemm, "overlapping", lambda device: {"OVERLAPS": True, "launch_pdl": True})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    multiply_one_quantized_token(torch.empty(1, 5120, dtype=torch.bfloat16), weight(form, 512, 5120), activation)
    assert spilled_bytes(kernel.cubins[0], tmp_path) == 0
    before, _, after = kernel.ptx[0].partition("griddepcontrol.wait")
    widths = re.findall(r"ld\.global\.(?:\w+::\w+\.)*(v\d\.)?b", before)
    assert widths.count("v4.") == 8 and not re.search(r"\b(?:st|atom|red)\.", before)
    assert "cvt.rn.f16x2.e4m3x2" in after


FEW_BYTES_OF_RESULTS = 48
"""Of a thread: offsets of results that wait in memory while a loop uses none of it."""
HOPPER_SHARED_BYTES = 227 * 1024
REGISTERS = 2**16
"""Of a multiprocessor."""


@pytest.mark.parametrize(
    ("counts", "outputs"), [((1, 2, 16), 128), ((17, 32), 128), ((17, 32), 256), ((33, 64), 128), ((33, 64), 256)]
)
@pytest.mark.parametrize("form", ["FP8 rows", "FP8 blocks"])
def test_split_tokens_compile_once_a_range_and_leave_registers_to_the_next_kernels(
    form: str, counts: tuple[int, ...], outputs: int, compile_for_hopper: Compile, tmp_path: Path
) -> None:
    multiplying = compile_for_hopper(split_token_hopper, "_split_tokens_hopper_kernel")
    splitting = compile_for_hopper(split_tokens_module, "_split_kernel")
    adding = compile_for_hopper(part_sums, "_add_parts_kernel")
    matrix = weight(form, 4096, 2048)
    for count in counts:
        x, out = torch.empty(count, 2048, dtype=torch.bfloat16), torch.empty(count, 4096, dtype=torch.bfloat16)
        tiles = split_token_tiles(16 if count <= 16 else 32 if count <= 32 else 64, outputs, 120, 120)
        multiply_split_tokens(split_tokens(x, tiles.tokens), matrix, out, tiles)
    for kernel in (multiplying, splitting, adding):
        most = FEW_BYTES if kernel is multiplying and counts[-1] == 64 else 0
        assert len(kernel.compiled) == 1 and spilled_bytes(kernel.cubins[0], tmp_path) <= most
    assert multiplying.shared_bytes[0] <= HOPPER_SHARED_BYTES
    ptx = multiplying.ptx[0]
    registers = int(re.search(r"\.maxnreg (\d+)", ptx)[1])
    assert registers * 12 * 32 + 32 * 4 * 32 <= REGISTERS and "cp.async.bulk.tensor.2d" in ptx
    steps = outputs // 128 * 4  # of 32 inputs
    assert len(re.findall(r"wgmma\.mma_async\.\S*\.e4m3\.e4m3", ptx)) == 2 * steps  # in each group
    assert "st.global.v4.b32" in ptx and "ld.global.cg.v" in adding.ptx[0]


@pytest.mark.parametrize("rows", [4096, 16384, 132 * 128])
def test_split_tokens_compile_if_programs_compute_whole_tiles_only(rows: int, compile_for_hopper: Compile) -> None:
    """The three weights have less than a tile, one tile, and one tile for each multiprocessor of an H200."""
    multiplying = compile_for_hopper(split_token_hopper, "_split_tokens_hopper_kernel")
    compile_for_hopper(split_tokens_module, "_split_kernel")
    adding = compile_for_hopper(part_sums, "_add_parts_kernel")
    matrix, x = weight("FP8 blocks", rows, 5120), torch.empty(8, 5120, dtype=torch.bfloat16)
    tiles = choose_hopper_tiles(matrix, len(x))
    multiply_split_tokens(split_tokens(x, tiles.tokens), matrix, torch.empty(8, rows, dtype=torch.bfloat16), tiles)
    assert len(multiplying.compiled) == 1
    assert len(adding.compiled) == (rows < 16384)


@pytest.mark.parametrize("form", ["FP8 rows", "FP8 blocks"])
def test_prompt_tokens_compile_once_for_any_number_of_them(
    form: str, compile_for_hopper: Compile, tmp_path: Path
) -> None:
    quantizing = compile_for_hopper(activations, "_quantize_kernel")
    multiplying = compile_for_hopper(prompt_gemm, "_prompt_gemm_kernel")
    matrix = weight(form, 4096, 2048)
    scheme = ActivationScheme(None if matrix.scales is None else 128)
    for count in (1, 2, 16, 129, 4096):
        x = quantize_activations(torch.empty(count, 2048, dtype=torch.bfloat16), scheme)
        multiply_prompt_tokens(x, matrix, out=torch.empty(count, 4096, dtype=torch.bfloat16))
    assert len(quantizing.compiled) == len(multiplying.compiled) == 1
    for count in (16, 129):
        quantize_activations(
            torch.empty(count, 2048, dtype=torch.bfloat16), scheme, torch.zeros(count, 8, dtype=torch.int32)
        )
    assert len(quantizing.compiled) == 2
    for cubin in (quantizing.cubins[0], quantizing.cubins[-1], multiplying.cubins[0]):
        assert spilled_bytes(cubin, tmp_path) == 0
    assert re.search(r"wgmma\.mma_async\.\S*\.e4m3\.e4m3", multiplying.ptx[0])
    assert "cvt.rn.satfinite.e4m3x2.f32" in quantizing.ptx[0]


@pytest.mark.parametrize("form", [*FORMS, "MXFP4"])
@pytest.mark.parametrize("is_first", [False, True])
def test_experts_on_hopper_compile_once_a_range_with_matmuls_that_overlap_decoding(
    form: str, is_first: bool, compile_for_hopper: Compile, tmp_path: Path
) -> None:
    kernel = compile_for_hopper(quantized_experts_hopper, "_quantized_experts_hopper_kernel")
    matrix = weight(form, 16, 512, 1024)
    for num_pairs in (8, 16, 128, 256):
        pairs, starts = torch.zeros(num_pairs, dtype=torch.int32), torch.zeros(17, dtype=torch.int32)
        order = ExpertOrder(pairs, pairs[:, None], starts)
        x = torch.empty(num_pairs // 8 if is_first else num_pairs, 1024, dtype=torch.bfloat16)
        multiply_experts_on_hopper(
            x,
            matrix,
            order,
            torch.empty(num_pairs, 256 if is_first else 512, dtype=torch.bfloat16),
            top_k=8 if is_first else None,
            activation="gated_silu" if is_first else "none",
            follows_first=not is_first,
        )
    assert len(kernel.compiled) == 3
    assert max(spilled_bytes(cubin, tmp_path) for cubin in kernel.cubins) <= FEW_BYTES_OF_RESULTS
    assert max(kernel.shared_bytes) <= HOPPER_SHARED_BYTES // 2 - 1024
    for ptx in kernel.ptx:
        waits = re.findall(r"wgmma\.wait_group\S* (\d);", ptx)
        assert waits == (["1", "0"] if form == "FP8 blocks" else ["0", "1", "0"])
        assert "cp.async.bulk.tensor.2d" in ptx
        assert ("cp.async.cg.shared.global" in ptx) == is_first
        of_scales = 0 if form != "NVFP4" else 4 if is_first else 16  # for each thread of four warps, or of one
        assert ptx.count("cp.async.ca.shared.global") == of_scales


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


@pytest.mark.parametrize("on_hopper", [True, False])
@pytest.mark.parametrize("form", ["FP8 rows", "FP8 blocks"])
@pytest.mark.parametrize("activation", ["none", "squared_relu", "gated_silu"])
def test_experts_of_prompts_compile_once_without_spills(
    form: str,
    activation: str,
    on_hopper: bool,
    compile_for_hopper: Compile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = (
        compile_for_hopper(prompt_gemm_hopper, "_prompt_gemm_kernel")
        if on_hopper
        else compile_for_hopper(prompt_experts, "_prompt_experts_kernel")
    )
    monkeypatch.setattr(prompt_experts, "launches_kernel", lambda tensor: True)
    monkeypatch.setattr(prompt_experts, "_takes_hopper_kernel", lambda *arguments: on_hopper)
    monkeypatch.setattr(prompt_gemm_hopper, "num_multiprocessors", lambda device: 132)
    matrix = weight(form, 4, 1024, 512)
    for num_pairs in (8, 64, 1024):
        pairs, starts = torch.zeros(num_pairs, dtype=torch.int32), torch.full((5,), num_pairs, dtype=torch.int32)
        order = ExpertOrder(pairs, pairs[:, None], starts)
        codes = torch.empty(num_pairs, 512, dtype=torch.float8_e4m3fn)
        groups = 1 if matrix.scales is None else 4
        x = QuantizedActivations(codes, torch.empty(groups, num_pairs), 512 // groups, num_pairs)
        grouped_prompt_gemm(x, matrix, order, activation, torch.bfloat16)
    assert len(kernel.compiled) == 1
    assert spilled_bytes(kernel.cubins[0], tmp_path) == 0
    assert max(kernel.shared_bytes) <= 227 * 1024
    assert re.search(r"wgmma\.mma_async\.\S*\.e4m3\.e4m3", kernel.ptx[0])


def test_experts_with_nvfp4_compile_once_for_any_number_of_rows(
    compile_for_hopper: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = compile_for_hopper(coded_gemm_hopper, "_coded_gemm_kernel")
    monkeypatch.setattr(quantized_experts, "launches_kernel", lambda tensor: True)
    monkeypatch.setattr(quantized_experts, "_takes_long_tiles", lambda *arguments: True)
    monkeypatch.setattr(grouped_gemm_hopper, "num_multiprocessors", lambda device: 132)
    matrix = weight("NVFP4", 4, 128, 128)
    for num_tokens in (256, 1024):
        pairs, starts = torch.zeros(num_tokens, dtype=torch.int32), torch.full((5,), num_tokens, dtype=torch.int32)
        x = torch.empty(num_tokens, 128, dtype=torch.bfloat16)
        quantized_grouped_gemm(x, matrix, ExpertOrder(pairs, pairs[:, None], starts), top_k=1, activation="gated_silu")
    assert len(kernel.compiled) == 1
    assert spilled_bytes(kernel.cubins[0], tmp_path) <= FEW_BYTES
    assert max(kernel.shared_bytes) <= 227 * 1024


@pytest.mark.parametrize("form", ["FP8 rows", "FP8 blocks"])
def test_experts_of_pairs_compile_without_spills_and_load_codes_in_wide_copies(
    form: str, compile_for_hopper: Compile, tmp_path: Path
) -> None:
    first = compile_for_hopper(quantized_pairs, "_quantized_pairs_kernel")
    second = compile_for_hopper(quantized_sums, "_quantized_sum_kernel")
    for count in (1, 2, 4):
        x, ids = torch.empty(count, 2048, dtype=torch.bfloat16), torch.zeros(count, 8, dtype=torch.int32)
        shared = {
            "shared_rows": torch.empty(count, 512, dtype=torch.bfloat16),
            "shared_weight": weight(form, 2048, 512),
        }
        quantized_pair_gemm(x, weight(form, 4, 1024, 2048), ids, weight(form, 1024, 2048), activation="gated_silu")
        inner = torch.empty(8 * count, 512, dtype=torch.bfloat16)
        quantized_summed_gemm(inner, weight(form, 4, 2048, 512), ids, torch.empty(count, 9), **shared)
    for kernel in (first, second):
        assert len(kernel.compiled) == 1
        assert spilled_bytes(kernel.cubins[0], tmp_path) == 0
        assert kernel.ptx[0].count("ld.global.v4.b32") >= 8
