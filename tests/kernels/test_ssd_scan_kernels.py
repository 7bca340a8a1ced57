"""The SSD scan kernels match the recurrence in any batch, and resumed results are bitwise equal.

The portable kernel runs compiled and interpreted; the Hopper kernel runs with every tiling if there is a Hopper GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED, launches_kernel
from megatron_mamba_cache.recurrences.batches import PAD_SLOT, PrefillBatch
from megatron_mamba_cache.recurrences.conv.conv import causal_conv
from megatron_mamba_cache.recurrences.mamba2 import scan_portable
from megatron_mamba_cache.recurrences.mamba2.inputs import SSMTokens, SSMWeights
from megatron_mamba_cache.recurrences.mamba2.recurrence import Mamba2
from megatron_mamba_cache.recurrences.mamba2.reference import ssd_scan_ref
from megatron_mamba_cache.recurrences.mamba2.scan import cut_rows, scan_tiles, ssd_scan
from megatron_mamba_cache.recurrences.mamba2.tiles import HopperTiling, cut_tiles, head_slices
from megatron_mamba_cache.recurrences.request_tiles import tile_shape
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
from tests.kernels.ssm_steps import SSMShape, SSMSteps, random_steps

SMALL = SSMShape(heads=4, head_dim=16, d_state=32, groups=2)
LARGE = SSMShape(heads=8, head_dim=64, d_state=128, groups=2)
SLICED = SSMShape(heads=3 if INTERPRETED else 11, head_dim=48, d_state=32, groups=1)
NANO_9B = SSMShape(heads=8, head_dim=80, d_state=128, groups=2)
NUM_SLOTS = 13
LONG_CHUNK = 32 if INTERPRETED else 64
SEVERAL_TILES = 32 if INTERPRETED else 128  # chunk size; the interpreter takes seconds for 64
TILINGS = [HopperTiling(heads, channels, stages) for heads in (1, 2) for channels in (32, 64) for stages in (2, 3)][:-1]
"""Tilings that fit in shared memory; three stages for two heads and float32 states do not."""
Scan = Callable[[SSMTokens, SSMWeights, Tensor, PrefillBatch, int], Tensor]
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]

# Triton's interpreter multiplies bf16 bit patterns as integers.
compiled_only = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no bf16 matrix products")


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


def scan_with(tiling: HopperTiling | None) -> Scan:
    """Return a function that scans with one kernel variant."""

    def scan(tokens: SSMTokens, weights: SSMWeights, pool: Tensor, rows: PrefillBatch, chunk_size: int) -> Tensor:
        shape = tile_shape(chunk_size, tokens.x.dtype)
        assert shape is not None
        return scan_tiles(tokens, weights, pool, rows, shape, tiling)

    return scan


def make_pool(shape: SSMShape, dtype: torch.dtype, device: str, filled: Sequence[int] = ()) -> Tensor:
    return poisoned_pool((NUM_SLOTS, *shape.state), dtype, device, filled)


def num_tokens(specs: Sequence[RowSpec]) -> int:
    return sum(spec.length for spec in specs)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double().cpu() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def check_against_recurrence(scan: Scan, specs: list[RowSpec], chunk: int, steps: SSMSteps, tolerance: float) -> None:
    device = str(steps.tokens.x.device)
    shape = SSMShape(*steps.tokens.x.shape[1:], steps.tokens.B.shape[2], steps.tokens.B.shape[1])
    pool = make_pool(shape, torch.float32, device, filled=(1, 11))
    before = pool.clone()
    y = scan(steps.tokens, steps.weights, pool, pack_rows(specs, chunk, device, num_padding=2), chunk)
    steps = steps.cpu()
    for spec, tokens in zip(specs, row_slices(specs), strict=True):
        initial = before[spec.initial] if spec.initial != PAD_SLOT else torch.zeros_like(before[0])
        expected, states = steps[tokens].recurrence(initial.cpu())
        assert relative_error(y[tokens], expected) <= tolerance
        for position, slot in [(spec.start + spec.length, spec.final), *spec.boundaries.items()]:
            if slot != PAD_SLOT:
                assert relative_error(pool[slot], states[position - spec.start]) <= tolerance
    assert (y[num_tokens(specs) :] == 0).all()
    assert_untouched(before, pool, written_slots(specs))


ORDERED_CHUNKS = [(8, 1), (16, -1), (48, 1), (64, -1), *([] if INTERPRETED else [(128, 1)])]
OTHER_ORDERS = [pytest.param(chunk, -order, marks=pytest.mark.slow) for chunk, order in ORDERED_CHUNKS]


@pytest.mark.parametrize(("chunk", "order"), ORDERED_CHUNKS + OTHER_ORDERS)
def test_float32_ssd_scan_matches_the_recurrence(
    chunk: int, order: int, device: str, counted_kernel: CountedKernel
) -> None:
    torch.manual_seed(chunk)
    specs = scan_specs(chunk)[::order]
    launched = counted_kernel.launches
    check_against_recurrence(ssd_scan, specs, chunk, random_steps(num_tokens(specs) + 3, device, SMALL), 1e-5)
    assert counted_kernel.launches == launched + 1


@pytest.mark.parametrize("chunk", [8, 16, LONG_CHUNK])
def test_ssd_scan_of_heads_cut_into_slices_matches_the_recurrence(
    chunk: int, device: str, counted_kernel: CountedKernel
) -> None:
    torch.manual_seed(chunk)
    specs, launched = scan_specs(chunk), counted_kernel.launches
    check_against_recurrence(ssd_scan, specs, chunk, random_steps(num_tokens(specs) + 3, device, SLICED), 1e-5)
    assert counted_kernel.launches == launched + 2  # 48 channels are split into 32 and 16


def test_ssd_scan_masks_lanes_beyond_the_channels_of_a_head_slice(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr(scan_portable, "lanes_of", lambda width, dtype: 2 * width)
    specs = scan_specs(16)
    check_against_recurrence(ssd_scan, specs, 16, random_steps(num_tokens(specs) + 3, device, SLICED), 1e-5)


@pytest.mark.parametrize("head_dim", range(16, 144, 16))
def test_ssd_scan_head_slices_cover_each_channel_once(head_dim: int) -> None:
    slices = head_slices(head_dim)
    assert [channel for one in slices for channel in range(one.first, one.first + one.width)] == [*range(head_dim)]
    assert all(one.width >= 16 and one.width & (one.width - 1) == 0 for one in slices)


@pytest.mark.parametrize("shift", [0.0, 3.0, 8.0])
def test_ssd_scan_with_strong_decays_matches_the_recurrence(shift: float, device: str) -> None:
    torch.manual_seed(12)
    specs = scan_specs(LONG_CHUNK)
    steps = random_steps(num_tokens(specs), device, SMALL)
    tokens = replace(steps.tokens, dt=steps.tokens.dt + shift)
    weights = replace(steps.weights, A_log=torch.log(torch.linspace(1.0, 16.0, SMALL.heads, device=device)))
    check_against_recurrence(ssd_scan, specs, LONG_CHUNK, replace(steps, tokens=tokens, weights=weights), 1e-5)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 0.9)])
def test_ssd_scan_matches_the_recurrence_with_groups_and_dt_limits(
    groups: int, limits: tuple[float, float], device: str
) -> None:
    torch.manual_seed(groups)
    specs = scan_specs(16)
    steps = random_steps(num_tokens(specs), device, replace(SMALL, groups=groups), dt_limit=limits)
    check_against_recurrence(ssd_scan, specs, 16, steps, 1e-5)


def test_ssd_scan_supports_a_number_of_heads_that_is_not_divisible_by_8(device: str) -> None:
    torch.manual_seed(0)
    specs = scan_specs(16)[:3]
    shape = SSMShape(heads=11, head_dim=16, d_state=16, groups=1)
    check_against_recurrence(ssd_scan, specs, 16, random_steps(num_tokens(specs) + 1, device, shape), 1e-5)


def test_ssd_scan_accepts_views_of_wider_tensors(device: str) -> None:
    torch.manual_seed(3)
    specs = scan_specs(16)
    steps = random_steps(num_tokens(specs), device, SMALL)
    t = steps.tokens
    wide = torch.cat([t.x.flatten(1), t.B.flatten(1), t.C.flatten(1)], dim=1)
    x, B, C = wide.split([t.x[0].numel(), t.B[0].numel(), t.C[0].numel()], dim=1)
    dt = torch.cat([t.dt, t.dt], dim=1)[:, : t.dt.shape[1]]
    views = SSMTokens(x.view(t.x.shape[0], 4, 16), dt, B.unflatten(1, (2, 32)), C.unflatten(1, (2, 32)))
    rows, pools = pack_rows(specs, 16, device), [make_pool(SMALL, torch.float32, device, (1, 11))]
    pools.append(pools[0].clone())
    y, y_views = (ssd_scan(s, steps.weights, pool, rows, 16) for s, pool in zip((t, views), pools, strict=True))
    assert same_bits(y, y_views) and same_bits(*pools)


FORMS = [
    pytest.param(None, SMALL, 16, torch.float32, id="portable-float32"),
    pytest.param(None, SMALL, 16, torch.bfloat16, marks=compiled_only, id="portable-bfloat16"),
    pytest.param(None, SMALL, SEVERAL_TILES, torch.float32, id="portable-several-tiles"),
    pytest.param(None, SLICED, 16, torch.float32, id="portable-sliced"),
    pytest.param(TILINGS[-1], NANO_9B, 128, torch.bfloat16, marks=on_hopper, id="hopper-sliced"),
    *(
        pytest.param(tiling, LARGE, 128, torch.bfloat16, marks=on_hopper, id=f"hopper-{tiling.heads}-{tiling.channels}")
        for tiling in (*TILINGS[1::2], TILINGS[-1])
    ),
]


@pytest.mark.parametrize(("tiling", "shape", "chunk", "dtype"), FORMS)
@pytest.mark.parametrize("neighbours", [([], []), ([3, 70 if INTERPRETED else 200], []), ([1], [37, 0, 1])])
def test_ssd_scan_resumed_at_any_block_end_is_bit_equal(
    tiling: HopperTiling | None,
    shape: SSMShape,
    chunk: int,
    dtype: torch.dtype,
    neighbours: tuple[list[int], list[int]],
    device: str,
) -> None:
    if tiling and device == "cpu":
        pytest.skip("a Hopper kernel")
    torch.manual_seed(chunk)
    scan = scan_with(tiling)
    length = 3 * chunk + 5
    steps = random_steps(length, device, shape).cast(dtype)
    slots = {position: position // chunk for position in range(chunk, length, chunk)}
    whole = make_pool(shape, torch.float32, device)
    rows = pack_rows([RowSpec(length, final=0, boundaries=slots)], chunk, device)
    expected = scan(steps.tokens, steps.weights, whole, rows, chunk)
    before, after = ([RowSpec(n) for n in lengths] for lengths in neighbours)
    for cut, cut_slot in slots.items():
        pool = make_pool(shape, torch.float32, device)
        pool[cut_slot] = whole[cut_slot]
        later = {position: slot for position, slot in slots.items() if position > cut}
        specs = [*before, RowSpec(length - cut, cut, cut_slot, 0, later), *after]
        others = [[random_steps(s.length, device, shape).cast(dtype) for s in side] for side in (before, after)]
        packed = steps[cut:].joined_with(*others)
        y = scan(packed.tokens, packed.weights, pool, pack_rows(specs, chunk, device), chunk)
        assert same_bits(y[row_slices(specs)[len(before)]], expected[cut:])
        assert all(same_bits(pool[slot], whole[slot]) for slot in [0, *later.values()])


@pytest.mark.parametrize(("tiling", "shape", "chunk", "dtype"), FORMS)
def test_ssd_scan_of_a_request_ignores_neighboring_requests(
    tiling: HopperTiling | None, shape: SSMShape, chunk: int, dtype: torch.dtype, device: str
) -> None:
    if tiling and device == "cpu":
        pytest.skip("a Hopper kernel")
    torch.manual_seed(1)
    length = chunk + 5
    clean, poison = (random_steps(n, device, shape).cast(dtype) for n in (length, 3))
    poison.poison(slice(None))
    packed = clean.joined_with([poison], [poison, clean, poison])
    specs = [RowSpec(3), RowSpec(length, final=0), RowSpec(3, final=1), RowSpec(length, final=2)]
    pool = make_pool(shape, torch.float32, device)
    y = scan_with(tiling)(packed.tokens, packed.weights, pool, pack_rows(specs, chunk, device, 2), chunk)
    first, second = y[3 : 3 + length], y[6 + length : 6 + 2 * length]
    assert first.isfinite().all() and pool[0].isfinite().all()
    assert same_bits(first, second) and same_bits(pool[0], pool[2])
    assert (y[6 + 2 * length :] == 0).all()


@pytest.mark.parametrize(("tiling", "shape", "chunk", "dtype"), FORMS)
def test_ssd_scan_casts_only_stored_states_and_carries_fp32_states(
    tiling: HopperTiling | None, shape: SSMShape, chunk: int, dtype: torch.dtype, device: str
) -> None:
    if tiling and device == "cpu":
        pytest.skip("a Hopper kernel")
    torch.manual_seed(2)
    specs = scan_specs(chunk)
    steps = random_steps(num_tokens(specs), device, shape).cast(dtype)
    stored = make_pool(shape, torch.bfloat16, device, (1, 11))
    exact = stored.float()
    rows = pack_rows(specs, chunk, device)
    y_stored, y_exact = (scan_with(tiling)(steps.tokens, steps.weights, pool, rows, chunk) for pool in (stored, exact))
    assert same_bits(y_stored, y_exact)
    written = sorted(written_slots(specs))
    assert same_bits(stored[written], exact[written].bfloat16())


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tiling", [pytest.param(t, marks=on_hopper) for t in TILINGS])
def test_hopper_ssd_scan_equals_the_portable_kernel_bit_for_bit(tiling: HopperTiling, pool_dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    specs = scan_specs(256)
    steps = random_steps(num_tokens(specs) + 7, "cuda", LARGE).cast(torch.bfloat16)
    rows = pack_rows(specs, 256, "cuda", num_padding=3)
    portable = make_pool(LARGE, pool_dtype, "cuda", (1, 11))
    hopper = portable.clone()
    expected = scan_with(None)(steps.tokens, steps.weights, portable, rows, 256)
    y = scan_with(tiling)(steps.tokens, steps.weights, hopper, rows, 256)
    assert same_bits(y, expected) and same_bits(hopper, portable)


SLOTS_APART = [
    pytest.param(None, torch.float32, id="portable"),
    *(
        pytest.param(TILINGS[-1], pool_dtype, marks=on_hopper, id=f"hopper-{pool_dtype}")
        for pool_dtype in (torch.float32, torch.bfloat16)
    ),
]


@pytest.mark.parametrize(("tiling", "pool_dtype"), SLOTS_APART)
def test_ssd_scan_is_bit_equal_with_states_far_apart_in_memory(
    tiling: HopperTiling | None, pool_dtype: torch.dtype, device: str
) -> None:
    """In slabs, states of other layers and KV blocks are between the states of one layer."""
    torch.manual_seed(6)
    shape, chunk, dtype = (SMALL, 16, torch.float32) if tiling is None else (LARGE, 128, torch.bfloat16)
    specs = scan_specs(chunk)
    steps = random_steps(num_tokens(specs), device, shape).cast(dtype)
    rows = pack_rows(specs, chunk, device)
    packed = make_pool(shape, pool_dtype, device, (1, 11))
    state_size = packed[0].numel()
    slot_stride = 3 * state_size + 16 * shape.head_dim
    memory = torch.full((NUM_SLOTS * slot_stride,), 5.0, dtype=pool_dtype, device=device)
    apart = memory[state_size:].as_strided(packed.shape, (slot_stride, *packed.stride()[1:]))
    apart.copy_(packed)
    scan = scan_with(tiling)
    y, y_apart = (scan(steps.tokens, steps.weights, pool, rows, chunk) for pool in (packed, apart))
    assert same_bits(y, y_apart) and same_bits(packed, apart.contiguous())
    apart.fill_(5.0)
    assert (memory == 5.0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("head_dim", "d_state"), [(64, 64), (128, 64), (128, 128), (80, 128), (112, 64)])
def test_ssd_scan_variants_match_the_recurrence_for_other_head_shapes(head_dim: int, d_state: int) -> None:
    torch.manual_seed(10)
    shape = SSMShape(heads=4, head_dim=head_dim, d_state=d_state, groups=2)
    specs = scan_specs(128)
    steps = random_steps(num_tokens(specs) + 3, "cuda", shape).cast(torch.bfloat16)
    rows = pack_rows(specs, 128, "cuda", num_padding=1)
    random_pool = make_pool(shape, torch.bfloat16, "cuda", (1, 11))
    check_against_recurrence(scan_with(None), specs, 128, steps, 4e-3)
    outcomes = []
    for tiling in (None, *TILINGS):
        for pool_dtype in (torch.float32, torch.bfloat16):
            pool = random_pool.to(pool_dtype, copy=True)
            outcomes.append((scan_with(tiling)(steps.tokens, steps.weights, pool, rows, 128), pool))
    for index, (y, pool) in enumerate(outcomes):
        assert same_bits(y, outcomes[0][0]) and same_bits(pool, outcomes[index % 2][1])


@compiled_only
@pytest.mark.parametrize("tiling", [None, *(pytest.param(t, marks=on_hopper) for t in TILINGS[-1:])])
def test_bf16_ssd_scan_error_is_within_bf16_rounding(tiling: HopperTiling | None, device: str) -> None:
    if tiling and device == "cpu":
        pytest.skip("a Hopper kernel")
    torch.manual_seed(6)
    specs = scan_specs(64)
    steps = random_steps(num_tokens(specs), device, LARGE if tiling else SMALL).cast(torch.bfloat16)
    check_against_recurrence(scan_with(tiling), specs, 64, steps, 4e-3)


def test_ssd_scan_uses_the_reference_for_unsupported_sizes(device: str, counted_kernel: CountedKernel) -> None:
    launched = counted_kernel.launches
    for shape, chunk in [(SSMShape(4, 5, 7, 2), 8), (SMALL, 100)]:
        torch.manual_seed(7)
        specs = scan_specs(chunk)
        check_against_recurrence(ssd_scan, specs, chunk, random_steps(num_tokens(specs), device, shape), 2e-5)
    assert counted_kernel.launches == launched


def test_ssd_scan_of_an_empty_step_changes_no_state(device: str) -> None:
    pool = make_pool(SMALL, torch.float32, device)
    before = pool.clone()
    for length, num_padding in [(0, 0), (0, 2), (3, 2)]:
        steps = random_steps(length, device, SMALL)
        y = ssd_scan(steps.tokens, steps.weights, pool, pack_rows([], 16, device, num_padding=num_padding), 16)
        assert y.shape == steps.tokens.x.shape and (y == 0).all()
    assert same_bits(before, pool)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="counts compilations")
def test_ssd_scan_does_not_recompile_for_other_batches_or_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    compiled: list[str] = []
    shape, chunk = (LARGE, 128) if IS_HOPPER else (SMALL, 128)

    def scan(specs: list[RowSpec], num_padding: int = 0) -> None:
        steps = random_steps(num_tokens(specs), "cuda", shape).cast(torch.bfloat16)
        pool = make_pool(shape, torch.float32, "cuda", (1, 11))
        for tiling in (None, *(TILINGS if IS_HOPPER else ())):
            rows = pack_rows(specs, chunk, "cuda", num_padding=num_padding)
            scan_with(tiling)(steps.tokens, steps.weights, pool, rows, chunk)

    scan([RowSpec(200, final=0)])
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **event: compiled.append(str(event["repr"])))
    scan([RowSpec(1, final=0)])
    scan([RowSpec(16, final=0), RowSpec(17, initial=1)])
    scan(scan_specs(chunk), num_padding=2)
    scan([RowSpec(chunk * 4, final=2, boundaries={chunk: 3})] * 1)
    assert compiled == []


def test_ssd_scan_tiles_are_consecutive_and_cut_at_absolute_positions(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, shape = 128, SMALL
    specs = [
        RowSpec(3 * chunk + 2, start=5, boundaries={chunk: 7}),
        RowSpec(70, start=300),
        RowSpec(chunk, start=chunk),
    ]
    steps = random_steps(num_tokens(specs), device, shape)
    rows = pack_rows(specs, chunk, device)
    cut = tile_shape(chunk, torch.bfloat16)
    assert cut is not None and cut.per_chunk == 2
    monkeypatch.setattr(torch, "empty", torch.ones)
    tiles = cut_tiles(steps.tokens.dt, steps.weights, rows, cut, shape.head_dim, torch.bfloat16)
    # Expected tiles: 5..64, 64..128 | ..192, ..256 | ..320, ..384 | ..388 ; 300..364, ..370 ; 128..192, ..256
    whole = [row * 2 + tile for row, tile in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)]]
    dt = steps.weights.time_steps(steps.tokens.dt, torch.float64)
    rate = steps.weights.decay(torch.float64)
    for tile, (first, last) in zip(
        whole, [(0, 59), (59, 123), (123, 187), (187, 251), (251, 315), (315, 379), (379, 386)], strict=True
    ):
        total = (dt[first:last].sum(0) * rate) / torch.log(torch.tensor(2.0, dtype=torch.float64))
        torch.testing.assert_close(tiles.decays[:, tile, 0, -1].double(), total, rtol=1e-5, atol=1e-5)
    monkeypatch.undo()
    sizes = Mamba2(shape.heads, shape.head_dim, shape.d_state, shape.groups, d_conv=4, grain=chunk)
    assert tiles.num_bytes == rows.chunk_requests.shape[0] * sizes.chunk_bytes(torch.bfloat16) > 0
    assert tiles.slots[1] == 7 and (tiles.y == 1).all()


def test_ssd_scan_error_names_the_mismatched_argument(device: str) -> None:
    steps = random_steps(20, device, SMALL)
    rows, pool = pack_rows([RowSpec(20)], 16, device), make_pool(SMALL, torch.float32, device)
    tokens, weights = steps.tokens, steps.weights
    cases = [
        (replace(tokens, dt=tokens.dt[:, :3]), weights, pool, "dt"),
        (replace(tokens, C=tokens.C[:, :1]), weights, pool, "C must have"),
        (tokens, replace(weights, D=weights.D[:2]), pool, r"D must have shape \(4,\)"),
        (tokens, weights, pool.transpose(2, 3), "ssm_pool"),
        (tokens, weights, pool[:, :, :, :8], "ssm_pool"),
        (replace(tokens, x=tokens.x.double()), weights, pool, "must have the same dtype"),
        (replace(tokens, B=tokens.B.transpose(1, 2).contiguous().transpose(1, 2)), weights, pool, "contiguous"),
    ]
    for bad_tokens, bad_weights, bad_pool, message in cases:
        with pytest.raises(ValueError, match=message):
            ssd_scan(bad_tokens, bad_weights, bad_pool, rows, 16)


def test_ssd_scan_kernel_matches_its_reference(device: str) -> None:
    torch.manual_seed(9)
    specs = scan_specs(32)
    steps = random_steps(num_tokens(specs), device, SMALL)
    rows = pack_rows(specs, 32, device)
    pools = [make_pool(SMALL, torch.float32, device, (1, 11))]
    pools.append(pools[0].clone())
    y, expected = (
        scan(steps.tokens, steps.weights, pool, rows, 32)
        for scan, pool in zip((ssd_scan, ssd_scan_ref), pools, strict=True)
    )
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pools[0], pools[1], rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("num_padding", [0, 3])
def test_ssd_scan_is_bit_equal_when_its_preparation_overlaps_the_conv(num_padding: int) -> None:
    """Each layer starts with a GEMM whose output is read by the scan's preparation and by the convolution."""
    torch.manual_seed(0)
    heads, head_dim, d_state, groups = 16, 64, 128, 2
    inner, conv_dim = heads * head_dim, heads * head_dim + 2 * groups * d_state
    specs = [RowSpec(200, start=256, initial=1, final=2, boundaries={384: 3}), RowSpec(77, final=4)]
    rows = pack_rows(specs, 128, "cuda", num_padding)
    weights = random_steps(1, "cuda", SSMShape(heads, head_dim, d_state, groups), dtype=torch.bfloat16).weights
    projections = [(torch.randn(conv_dim + heads, inner, device="cuda") * inner**-0.5).bfloat16() for _ in range(6)]
    taps, bias = torch.randn(conv_dim, 4, device="cuda").bfloat16(), torch.randn(conv_dim, device="cuda").bfloat16()
    x = torch.zeros(num_tokens(specs) + 43, inner, device="cuda", dtype=torch.bfloat16)
    windows = torch.zeros(5, 3, conv_dim, device="cuda", dtype=torch.bfloat16)
    pools = [windows, torch.zeros(5, heads, d_state, head_dim, device="cuda")]

    def layers(*, overlapped: bool) -> list[Tensor]:
        given, found = x, []
        for projection in projections:
            xbc, dt = (given @ projection.T).split([conv_dim, heads], dim=1)
            tiles = cut_rows(dt, weights, rows, 128, head_dim, xbc.dtype) if overlapped else None
            conv = causal_conv(xbc, taps, bias, pools[0], rows, after_cut=tiles is not None)
            parts = conv.split([inner, groups * d_state, groups * d_state], dim=1)
            B, C = (part.unflatten(1, (groups, -1)) for part in parts[1:])
            tokens = SSMTokens(parts[0].unflatten(1, (heads, -1)), dt, B, C)
            y = ssd_scan(tokens, weights, pools[1], rows, 128, tiles=tiles)
            given = (y.flatten(1).float() / y.float().abs().max().clamp_min(1e-3)).bfloat16()
            found += [conv, y, *(pool.clone() for pool in pools)]
        return found

    layers(overlapped=True)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers(overlapped=True)
    for seed in range(30):
        torch.manual_seed(seed)
        x.normal_()
        started = [torch.randn_like(pool) for pool in pools]
        for pool, start in zip(pools, started, strict=True):
            pool.copy_(start)
        graph.replay()
        torch.cuda.synchronize()
        seen = [tensor.clone() for tensor in found]
        for pool, start in zip(pools, started, strict=True):
            pool.copy_(start)
        expected = layers(overlapped=False)
        assert all(same_bits(a, b) for a, b in zip(seen, expected, strict=True)), f"seed {seed}"
