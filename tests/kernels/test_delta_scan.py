"""The scan for the gated delta rule matches the recurrence in any batch, and resumed results are bitwise equal."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED, launches_kernel
from megatron_mamba_cache.recurrences.batches import PAD_SLOT, PrefillBatch
from megatron_mamba_cache.recurrences.gated_delta import scan as scan_module
from megatron_mamba_cache.recurrences.gated_delta import scan_portable
from megatron_mamba_cache.recurrences.gated_delta.inputs import DeltaTokens
from megatron_mamba_cache.recurrences.gated_delta.recurrence import GatedDelta
from megatron_mamba_cache.recurrences.gated_delta.reference import delta_scan_ref
from megatron_mamba_cache.recurrences.gated_delta.scan import delta_scan, scan_tiles
from megatron_mamba_cache.recurrences.gated_delta.tile_systems import TileSystems
from megatron_mamba_cache.recurrences.quantized_states import QuantizedStates, quantize
from megatron_mamba_cache.recurrences.request_tiles import TileShape, tile_shape
from tests.kernels.delta_steps import DeltaShape, DeltaSteps, random_steps
from tests.kernels.kernel_stand_ins import CountedKernel
from tests.kernels.packed_batches import (
    RowSpec,
    assert_untouched,
    pack_rows,
    poisoned_pool,
    row_slices,
    same_bits,
    scan_specs,
    written_slots,
)

SMALL = DeltaShape(key_heads=2, value_heads=4, key_dim=16, value_dim=32)
ODD = DeltaShape(key_heads=1, value_heads=3, key_dim=8, value_dim=24)
QWEN = DeltaShape(key_heads=2, value_heads=4, key_dim=128, value_dim=128)
NUM_SLOTS = 13
compiled_only = pytest.mark.skipif(INTERPRETED, reason="the interpreter has neither bf16 products nor right fp8")


@pytest.fixture(autouse=True, scope="module")
def counted_kernel() -> Iterator[CountedKernel]:
    with pytest.MonkeyPatch.context() as patch:
        counted = CountedKernel(scan_portable._scan_kernel)
        patch.setattr(scan_portable, "_scan_kernel", counted)
        yield counted


@pytest.fixture(autouse=True)
def only_where_kernels_run(device: str) -> None:
    if not launches_kernel(torch.empty(0, device=device)):
        pytest.skip("kernels neither compile nor are interpreted here; test_interpreted runs this file again")


def make_pool(shape: DeltaShape, dtype: torch.dtype, device: str, filled: tuple[int, ...] = ()) -> Tensor:
    return poisoned_pool((NUM_SLOTS, *shape.state), dtype, device, filled)


def num_tokens(specs: list[RowSpec]) -> int:
    return sum(spec.length for spec in specs)


def scan(steps: DeltaSteps, pool: Tensor, rows: PrefillBatch, tile: TileShape) -> Tensor:
    return scan_tiles(steps.tokens, steps.gates, pool, rows, tile)


def tile_of(grain: int, dtype: torch.dtype) -> TileShape:
    shape = tile_shape(grain, dtype)
    assert shape is not None
    return shape


def largest_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double().cpu() - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def check_against_recurrence(
    specs: list[RowSpec], grain: int, steps: DeltaSteps, tile: TileShape, tolerance: float
) -> None:
    device = str(steps.tokens.v.device)
    state = (steps.tokens.v.shape[1], steps.tokens.k.shape[2], steps.tokens.v.shape[2])
    pool = poisoned_pool((NUM_SLOTS, *state), torch.float32, device, filled=(1, 11))
    before = pool.clone()
    y = scan(steps, pool, pack_rows(specs, grain, device, num_padding=2), tile)
    steps = steps.cpu()
    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        initial = before[spec.initial] if spec.initial != PAD_SLOT else torch.zeros_like(before[0])
        expected, states = steps[tokens].recurrence(initial.cpu())
        assert spec.length == 0 or largest_error(y[tokens], expected) <= tolerance
        for position, slot in [(spec.start + spec.length, spec.final), *spec.boundaries.items()]:
            if slot != PAD_SLOT:
                assert largest_error(pool[slot], states[position - spec.start]) <= tolerance
    assert (y[num_tokens(specs) :] == 0).all()
    assert_untouched(before, pool, written_slots(specs))


@pytest.mark.parametrize("shape", [SMALL, ODD], ids=["small", "odd"])
@pytest.mark.parametrize(("grain", "order"), [(8, 1), (16, -1), (48, 1)])
def test_float32_delta_scan_matches_the_recurrence(
    shape: DeltaShape, grain: int, order: int, device: str, counted_kernel: CountedKernel
) -> None:
    torch.manual_seed(grain)
    specs, launched = scan_specs(grain)[::order], counted_kernel.launches
    steps = random_steps(num_tokens(specs) + 3, device, shape)
    check_against_recurrence(specs, grain, steps, tile_of(grain, torch.float32), 5e-6)
    assert counted_kernel.launches == launched + 1


@pytest.mark.parametrize("length", [32, 64])
def test_delta_scan_matches_the_recurrence_with_tiles_of_several_blocks(length: int, device: str) -> None:
    """Use the long tiles of bf16 tokens with float32 tokens."""
    torch.manual_seed(length)
    specs = scan_specs(length)[-3:]
    steps = random_steps(num_tokens(specs), device, SMALL)
    check_against_recurrence(specs, length, steps, TileShape(length, length, 1), 5e-6)


def test_delta_scan_is_accurate_when_strong_decays_precede_weak_ones(device: str) -> None:
    """A token that decays the state to 0 is followed by tokens with weak decays."""
    torch.manual_seed(4)
    specs = scan_specs(32)
    steps = random_steps(num_tokens(specs), device, SMALL)
    steps.tokens.a[::9] += 80
    check_against_recurrence(specs, 32, steps, tile_of(32, torch.float32), 5e-6)


def test_delta_scan_is_accurate_when_all_keys_are_equal(device: str) -> None:
    """The inverse has the largest intermediate values if all keys are equal and beta is 1."""
    torch.manual_seed(5)
    steps = random_steps(64, device, SMALL)
    steps.tokens.k.copy_(steps.tokens.k[:1].clone())
    steps.tokens.b.fill_(20)
    steps.tokens.a.fill_(-20)
    check_against_recurrence([RowSpec(64, final=0)], 64, steps, TileShape(64, 64, 1), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("length", [16, 64])
def test_float32_delta_scan_stays_accurate_over_4096_tokens(length: int, device: str) -> None:
    torch.manual_seed(6)
    shape = DeltaShape(1, 2, 32, 32) if INTERPRETED else QWEN
    steps = random_steps(4096, device, shape)
    check_against_recurrence([RowSpec(4096, final=0)], 64, steps, TileShape(length, length, 64 // length), 1e-5)


@compiled_only
@pytest.mark.parametrize("is_portable", [False, True])
@pytest.mark.parametrize("shape", [QWEN, DeltaShape(1, 3, 64, 192), DeltaShape(2, 8, 128, 64)])
def test_bf16_delta_scan_error_is_within_rounding(
    shape: DeltaShape, is_portable: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_portable:
        monkeypatch.setattr(scan_module, "_runs_gluon", lambda device: False)
    torch.manual_seed(7)
    specs = scan_specs(64)
    steps = random_steps(num_tokens(specs) + 3, device, shape, dtype=torch.bfloat16)
    check_against_recurrence(specs, 64, steps, tile_of(64, torch.bfloat16), 8e-3)


@compiled_only
def test_bf16_delta_scan_is_accurate_when_keys_are_equal_or_decays_strong(device: str) -> None:
    torch.manual_seed(5)
    steps = random_steps(200, device, QWEN, dtype=torch.bfloat16)
    steps.tokens.k[:70].copy_(steps.tokens.k[:1].clone())
    steps.tokens.b[:70] = 20
    steps.tokens.a[:70] = -20
    steps.tokens.a[80::9] += 80
    check_against_recurrence([RowSpec(200, final=0)], 64, steps, tile_of(64, torch.bfloat16), 1e-2)


FORMS = [
    pytest.param(SMALL, 16, torch.float32, id="float32"),
    pytest.param(SMALL, 32 if INTERPRETED else 64, torch.float32, id="several-tiles"),
    pytest.param(ODD, 8, torch.float32, id="odd"),
    pytest.param(ODD, 16, torch.bfloat16, marks=compiled_only, id="odd-bfloat16"),
    pytest.param(QWEN, 64, torch.bfloat16, marks=compiled_only, id="bfloat16"),
    pytest.param(QWEN, 128, torch.bfloat16, marks=compiled_only, id="several-tiles-bfloat16"),
]


@pytest.mark.parametrize(("shape", "grain", "dtype"), FORMS)
@pytest.mark.parametrize("neighbours", [([], []), ([3, 20 if INTERPRETED else 70], []), ([1], [37, 0, 1])])
def test_delta_scan_resumed_at_any_block_end_is_bit_equal(
    shape: DeltaShape, grain: int, dtype: torch.dtype, neighbours: tuple[list[int], list[int]], device: str
) -> None:
    torch.manual_seed(grain)
    length, tile = 3 * grain + 5, tile_of(grain, dtype)
    steps = random_steps(length, device, shape, dtype=dtype)
    slots = {position: position // grain for position in range(grain, length, grain)}
    whole = make_pool(shape, torch.float32, device)
    expected = scan(steps, whole, pack_rows([RowSpec(length, final=0, boundaries=slots)], grain, device), tile)
    before, after = ([RowSpec(n) for n in lengths] for lengths in neighbours)
    for cut, cut_slot in slots.items():
        pool = make_pool(shape, torch.float32, device)
        pool[cut_slot] = whole[cut_slot]
        later = {position: slot for position, slot in slots.items() if position > cut}
        specs = [*before, RowSpec(length - cut, cut, cut_slot, 0, later), *after]
        others = [[random_steps(s.length, device, shape, dtype=dtype) for s in side] for side in (before, after)]
        packed = steps[cut:].joined_with(*others)
        y = scan(packed, pool, pack_rows(specs, grain, device, num_padding=1), tile)
        assert same_bits(y[row_slices(specs)[len(before)]], expected[cut:])
        assert all(same_bits(pool[slot], whole[slot]) for slot in [0, *later.values()])


@compiled_only
def test_delta_scan_is_bit_equal_with_wide_and_narrow_tiles(device: str) -> None:
    torch.manual_seed(2)
    shape, grain, tile = DeltaShape(16, 32, 128, 128), 64, tile_of(64, torch.bfloat16)
    steps = random_steps(300, device, shape, dtype=torch.bfloat16)
    tilings, results = set(), []
    choose_tiling: Callable[[DeltaTokens, int], object] = scan_portable.choose_tiling
    if scan_module._fits_hopper(steps.tokens, tile):
        from megatron_mamba_cache.recurrences.gated_delta import scan_hopper

        choose_tiling = scan_hopper.choose_tiling
    for neighbours in ([], [70, 128]):
        specs = [RowSpec(300, final=0, boundaries={64: 1, 192: 2}), *(RowSpec(n) for n in neighbours)]
        others = [random_steps(n, device, shape, dtype=torch.bfloat16) for n in neighbours]
        packed, pool = steps.joined_with([], others), make_pool(shape, torch.float32, device)
        tilings.add(choose_tiling(packed.tokens, len(specs)))
        results.append((scan(packed, pool, pack_rows(specs, grain, device), tile)[:300], pool[:3]))
    assert len(tilings) == 2
    assert all(same_bits(alone, together) for alone, together in zip(*results, strict=True))


@pytest.mark.parametrize(("shape", "grain", "dtype"), FORMS)
def test_delta_scan_of_a_request_ignores_neighboring_requests(
    shape: DeltaShape, grain: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(1)
    length = grain + 5
    clean, poison = (random_steps(n, device, shape, dtype=dtype) for n in (length, 3))
    poison.poison(slice(None))
    packed = clean.joined_with([poison], [poison, clean, poison])
    specs = [RowSpec(3), RowSpec(length, final=0), RowSpec(3, final=1), RowSpec(length, final=2)]
    pool = make_pool(shape, torch.float32, device)
    y = scan(packed, pool, pack_rows(specs, grain, device, 2), tile_of(grain, dtype))
    first, second = y[3 : 3 + length], y[6 + length : 6 + 2 * length]
    assert first.isfinite().all() and pool[0].isfinite().all()
    assert same_bits(first, second) and same_bits(pool[0], pool[2])
    assert (y[6 + 2 * length :] == 0).all()


@pytest.mark.parametrize(("shape", "grain", "dtype"), FORMS)
def test_delta_scan_casts_only_stored_states_and_carries_fp32_states(
    shape: DeltaShape, grain: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(2)
    specs, tile = scan_specs(grain), tile_of(grain, dtype)
    steps = random_steps(num_tokens(specs), device, shape, dtype=dtype)
    stored = make_pool(shape, torch.bfloat16, device, (1, 11))
    exact, rows = stored.float(), pack_rows(specs, grain, device)
    assert same_bits(scan(steps, stored, rows, tile), scan(steps, exact, rows, tile))
    written = sorted(written_slots(specs))
    assert same_bits(stored[written], exact[written].bfloat16())


@pytest.mark.parametrize(("shape", "grain", "dtype"), FORMS)
@pytest.mark.parametrize("values", [torch.int8, pytest.param(torch.float8_e4m3fn, marks=compiled_only)])
def test_delta_scan_quantizes_boundary_states_from_exact_states(
    shape: DeltaShape, grain: int, dtype: torch.dtype, values: torch.dtype, device: str
) -> None:
    torch.manual_seed(3)
    specs, tile = scan_specs(grain), tile_of(grain, dtype)
    steps = random_steps(num_tokens(specs), device, shape, dtype=dtype)
    rows, live = pack_rows(specs, grain, device), make_pool(shape, torch.float32, device, (1, 11))
    exact = live.clone()
    quantized = QuantizedStates(
        torch.full((NUM_SLOTS, *shape.state), 7, dtype=torch.int8, device=device).view(values),
        torch.full((NUM_SLOTS, shape.value_heads, shape.value_dim), 7.0, device=device),
    )
    y = scan_tiles(steps.tokens, steps.gates, live, rows, tile, quantized)
    assert same_bits(y, scan(steps, exact, rows, tile))
    at_boundaries = {slot for spec in specs for slot in spec.boundaries.values()}
    for slot in range(NUM_SLOTS):
        if slot in at_boundaries:
            wanted, scales = quantize(exact[slot], values)
            assert same_bits(quantized.values[slot].view(torch.int8), wanted.view(torch.int8))
            assert same_bits(quantized.scales[slot], scales)
        else:
            assert (quantized.values[slot].view(torch.int8) == 7).all() and (quantized.scales[slot] == 7).all()
            assert same_bits(live[slot], exact[slot])


def test_delta_scan_accepts_input_views_and_a_strided_state_pool(device: str) -> None:
    torch.manual_seed(8)
    specs = scan_specs(16)
    steps = random_steps(num_tokens(specs), device, SMALL)
    t = steps.tokens
    wide = torch.cat([t.q.flatten(1), t.k.flatten(1), t.v.flatten(1), t.b, t.a], dim=1)
    q, k, v, b, a = wide.split([t.q[0].numel(), t.k[0].numel(), t.v[0].numel(), 4, 4], dim=1)
    views = DeltaTokens(q.unflatten(1, (2, 16)), k.unflatten(1, (2, 16)), v.unflatten(1, (4, 32)), b, a)
    layers = torch.full((NUM_SLOTS, 2, *SMALL.state), 5.0, device=device)
    layers[:, 1] = make_pool(SMALL, torch.float32, device, (1, 11))
    plain, rows, tile = layers[:, 1].clone(), pack_rows(specs, 16, device), tile_of(16, torch.float32)
    y = scan(replace(steps, tokens=views), layers[:, 1], rows, tile)
    assert same_bits(y, scan(steps, plain, rows, tile))
    assert same_bits(layers[:, 1], plain) and (layers[:, 0] == 5).all()


@pytest.mark.parametrize(
    ("dtype", "grain"), [(torch.float32, 64), (torch.float32, 8), pytest.param(torch.bfloat16, 64, marks=compiled_only)]
)
def test_delta_scan_allocates_exactly_the_planned_chunk_memory(
    dtype: torch.dtype, grain: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated, empty = list[TileSystems](), TileSystems.empty

    def record(*arguments: Any) -> TileSystems:
        allocated.append(empty(*arguments))
        return allocated[-1]

    monkeypatch.setattr(TileSystems, "empty", record)
    rows = pack_rows([RowSpec(1) for _ in range(NUM_SLOTS)] + [RowSpec(grain + 1)], grain, device)
    steps = random_steps(NUM_SLOTS + grain + 1, device, SMALL).cast(dtype)
    delta_scan(steps.tokens, steps.gates, make_pool(SMALL, torch.float32, device), rows, grain)
    (found,) = allocated
    monkeypatch.undo()
    sizes = GatedDelta(SMALL.key_heads, SMALL.value_heads, SMALL.key_dim, SMALL.value_dim, d_conv=4, grain=grain)
    assert found.num_bytes == (NUM_SLOTS + 2) * sizes.chunk_bytes(dtype) > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_delta_scan_uses_the_reference_for_other_dtypes(
    dtype: torch.dtype, device: str, counted_kernel: CountedKernel
) -> None:
    steps, launched = random_steps(20, device, SMALL, dtype=dtype), counted_kernel.launches
    pool = torch.zeros(1, *SMALL.state, dtype=torch.float64, device=device)
    expected_pool, rows = pool.clone(), pack_rows([RowSpec(20, final=0)], 16, device)
    y = delta_scan(steps.tokens, steps.gates, pool, rows, 16)
    assert same_bits(y, delta_scan_ref(steps.tokens, steps.gates, expected_pool, rows))
    assert same_bits(pool, expected_pool) and counted_kernel.launches == launched
