"""Ops quantize states exactly as the formula does, and restores dequantize them.

Without a GPU or the interpreter, the ops are their references; `test_interpreted` runs this file again.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED
from megatron_mamba_cache.recurrences import align_copy as align_copy_module
from megatron_mamba_cache.recurrences import quantized_states
from megatron_mamba_cache.recurrences.batches import PAD_SLOT
from megatron_mamba_cache.recurrences.conv import conv as causal_conv_module
from megatron_mamba_cache.recurrences.conv.conv import causal_conv
from megatron_mamba_cache.recurrences.conv.reference import causal_conv_ref
from megatron_mamba_cache.recurrences.mamba2 import scan_portable
from megatron_mamba_cache.recurrences.mamba2.reference import ssd_scan_ref
from megatron_mamba_cache.recurrences.mamba2.replay.reference import state_replay_ref
from megatron_mamba_cache.recurrences.mamba2.scan import scan_tiles, ssd_scan
from megatron_mamba_cache.recurrences.mamba2.tiles import HopperTiling
from megatron_mamba_cache.recurrences.moves import StateMove
from megatron_mamba_cache.recurrences.quantized_states import (
    quantize,
    restore_states,
    restore_states_ref,
)
from megatron_mamba_cache.recurrences.replay import boundary_folds
from megatron_mamba_cache.recurrences.replay.boundary_folds import fold_boundaries
from megatron_mamba_cache.recurrences.replay.reference import fold_boundaries_ref
from megatron_mamba_cache.recurrences.request_tiles import tile_shape
from tests.kernels.align_steps import StepRequest, device_batch, padding_request, quantizing, within_pools
from tests.kernels.kernel_stand_ins import launches_expected
from tests.kernels.packed_batches import RowSpec, pack_rows, poisoned_pool, same_bits, scan_specs, written_slots
from tests.kernels.quantized_values import (
    assert_only_written,
    by_the_formula,
    cloned,
    holds_quantized,
    patterned,
)
from tests.kernels.replay_steps import ReplayedRequests, Turn, layered
from tests.kernels.split_windows import align_with_rings
from tests.kernels.ssm_steps import SSMShape, random_steps

quantized_align_copy, quantized_align_copy_ref = (
    quantizing(op) for op in (align_copy_module.align_copy, align_copy_module.align_copy_ref)
)
align_copy_ref = within_pools(align_copy_module.align_copy_ref)
BOTH_POOLS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ODD = SSMShape(heads=4, head_dim=5, d_state=7, groups=2)
SCANNED = SSMShape(heads=4, head_dim=16, d_state=32, groups=2)
SLICED = SSMShape(heads=3, head_dim=48, d_state=32, groups=1)
HOPPER = SSMShape(heads=8, head_dim=64, d_state=128, groups=2)
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from([1.0, 1e-30, 1e30, 2.0**-126, 1e-44, 0.0]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_state_quantization_error_is_at_most_half_a_step(d_state: int, head_dim: int, size: float, seed: int) -> None:
    state = torch.randn(2, d_state, head_dim, generator=torch.Generator().manual_seed(seed)) * size
    values, scales = quantize(state, torch.int8)
    assert all(same_bits(*pair) for pair in zip((values, scales), by_the_formula(state), strict=True))
    restored = values.double() * scales.double()[:, None]
    steps = scales.double().clamp_min(2 * 2.0**-126 * 127)
    assert ((restored - state.double()).abs() <= 0.5000001 * steps[:, None]).all()
    assert values.min() >= -127 and values.max() <= 127


def test_quantization_restores_the_largest_value_of_each_channel() -> None:
    state = torch.randn(8, 128, 64)
    values, scales = quantize(state, torch.int8)
    largest = state.abs().amax(1)
    restored = (values.float() * scales[:, None]).abs().amax(1)
    torch.testing.assert_close(restored, largest, rtol=2e-7, atol=0)


@BOTH_POOLS
@pytest.mark.parametrize("op", [restore_states, restore_states_ref])
@given(data=st.data())
@settings(max_examples=15)
def test_restore_writes_only_the_dequantized_state(
    data: st.DataObject, op: Callable[..., None], dtype: torch.dtype
) -> None:
    shape = data.draw(st.sampled_from([(2, 3, 4), (1, 1, 1), (3, 16, 5), (2, 7, 70)]))
    num_pairs = data.draw(st.integers(0, 5))
    src = [data.draw(st.sampled_from([PAD_SLOT, 0, 3, 6])) for _ in range(num_pairs)]
    dst = data.draw(st.permutations(range(5)))[:num_pairs]
    dst = [data.draw(st.sampled_from([PAD_SLOT, slot, slot])) for slot in dst]
    quantized, pool = patterned(7, shape, "cpu", 2), torch.randn(2, 5, *shape).to(dtype)
    expected = pool.clone()
    for source, target in zip(src, dst, strict=True):
        if PAD_SLOT not in (source, target):
            expected[:, target] = quantized.values[:, source] * quantized.scales[:, source][..., None, :]
    slots = torch.tensor([src, dst], dtype=torch.int32)
    launches = op is restore_states and num_pairs > 0
    with launches_expected(quantized_states, "_restore_kernel", of_kernel=launches, device="cpu"):
        op(quantized, pool, slots[0], slots[1])
    assert same_bits(pool, expected)


def test_restore_of_more_slots_than_one_launch_handles_is_complete(device: str) -> None:
    num_pairs = quantized_states.SLOTS_AT_A_TIME + 3 if not INTERPRETED else 9
    quantized, pool = patterned(5, (1, 2, 2), device, 1), torch.zeros(1, num_pairs, 1, 2, 2, device=device)
    src = torch.arange(num_pairs, dtype=torch.int32, device=device) % 5
    restore_states(quantized, pool, src, torch.arange(num_pairs, dtype=torch.int32, device=device))
    expected = (quantized.values * quantized.scales[..., None, :])[:, src.long()]
    assert same_bits(pool, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(1, 2, 2, 3, 4)}, r"values .* \[.*\] and a dtype in .torch.int8, torch.float8_e4m3fn"),
        ({"values": torch.zeros(1, 2, 2, 4, 4, dtype=torch.int8)}, r"\[..., slots, 2, 3, 4\]"),
        ({"scales": torch.zeros(1, 2, 2, 4, dtype=torch.float16)}, r"scales .* \[.*\] and a dtype in .torch.float32"),
        ({"scales": torch.zeros(2, 2, 2, 4)}, "scales must be contiguous"),
        ({"scales": torch.zeros(1, 2, 4, 2).transpose(2, 3)}, "with strides"),
    ],
)
def test_mismatched_quantized_states_are_refused(change: dict[str, Tensor], message: str) -> None:
    quantized = replace(patterned(2, (2, 3, 4), "cpu", 1), **change)
    slots = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        restore_states(quantized, torch.zeros(1, 2, 2, 3, 4), slots, slots)


@BOTH_POOLS
@pytest.mark.parametrize(
    ("op", "shape"),
    [(ssd_scan, SCANNED), (ssd_scan, SLICED), (ssd_scan, ODD), (ssd_scan_ref, SCANNED)],
    ids=["kernel", "slices", "odd", "twin"],
)
def test_scan_quantizes_only_boundary_states(
    op: Callable[..., Tensor], shape: SSMShape, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(3)
    chunk, num_slots = 32, 13
    specs = scan_specs(chunk)
    steps = random_steps(sum(spec.length for spec in specs), device, shape)
    rows = pack_rows(specs, chunk, device, num_padding=2)
    exact = poisoned_pool((num_slots, *shape.state), torch.float32, device, [1, 11])
    exact = exact.to(dtype).float()
    pool = exact.to(dtype, copy=True)
    y = op(steps.tokens, steps.weights, exact, rows, chunk)
    quantized = patterned(num_slots, shape.state, device)
    before, pool_before = cloned(quantized), pool.clone()
    is_kernel = op is ssd_scan and shape is not ODD
    with launches_expected(scan_portable, "_scan_kernel", of_kernel=is_kernel, device=device):
        quantized_y = op(steps.tokens, steps.weights, pool, rows, chunk, quantized)
    assert same_bits(quantized_y, y)
    boundaries = {slot for spec in specs for slot in spec.boundaries.values()}
    for slot in boundaries:
        assert holds_quantized(quantized, slot, exact[slot])
    assert_only_written(before, quantized, boundaries)
    finals = {spec.final for spec in specs} - {PAD_SLOT}
    assert written_slots(specs) == finals | boundaries
    for slot in range(num_slots):
        assert same_bits(pool[slot], (exact if slot in finals else pool_before)[slot].to(dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@BOTH_POOLS
@pytest.mark.parametrize("tiling", [HopperTiling(1, 64, 3), HopperTiling(2, 64, 2), HopperTiling(1, 32, 3)])
def test_hopper_scan_quantizes_boundary_states_from_exact_states(tiling: HopperTiling, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    chunk, num_slots = 128, 13
    specs = scan_specs(chunk)
    steps = random_steps(sum(spec.length for spec in specs), "cuda", HOPPER, dtype=torch.bfloat16)
    rows, tile = pack_rows(specs, chunk, "cuda"), tile_shape(chunk, torch.bfloat16)
    assert tile is not None
    exact = poisoned_pool((num_slots, *HOPPER.state), torch.float32, "cuda", [1, 11]).to(dtype).float()
    pool, quantized = exact.to(dtype, copy=True), patterned(num_slots, HOPPER.state, "cuda")
    before = cloned(quantized)
    y = scan_tiles(steps.tokens, steps.weights, exact, rows, tile, tiling)
    assert same_bits(scan_tiles(steps.tokens, steps.weights, pool, rows, tile, tiling, quantized), y)
    boundaries = {slot for spec in specs for slot in spec.boundaries.values()}
    for slot in boundaries:
        assert holds_quantized(quantized, slot, exact[slot])
    assert_only_written(before, quantized, boundaries)


@BOTH_POOLS
@pytest.mark.parametrize("op", [fold_boundaries, fold_boundaries_ref])
def test_boundary_state_op_quantizes_the_exact_state(op: Callable[..., None], dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(5)
    requests = ReplayedRequests([random_steps(49, device, ODD) for _ in range(3)], ODD, 8, 9, dtype=dtype)
    for request in requests.requests:
        requests.step(state_replay_ref, [Turn(request, 8, 5)])
        requests.step(state_replay_ref, [Turn(request, 8, 9)])
    ends = [request.computed // 8 * 8 for request in requests.requests]
    targets = [4, PAD_SLOT, 0]
    exact, ring = layered(requests.pool.clone(), requests.ring)
    op(exact, ring, requests.folds([0, PAD_SLOT, 2], ends), 8)
    quantized = patterned(6, ODD.state, device, 1)
    before, pool = cloned(quantized), requests.pool.clone()
    with launches_expected(boundary_folds, "_fold_boundaries_kernel", of_kernel=op is fold_boundaries, device=device):
        op(*layered(requests.pool, requests.ring), requests.folds(targets, ends), 8, quantized)
    in_layer, untouched = (states.of_layer(0) for states in (quantized, before))
    for target, slot in ((4, 0), (0, 2)):
        assert holds_quantized(in_layer, target, exact[0, slot])
    assert_only_written(untouched, in_layer, {0, 4})
    assert same_bits(requests.pool, pool)


ALIGN_STEPS = [
    StepRequest(60, 5, 4, 5, (0, 1, 2, 3, 4), 3),
    StepRequest(30, 3, 2, 1, (5, 6, 7, 8, 9), 6),  # reaches no boundary
    padding_request(5, target=7),
    StepRequest(15, 1, 0, 1, (10, 10, 10, 10, 10), 10),  # source and target may have the same index
    StepRequest(30, 3, 2, 3, (5, 6, 7, 8, 9), PAD_SLOT),
]


@BOTH_POOLS
@pytest.mark.parametrize("op", [quantized_align_copy, quantized_align_copy_ref])
@pytest.mark.parametrize("draft_inputs", ["in slots", "next to rings"])
@pytest.mark.parametrize("conv_dim", [10, 8])
def test_align_copy_quantizes_the_exact_state(
    conv_dim: int, draft_inputs: str, op: Callable[..., None], dtype: torch.dtype, device: str
) -> None:
    conv = torch.randn(2, 11, 7, conv_dim, device=device).to(torch.bfloat16)
    ssm = torch.randn(2, 11, *ODD.state, device=device).to(dtype)
    roomy = [
        torch.cat([pool, torch.zeros_like(pool)], 1) for pool in (conv, ssm)
    ]  # adds target slots after all sources
    moved = [replace(row, target=row.target + 11) if row.target >= 0 else row for row in ALIGN_STEPS]
    align_copy_ref(*roomy, device_batch(moved, device), 16, 3)
    quantized, ends = patterned(11, ODD.state, device, 2), torch.full((2, 11, 3, conv_dim), 9.0, device=device)
    ends = ends.to(torch.bfloat16)
    before, ends_before, pools = cloned(quantized), ends.clone(), (conv.clone(), ssm.clone())
    rows = device_batch(ALIGN_STEPS, device)
    run = op if draft_inputs == "in slots" else align_with_rings(op)
    is_kernel = op is quantized_align_copy
    with launches_expected(align_copy_module, "_align_copy_kernel", of_kernel=is_kernel, device=device):
        run(conv, ssm, rows, 16, 3, ends, quantized)
    assert all(same_bits(*pair) for pair in zip((conv, ssm), pools, strict=True))
    for layer in range(2):
        of_layer, untouched = (states.of_layer(layer) for states in (quantized, before))
        for target in (3, 10):
            assert holds_quantized(of_layer, target, roomy[1][layer, target + 11])
            assert same_bits(ends[layer, target], roomy[0][layer, target + 11, :3])
            ends_before[layer, target] = ends[layer, target]
        assert_only_written(untouched, of_layer, {3, 10})
    assert same_bits(ends, ends_before)


@pytest.mark.parametrize("op", [align_copy_module.align_copy, align_copy_module.align_copy_ref])
def test_align_copy_can_move_only_the_conv_windows(op: Callable[..., None], device: str) -> None:
    conv, ends = torch.randn(2, 11, 7, 10, device=device), torch.zeros(2, 11, 3, 10, device=device)
    op([StateMove(conv, ends, 3)], device_batch(ALIGN_STEPS, device), 16)
    assert same_bits(ends[:, 3], conv[:, 0, 3:6]) and same_bits(ends[:, 10], conv[:, 10, :3])
    assert not ends[:, [slot for slot in range(11) if slot not in (3, 10)]].any()


@pytest.mark.parametrize("op", [causal_conv, causal_conv_ref])
def test_causal_conv_can_write_boundary_windows_to_a_separate_buffer(op: Callable[..., Tensor], device: str) -> None:
    specs, num_slots = scan_specs(8), 13
    rows = pack_rows(specs, 8, device, num_padding=1)
    x = torch.randn(sum(spec.length for spec in specs), 10, device=device)
    weight, bias = torch.randn(10, 4, device=device), torch.randn(10, device=device)
    exact = poisoned_pool((num_slots, 5, 10), torch.float32, device, [1, 11])
    pool, ends = exact.clone(), torch.zeros(num_slots, 3, 10, device=device)
    y = op(x, weight, bias, exact, rows)
    with launches_expected(causal_conv_module, "_causal_conv_kernel", of_kernel=op is causal_conv, device=device):
        other_y = op(x, weight, bias, pool, rows, ends=ends)
    assert same_bits(y, other_y)
    boundaries = {slot for spec in specs for slot in spec.boundaries.values()}
    for slot in range(num_slots):
        assert same_bits(ends[slot], exact[slot, :3] if slot in boundaries else torch.zeros_like(ends[slot]))
    finals = written_slots(specs) - boundaries
    assert all(same_bits(pool[slot], exact[slot]) for slot in finals)
    assert pool[list(boundaries)].isnan().all()


def test_scan_without_boundary_slots_writes_no_quantized_state(device: str) -> None:
    steps, rows = random_steps(9, device, SCANNED), pack_rows([RowSpec(9, final=0)], 16, device)
    quantized = patterned(2, SCANNED.state, device)
    before = cloned(quantized)
    ssd_scan(steps.tokens, steps.weights, torch.zeros(1, *SCANNED.state, device=device), rows, 16, quantized)
    assert_only_written(before, quantized, set())
