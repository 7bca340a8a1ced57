"""Kernels compile for a Hopper GPU, once for all batch sizes, with 16-byte accesses where possible.

No GPU is needed. These tests find errors that Triton's interpreter accepts.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import ModuleType

import pytest
import torch

from megatron_mamba_cache.kernels.attention import attention_inputs, kv_append, output_gate, split_prompts
from megatron_mamba_cache.kernels.attention.attention_inputs import write_attention_inputs
from megatron_mamba_cache.kernels.attention.head_changes import HeadChanges, HeadNorms, Rotation
from megatron_mamba_cache.kernels.attention.kv_append import append_kv
from megatron_mamba_cache.kernels.attention.kv_values import FP8, KVScales
from megatron_mamba_cache.kernels.attention.output_gate import gate_output
from megatron_mamba_cache.kernels.attention.split_prompts import merge_parts
from megatron_mamba_cache.kernels.norm import gated_norm, norm_and_gate
from megatron_mamba_cache.kernels.norm.gated_norm import gated_group_norm
from megatron_mamba_cache.kernels.sampling import greedy_draws, sampling, token_cuts, verification
from megatron_mamba_cache.kernels.sampling.greedy_draws import greedy_tokens
from megatron_mamba_cache.kernels.sampling.row_tiles import SamplingRows
from megatron_mamba_cache.kernels.sampling.sampling import sample_by_kernels
from megatron_mamba_cache.kernels.sampling.verification import VerifyLogits, accept_matching
from megatron_mamba_cache.recurrences import align_copy as align_copy_module
from megatron_mamba_cache.recurrences import quantized_states, slot_copies
from megatron_mamba_cache.recurrences.conv import conv as causal_conv_module
from megatron_mamba_cache.recurrences.conv import verify as conv_verify_module
from megatron_mamba_cache.recurrences.conv.conv import causal_conv
from megatron_mamba_cache.recurrences.conv.verify import conv_verify
from megatron_mamba_cache.recurrences.draft_inputs import DraftInputs
from megatron_mamba_cache.recurrences.gated_delta import scan_hopper as delta_scan_hopper
from megatron_mamba_cache.recurrences.gated_delta import scan_portable as delta_scan_portable
from megatron_mamba_cache.recurrences.gated_delta import tile_systems, tile_systems_hopper
from megatron_mamba_cache.recurrences.gated_delta import verify as delta_verify_module
from megatron_mamba_cache.recurrences.gated_delta.scan import scan_tiles as scan_delta_tiles
from megatron_mamba_cache.recurrences.gated_delta.scan_hopper import scan_on_hopper
from megatron_mamba_cache.recurrences.gated_delta.tile_systems_hopper import solve_tiles_on_hopper
from megatron_mamba_cache.recurrences.gated_delta.verify import delta_verify
from megatron_mamba_cache.recurrences.mamba2 import scan as scan_module
from megatron_mamba_cache.recurrences.mamba2 import scan_hopper, scan_portable
from megatron_mamba_cache.recurrences.mamba2 import tiles as tiles_module
from megatron_mamba_cache.recurrences.mamba2 import verify as state_verify_module
from megatron_mamba_cache.recurrences.mamba2.scan import choose_tiling, scan_tiles, ssd_scan
from megatron_mamba_cache.recurrences.mamba2.tiles import HopperTiling
from megatron_mamba_cache.recurrences.mamba2.verify import state_verify
from megatron_mamba_cache.recurrences.quantized_states import restore_states
from megatron_mamba_cache.recurrences.request_tiles import tile_shape
from megatron_mamba_cache.recurrences.slot_copies import copy_slots
from tests.kernels import delta_steps
from tests.kernels.align_steps import StepRequest, device_batch, quantizing, within_pools
from tests.kernels.delta_steps import DeltaShape
from tests.kernels.kernel_stand_ins import CompiledInsteadOfLaunched, global_accesses
from tests.kernels.packed_batches import RowSpec, VerifySpec, pack_rows, pack_verify
from tests.kernels.quantized_values import patterned
from tests.kernels.split_windows import cut_window
from tests.kernels.ssm_steps import SSMShape, random_steps

Compile = Callable[[ModuleType, str], CompiledInsteadOfLaunched]
ROW_COUNTS = {"b32", "b64"}
HOPPER_SHARED_BYTES = 227 * 1024


@pytest.mark.parametrize(
    ("conv_dim", "ssm_shape", "dtype", "pool_accesses"),
    [
        (10240, (128, 128, 64), torch.bfloat16, {"v2.b64"}),
        (6144, (64, 128, 64), torch.float32, {"v2.b64"}),
        (63, (5, 5, 20), torch.bfloat16, {"b16", "b64"}),
        (1, (1, 1, 1), torch.bfloat16, {"b16"}),
    ],
)
def test_align_copy_uses_16_byte_accesses(
    conv_dim: int,
    ssm_shape: tuple[int, int, int],
    dtype: torch.dtype,
    pool_accesses: set[str],
    compile_for_hopper: Compile,
) -> None:
    compiled = compile_for_hopper(align_copy_module, "_align_copy_kernel")
    conv, ssm = torch.empty(2, 1, 6, conv_dim, dtype=dtype), torch.empty(2, 1, *ssm_shape, dtype=dtype)
    rows = device_batch([StepRequest(28, 5, 4, 5, (0, 0, 0, 0, 0), 0)], "cpu")
    align_copy = within_pools(align_copy_module.align_copy)
    align_copy(conv, ssm, rows, 16, 3)
    slots, drafts = cut_window(conv, rows.columns[:, 0], 3)
    align_copy(slots, ssm, rows, 16, 3, drafts=drafts)
    assert len(compiled.ptx) == 2
    for ptx in compiled.ptx:
        assert global_accesses(ptx) == pool_accesses | ROW_COUNTS


SHAPE_8B = SSMShape(heads=128, head_dim=64, d_state=128, groups=8)
SHAPE_NANO = SSMShape(heads=64, head_dim=64, d_state=128, groups=8)
POOL_DTYPES = pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float32])


@POOL_DTYPES
@pytest.mark.parametrize("shape", [SHAPE_8B, SHAPE_NANO])
def test_state_verify_moves_states_in_16_byte_accesses(
    shape: SSMShape, pool_dtype: torch.dtype, compile_for_hopper: Compile
) -> None:
    compiled = compile_for_hopper(state_verify_module, "_state_verify_kernel")
    steps = random_steps(3, "cpu", shape, dtype=torch.bfloat16)
    pool = torch.empty(3, 1, *shape.state, dtype=pool_dtype)
    state_verify(steps.tokens, steps.weights, pool[:, 0], pack_verify([VerifySpec(3, (0, 1, 2))], "cpu"))
    (ptx,) = compiled.ptx
    # 128 threads copy a head's state, or half of it in models with few heads; the other stores are outputs.
    num_columns = shape.head_dim if shape is SHAPE_8B else shape.head_dim // 2
    num_accesses = shape.d_state * num_columns * pool_dtype.itemsize // (128 * 16)
    assert ptx.count("st.global.v4.b32") == num_accesses and ptx.count("ld.global.v4.b32") >= num_accesses
    assert global_accesses(ptx, "st") == {"v4.b32", "b16"}


@pytest.mark.parametrize(
    ("conv_dim", "pool_dtype"),
    [
        (10240, torch.bfloat16),
        (6144, torch.float32),
        pytest.param(10240, torch.float32, marks=pytest.mark.slow),
        pytest.param(6144, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_convolutions_move_inputs_and_windows_in_16_byte_accesses(
    conv_dim: int, pool_dtype: torch.dtype, compile_for_hopper: Compile
) -> None:
    verify = compile_for_hopper(conv_verify_module, "_conv_verify_kernel")
    whole = compile_for_hopper(causal_conv_module, "_causal_conv_kernel")
    wide = torch.empty(20, 2 * conv_dim, dtype=torch.bfloat16)
    x, bias = wide[:, conv_dim:], wide[1, :conv_dim]
    weight = torch.empty(conv_dim, 4, dtype=torch.bfloat16)
    pool = torch.empty(3, 6, conv_dim, dtype=pool_dtype)
    rows = pack_verify([VerifySpec(3, (0, 1, 2))], "cpu")
    conv_verify(x[:3], weight, bias, pool, rows)
    slots, drafts = cut_window(pool, rows.columns[:, 0], 3)
    conv_verify(x[:3], weight, bias, slots, rows, drafts=drafts)
    causal_conv(x, weight, bias, pool, pack_rows([RowSpec(20, final=0, boundaries={8: 1})], 8, "cpu"))
    assert all(global_accesses(ptx, "st") == {"v4.b32"} for ptx in verify.ptx)
    assert global_accesses(verify.ptx[0]) == global_accesses(verify.ptx[1])
    # Each of 128 threads reads and writes 4 channels of 16 tokens, and reads those of the 3 tokens before.
    assert whole.ptx[0].count("ld.global.v2.b32") >= 19 and whole.ptx[0].count("st.global.v2.b32") >= 16


def test_conv_and_verify_kernels_compile_once_for_any_batch_or_length(compile_for_hopper: Compile) -> None:
    verify = compile_for_hopper(conv_verify_module, "_conv_verify_kernel")
    whole = compile_for_hopper(causal_conv_module, "_causal_conv_kernel")
    update = compile_for_hopper(state_verify_module, "_state_verify_kernel")
    shape = SSMShape(heads=2, head_dim=64, d_state=128, groups=1)
    weight, bias = torch.empty(128, 4), torch.empty(128)
    conv_pool, ssm_pool = torch.empty(2, 24, 128), torch.empty(2, *shape.state)
    draft_inputs, rings = torch.empty(2, 21, 128), torch.zeros(256, dtype=torch.int32)
    projected = torch.empty(1040, 256)
    for num_rows, length, num_spare in ((1, 1, 0), (1, 9, 2), (2, 1, 0), (7, 3, 1), (16, 9, 7), (256, 4, 5)):
        num_tokens = num_rows * length + num_spare
        steps = random_steps(num_tokens, "cpu", shape)
        rows = pack_verify([VerifySpec(length, (0,) * length)] * num_rows, "cpu", num_spare=num_spare)
        state_verify(steps.tokens, steps.weights, ssm_pool, rows)
        conv_verify(projected[:num_tokens, :128], weight, bias, conv_pool, rows)
        drafts = DraftInputs(draft_inputs, rings[:num_rows])
        conv_verify(projected[:num_tokens, :128], weight, bias, conv_pool, rows, drafts=drafts)
        specs = [RowSpec(length, final=0, boundaries={4: 1})] * num_rows
        x = projected[num_spare : num_spare + num_tokens, :128]  # prefill tokens follow decode tokens
        causal_conv(x, weight, bias, conv_pool, pack_rows(specs, 4, "cpu", num_padding=num_spare))
    for kernel, num_forms in ((verify, 2), (whole, 1), (update, 1)):
        assert len(kernel.ptx) == 6 * num_forms and len(kernel.compiled) == num_forms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sampling_reads_logits_in_16_byte_accesses_and_compiles_once(
    dtype: torch.dtype, compile_for_hopper: Compile
) -> None:
    reading = [
        compile_for_hopper(sampling, "_peaks_kernel"),
        compile_for_hopper(token_cuts, "measure_kernel"),
        compile_for_hopper(token_cuts, "list_kernel"),
        compile_for_hopper(greedy_draws, "_best_of_tiles_kernel"),
    ]
    once = [
        compile_for_hopper(token_cuts, "_cut_kernel"),
        compile_for_hopper(sampling, "_pick_kernel"),
        compile_for_hopper(greedy_draws, "_best_of_row_kernel"),
        compile_for_hopper(verification, "_accept_kernel"),
        *reading,
    ]
    logits = torch.empty(40, 124928 if dtype is torch.float32 else 131072, dtype=dtype)  # 30.5 tiles, and 32
    for num_rows, first in ((1, 0), (2, 1), (16, 2), (33, 3)):
        settings = (torch.ones(40), torch.ones(40, dtype=torch.int32), torch.ones(40))
        rows = SamplingRows(logits[:num_rows], *(setting[first : first + num_rows] for setting in settings))
        sample_by_kernels(rows, torch.empty(40, dtype=torch.float64)[first : first + num_rows], any_cut=True)
        tokens = greedy_tokens(rows.logits)
        cu_logits, drafts = torch.zeros(80, dtype=torch.int32)[first:], torch.zeros(80, dtype=torch.int64)[first:]
        for max_drafts in (0, 1, 3, 8):
            accept_matching(tokens, VerifyLogits(cu_logits[: num_rows + 1], drafts[:num_rows], max_drafts))
    assert [len(kernel.compiled) for kernel in once] == [1] * len(once)
    for kernel in reading:
        assert "v4.b32" in global_accesses(kernel.ptx[0], "ld")


SLOT_SHAPES = pytest.mark.parametrize(
    ("conv_shape", "ssm_shape", "dtype", "accesses"),
    [
        ((6, 10240), (128, 128, 64), torch.bfloat16, {"v2.b64"}),
        ((3, 6144), (64, 128, 64), torch.float32, {"v2.b64"}),
        ((3, 21), (5, 5, 20), torch.bfloat16, {"b16", "b64"}),
    ],
)


@SLOT_SHAPES
def test_slot_copy_uses_16_byte_accesses(
    conv_shape: tuple[int, ...],
    ssm_shape: tuple[int, ...],
    dtype: torch.dtype,
    accesses: set[str],
    compile_for_hopper: Compile,
) -> None:
    compiled = compile_for_hopper(slot_copies, "_copy_slots_kernel")
    pools = [torch.empty(2, 2, *shape, dtype=dtype) for shape in (conv_shape, ssm_shape)]
    slots = torch.zeros(3, dtype=torch.int32)
    copy_slots(pools, pools, slots, slots + 1)
    (ptx,) = compiled.ptx
    assert global_accesses(ptx) == accesses | {"b32"}


@pytest.mark.parametrize(
    ("kv_heads", "dim", "dtype", "accesses"),
    [(8, 128, torch.bfloat16, {"v4.b32"}), (2, 128, torch.float32, {"v4.b32"}), (1, 1, torch.bfloat16, {"b16"})],
)
def test_kv_append_uses_16_byte_accesses(
    kv_heads: int, dim: int, dtype: torch.dtype, accesses: set[str], compile_for_hopper: Compile
) -> None:
    compiled = compile_for_hopper(kv_append, "_append_kv_kernel")
    joint = torch.empty(5, kv_heads, 3 * dim, dtype=dtype)
    caches, targets = torch.empty(2, 3, 4, kv_heads, dim, dtype=dtype), torch.zeros(5, dtype=torch.int32)
    append_kv(joint[:, :, dim : 2 * dim], joint[:, :, 2 * dim :], caches[0], caches[1], targets, targets)
    (ptx,) = compiled.ptx
    assert global_accesses(ptx) == accesses | {"b32"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_kv_append_compiles_once_for_all_scales(dtype: torch.dtype, compile_for_hopper: Compile) -> None:
    compiled = compile_for_hopper(kv_append, "_append_kv_kernel")
    key, targets = torch.empty(5, 8, 128, dtype=dtype), torch.zeros(5, dtype=torch.int32)
    caches = torch.empty(2, 3, 4, 8, 128).to(FP8)
    for scale in (1.0, 0.5, 0.013):
        append_kv(key, key, caches[0], caches[1], targets, targets, scales=KVScales(scale, 1.0))
    assert len(compiled.compiled) == 1
    assert not global_accesses(compiled.ptx[0], "st") & {"b8", "b16"}  # a thread stores several codes at once


def test_attention_input_kernel_compiles_for_fp8_keys_and_values(compile_for_hopper: Compile) -> None:
    compiled = compile_for_hopper(attention_inputs, "_inputs_kernel")
    query, targets = torch.empty(5, 2, 8, 256, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.int32)
    caches, weights = torch.empty(2, 3, 4, 2, 256).to(FP8), torch.empty(2, 256, dtype=torch.bfloat16)
    changes = HeadChanges(HeadNorms(weights[0], weights[1], 1e-6, 1.0), None)
    for scale in (1.0, 0.013):
        heads = query, query[:, :, 0], query[:, :, 1]
        write_attention_inputs(*heads, caches[0], caches[1], targets, targets, changes, KVScales(scale, scale))
    assert len(compiled.compiled) == 1


@pytest.mark.parametrize(
    ("kv_heads", "queries", "dim", "rotated", "has_norms"),
    [(2, 8, 256, 64, True), (4, 6, 256, 64, True), (8, 4, 128, 64, False), (8, 4, 128, 128, False)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_input_kernel_uses_16_byte_accesses_and_compiles_once(
    kv_heads: int,
    queries: int,
    dim: int,
    rotated: int,
    has_norms: bool,
    dtype: torch.dtype,
    compile_for_hopper: Compile,
) -> None:
    compiled = compile_for_hopper(attention_inputs, "_inputs_kernel")
    joint = torch.empty(65, kv_heads, (2 * queries + 2) * dim, dtype=dtype)
    query, _, key, value = joint.split((queries * dim, queries * dim, dim, dim), dim=-1)
    caches, weights = torch.empty(2, 3, 4, kv_heads, dim, dtype=dtype), torch.empty(2, dim, dtype=dtype)
    table = torch.empty(9, 2, rotated // 2, dtype=dtype)
    for num_tokens in (1, 2, 16, 65):
        targets = torch.zeros(num_tokens, dtype=torch.int32)
        changes = HeadChanges(
            HeadNorms(weights[0], weights[1], 1e-6, 1.0) if has_norms else None, Rotation(table, targets.long())
        )
        write_attention_inputs(
            query[:num_tokens].unflatten(-1, (queries, dim)),
            key[:num_tokens],
            value[:num_tokens],
            caches[0],
            caches[1],
            targets,
            targets,
            changes,
        )
    assert len(compiled.compiled) == 1
    assert global_accesses(compiled.ptx[0], "st") == {"v4.b32"}
    assert "fma.rn.f32" not in compiled.ptx[0]


@pytest.mark.parametrize(("kv_heads", "queries"), [(2, 8), (4, 6)])
def test_output_gate_uses_16_byte_accesses(kv_heads: int, queries: int, compile_for_hopper: Compile) -> None:
    compiled = compile_for_hopper(output_gate, "_gate_kernel")
    joint = torch.empty(5, kv_heads, (2 * queries + 2) * 256, dtype=torch.bfloat16)
    gate = joint[:, :, queries * 256 : 2 * queries * 256].unflatten(-1, (queries, 256))
    gate_output(torch.empty(5, kv_heads * queries, 256, dtype=torch.bfloat16), gate)
    (ptx,) = compiled.ptx
    assert global_accesses(ptx) == {"v4.b32"}


@pytest.mark.parametrize("num_pieces", [2, 8])
def test_merging_split_kv_outputs_uses_16_byte_accesses(num_pieces: int, compile_for_hopper: Compile) -> None:
    compiled = compile_for_hopper(split_prompts, "_merge_kernel")
    parts = torch.empty(num_pieces + 1, 5, 16, 256, dtype=torch.bfloat16)
    merge_parts(parts, torch.empty(parts.shape[:3]), parts[0].clone())
    (ptx,) = compiled.ptx
    assert global_accesses(ptx, "st") == {"v4.b32"} and "v4.b32" in global_accesses(ptx, "ld")


@pytest.mark.parametrize(("channels", "group_size"), [(8192, 1024), (4096, 512), (8192, 8192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gated_norm_uses_16_byte_accesses(
    channels: int, group_size: int, dtype: torch.dtype, compile_for_hopper: Compile
) -> None:
    compiled = compile_for_hopper(gated_norm, "_gated_group_norm_kernel")
    rows = torch.empty(3, 2 * channels + 128, dtype=dtype)
    gated_group_norm(rows[:, :channels], rows[:, -channels:], torch.empty(channels, dtype=dtype), group_size, 1e-5)
    (ptx,) = compiled.ptx
    assert global_accesses(ptx) == {"v4.b32"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_and_gate_uses_16_byte_accesses(dtype: torch.dtype, compile_for_hopper: Compile) -> None:
    compiled = compile_for_hopper(norm_and_gate, "_norm_and_gate_kernel")
    rows = torch.empty(3, 2 * 4096 + 128, dtype=dtype)
    norm_and_gate.norm_and_gate(rows[:, :4096], rows[:, -4096:], torch.empty(128, dtype=dtype), 1e-6)
    (ptx,) = compiled.ptx
    assert "v4.b32" in global_accesses(ptx)


# Each variant takes seconds to compile; by default each tiling is tested once, with alternating shapes and dtypes.
SCANS = [
    (None, SHAPE_8B, torch.bfloat16),
    (HopperTiling(1, 32, 3), SHAPE_NANO, torch.float32),
    (HopperTiling(1, 64, 3), SHAPE_8B, torch.float32),
    (HopperTiling(2, 64, 2), SHAPE_NANO, torch.bfloat16),
]
OTHER_SCANS = [
    pytest.param(tiling, shape, dtype, marks=pytest.mark.slow)
    for tiling, shape, dtype in product(
        [scan[0] for scan in SCANS], (SHAPE_8B, SHAPE_NANO), (torch.bfloat16, torch.float32)
    )
    if (tiling, shape, dtype) not in SCANS
]


@pytest.mark.parametrize(("tiling", "shape", "pool_dtype"), SCANS + OTHER_SCANS)
def test_ssd_scan_uses_asynchronous_tensor_core_matmuls(
    tiling: HopperTiling | None, shape: SSMShape, pool_dtype: torch.dtype, compile_for_hopper: Compile
) -> None:
    cut = compile_for_hopper(tiles_module, "_tiles_kernel")
    scan = compile_for_hopper(scan_hopper if tiling else scan_portable, "_scan_kernel")
    steps = random_steps(200, "cpu", shape).cast(torch.bfloat16)
    pool, rows = torch.empty(2, *shape.state, dtype=pool_dtype), pack_rows([RowSpec(200, final=0)], 128, "cpu")
    tiles = tile_shape(128, torch.bfloat16)
    assert tiles is not None
    scan_tiles(steps.tokens, steps.weights, pool, rows, tiles, tiling)
    assert len(cut.ptx) == len(scan.ptx) == 1
    assert "wgmma.mma_async" in scan.ptx[0] and "cp.async.bulk.tensor" in scan.ptx[0]


@pytest.mark.parametrize("tiling", [None, HopperTiling(1, 64, 3), HopperTiling(2, 64, 2)])
def test_quantizing_states_in_the_scan_needs_no_additional_shared_memory(
    tiling: HopperTiling | None, compile_for_hopper: Compile
) -> None:
    compile_for_hopper(tiles_module, "_tiles_kernel")
    scan = compile_for_hopper(scan_hopper if tiling else scan_portable, "_scan_kernel")
    steps = random_steps(200, "cpu", SHAPE_NANO).cast(torch.bfloat16)
    pool, rows = torch.empty(2, *SHAPE_NANO.state), pack_rows([RowSpec(200, final=0)], 128, "cpu")
    tiles = tile_shape(128, torch.bfloat16)
    assert tiles is not None
    of_int8 = patterned(3, SHAPE_NANO.state, "cpu")
    of_fp8 = replace(of_int8, values=of_int8.values.view(torch.float8_e4m3fn))
    for quantized in (None, of_int8, of_fp8):
        scan_tiles(steps.tokens, steps.weights, pool, rows, tiles, tiling, quantized)
    exact, *quantizing = scan.ptx
    assert all("div.rn.f32" in ptx and "wgmma.mma_async" in ptx for ptx in quantizing) and "div.rn.f32" not in exact
    assert ["e4m3x2" in ptx for ptx in quantizing] == [False, True]
    assert max(scan.shared_bytes[1:]) <= scan.shared_bytes[0] <= HOPPER_SHARED_BYTES


@pytest.mark.parametrize("shape", [SHAPE_8B, SHAPE_NANO])
def test_quantized_states_are_moved_in_16_byte_accesses(shape: SSMShape, compile_for_hopper: Compile) -> None:
    restore = compile_for_hopper(quantized_states, "_restore_kernel")
    align = compile_for_hopper(align_copy_module, "_align_copy_kernel")
    ssm, targets = torch.empty(2, 3, *shape.state), patterned(3, shape.state, "cpu", 2)
    slots = torch.zeros(3, dtype=torch.int32)
    restore_states(targets, ssm, slots, slots)
    conv, ends = torch.empty(2, 3, 6, 10240, dtype=torch.bfloat16), torch.empty(2, 3, 3, 10240, dtype=torch.bfloat16)
    rows = device_batch([StepRequest(28, 5, 4, 5, (0, 0, 0, 0, 0), 0)], "cpu")
    quantizing(align_copy_module.align_copy)(conv, ssm, rows, 16, 3, ends, targets)
    assert "v4.b32" in global_accesses(restore.ptx[0], "st") and "v4.b32" in global_accesses(align.ptx[0], "ld")
    assert "div.rn.f32" in align.ptx[0]


# Each variant takes seconds to compile; by default each state and each number of requests is tested once.
CHOSEN = [(64, 64, 8), (64, 128, 1), (128, 64, 2), (128, 128, 8), (80, 128, 1)]
OTHERS_CHOSEN = [
    pytest.param(head_dim, d_state, num_rows, marks=pytest.mark.slow)
    for (head_dim, d_state, _), num_rows in product(CHOSEN, (1, 2, 8))
    if (head_dim, d_state, num_rows) not in CHOSEN
]


@pytest.mark.parametrize(("head_dim", "d_state", "num_rows"), CHOSEN + OTHERS_CHOSEN)
def test_chosen_scan_variant_fits_in_shared_memory(
    head_dim: int, d_state: int, num_rows: int, compile_for_hopper: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan_module, "num_multiprocessors", lambda device: 132)
    compile_for_hopper(tiles_module, "_tiles_kernel")
    scan = compile_for_hopper(scan_hopper, "_scan_kernel")
    shape = SSMShape(heads=64, head_dim=head_dim, d_state=d_state, groups=8)
    steps = random_steps(128 * num_rows, "cpu", shape).cast(torch.bfloat16)
    pool, rows = torch.empty(1, *shape.state), pack_rows([RowSpec(128)] * num_rows, 128, "cpu")
    tiles, tiling = tile_shape(128, torch.bfloat16), choose_tiling(steps.tokens, num_rows)
    assert tiles is not None and tiling.channels <= head_dim
    scan_tiles(steps.tokens, steps.weights, pool, rows, tiles, tiling)
    assert scan.shared_bytes[0] <= HOPPER_SHARED_BYTES


@pytest.mark.parametrize(("head_dim", "d_state"), [(128, 128), (64, 256), (80, 128)])
def test_largest_states_of_the_portable_scan_fit_in_shared_memory(
    head_dim: int, d_state: int, compile_for_hopper: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_for_hopper(tiles_module, "_tiles_kernel")
    portable = compile_for_hopper(scan_portable, "_scan_kernel")
    monkeypatch.setattr(scan_module, "launches_kernel", lambda tensor: True)
    shape = SSMShape(heads=2, head_dim=head_dim, d_state=d_state, groups=1)
    steps, rows = random_steps(128, "cpu", shape).cast(torch.bfloat16), pack_rows([RowSpec(128)], 128, "cpu")
    ssd_scan(steps.tokens, steps.weights, torch.empty(1, *shape.state), rows, 128)
    assert portable.shared_bytes[0] <= HOPPER_SHARED_BYTES


SHAPE_QWEN = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128)


@POOL_DTYPES
def test_delta_verify_moves_states_in_16_byte_accesses(pool_dtype: torch.dtype, compile_for_hopper: Compile) -> None:
    compiled = compile_for_hopper(delta_verify_module, "_delta_verify_kernel")
    steps = delta_steps.random_steps(3, "cpu", SHAPE_QWEN, dtype=torch.bfloat16)
    pool = torch.empty(3, 1, *SHAPE_QWEN.state, dtype=pool_dtype)
    delta_verify(steps.tokens, steps.gates, pool[:, 0], pack_verify([VerifySpec(3, (0, 1, 2))], "cpu"))
    (ptx,) = compiled.ptx
    num_accesses = 128 * delta_verify_module.TILING.width * pool_dtype.itemsize // (128 * 16)
    assert ptx.count("st.global.v4.b32") == num_accesses and ptx.count("ld.global.v4.b32") >= num_accesses


def test_delta_rule_kernels_compile_once_for_any_batch(compile_for_hopper: Compile) -> None:
    kernels = [
        compile_for_hopper(tile_systems, "_systems_kernel"),
        compile_for_hopper(delta_scan_portable, "_scan_kernel"),
        compile_for_hopper(delta_verify_module, "_delta_verify_kernel"),
    ]
    shape = DeltaShape(1, 2, 16, 16)
    tiles, pool = tile_shape(16, torch.float32), torch.empty(2, *shape.state)
    assert tiles is not None
    for num_rows, length, num_spare in ((1, 1, 0), (1, 9, 2), (2, 1, 0), (7, 3, 1), (16, 9, 7), (256, 4, 5)):
        steps = delta_steps.random_steps(num_rows * length + num_spare, "cpu", shape)
        specs = [RowSpec(length, final=0, boundaries={4: 1})] * num_rows
        scan_delta_tiles(steps.tokens, steps.gates, pool, pack_rows(specs, 16, "cpu", num_padding=num_spare), tiles)
        rows = pack_verify([VerifySpec(length, (0,) * length)] * num_rows, "cpu", num_spare=num_spare)
        delta_verify(steps.tokens, steps.gates, pool, rows)
    assert [len(kernel.compiled) for kernel in kernels] == [1, 1, 1]


@pytest.mark.parametrize(("value_heads", "pool_dtype"), [(32, torch.float32), (48, torch.bfloat16)])
@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_delta_scan_on_hopper_overlaps_its_matmuls(
    value_heads: int, pool_dtype: torch.dtype, parts: int, compile_for_hopper: Compile
) -> None:
    systems = compile_for_hopper(tile_systems_hopper, "_systems_kernel")
    scan = compile_for_hopper(delta_scan_hopper, "_scan_kernel")
    shape = replace(SHAPE_QWEN, value_heads=value_heads)
    steps = delta_steps.random_steps(200, "cpu", shape, dtype=torch.bfloat16)
    pool, rows = torch.empty(2, *shape.state, dtype=pool_dtype), pack_rows([RowSpec(200, final=0)], 64, "cpu")
    tiles = tile_shape(64, torch.bfloat16)
    assert tiles is not None
    solved = solve_tiles_on_hopper(steps.tokens, steps.gates, rows, tiles)
    tiling = delta_scan_hopper.NARROW if parts == 1 else delta_scan_hopper.WIDE
    for quantized in (None, patterned(3, shape.state, "cpu")):
        scan_on_hopper(steps.tokens, pool, rows, solved, quantized, tiling)
    assert all("wgmma.mma_async" in ptx for ptx in systems.ptx + scan.ptx)
    assert "setmaxnreg" in scan.ptx[0] and "cp.async.bulk.tensor" in scan.ptx[0]
    assert max(systems.shared_bytes + scan.shared_bytes) <= HOPPER_SHARED_BYTES


@pytest.mark.parametrize(
    ("num_requests", "quantizes"),
    [(1, False), pytest.param(1, True, marks=pytest.mark.slow), pytest.param(3, False, marks=pytest.mark.slow)],
)
def test_delta_scan_uses_asynchronous_tensor_core_matmuls(
    num_requests: int, quantizes: bool, compile_for_hopper: Compile
) -> None:
    systems = compile_for_hopper(tile_systems, "_systems_kernel")
    scan = compile_for_hopper(delta_scan_portable, "_scan_kernel")
    steps = delta_steps.random_steps(200 * num_requests, "cpu", SHAPE_QWEN, dtype=torch.bfloat16)
    pool, rows = torch.empty(2, *SHAPE_QWEN.state), pack_rows([RowSpec(200, final=0)] * num_requests, 64, "cpu")
    tiles, targets = tile_shape(64, torch.bfloat16), patterned(3, SHAPE_QWEN.state, "cpu") if quantizes else None
    assert tiles is not None
    scan_delta_tiles(steps.tokens, steps.gates, pool, rows, tiles, targets)
    assert "wgmma.mma_async" in systems.ptx[0]
    assert "wgmma.mma_async" in scan.ptx[0] and "cp.async.bulk.tensor" in scan.ptx[0]
    assert ("div.rn.f32" in scan.ptx[0]) == quantizes
    assert max(systems.shared_bytes + scan.shared_bytes) <= HOPPER_SHARED_BYTES
