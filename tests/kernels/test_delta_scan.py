"""The kernels of the gated delta rule's scan follow the recurrence, whatever the packing, and resume bit for bit."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_mamba_cache.kernels.kernel_launches import INTERPRETED, launches_kernel
from megatron_mamba_cache.recurrences.gated_delta import scan_portable
from megatron_mamba_cache.recurrences.gated_delta.scan import scan_tiles
from megatron_mamba_cache.recurrences.row_tiles import TileShape, tile_shape
from megatron_mamba_cache.recurrences.rows import PAD_SLOT, PrefillRows
from tests.kernels.delta_steps import DeltaShape, DeltaSteps, random_steps
from tests.kernels.kernel_stand_ins import CountedKernel
from tests.kernels.packed_rows import (
    RowSpec,
    assert_untouched,
    pack_rows,
    poisoned_pool,
    row_slices,
    scan_specs,
    written_slots,
)

SMALL = DeltaShape(key_heads=2, value_heads=4, key_dim=16, value_dim=32)
ODD = DeltaShape(key_heads=1, value_heads=3, key_dim=8, value_dim=24)
QWEN = DeltaShape(key_heads=2, value_heads=4, key_dim=128, value_dim=128)
NUM_SLOTS = 13
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


def make_pool(shape: DeltaShape, dtype: torch.dtype, device: str, filled: tuple[int, ...] = ()) -> Tensor:
    return poisoned_pool((NUM_SLOTS, *shape.state), dtype, device, filled)


def num_tokens(specs: list[RowSpec]) -> int:
    return sum(spec.length for spec in specs)


def scan(steps: DeltaSteps, pool: Tensor, rows: PrefillRows, tile: TileShape) -> Tensor:
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
def test_float32_rows_follow_the_recurrence(
    shape: DeltaShape, grain: int, order: int, device: str, counted_kernel: CountedKernel
) -> None:
    torch.manual_seed(grain)
    specs, launched = scan_specs(grain)[::order], counted_kernel.launches
    steps = random_steps(num_tokens(specs) + 3, device, shape)
    check_against_recurrence(specs, grain, steps, tile_of(grain, torch.float32), 5e-6)
    assert counted_kernel.launches == launched + 1


@pytest.mark.parametrize("length", [32, 64])
def test_systems_of_several_blocks_are_solved(length: int, device: str) -> None:
    """As bf16 tokens are scanned, here with float32 ones."""
    torch.manual_seed(length)
    specs = scan_specs(length)[-3:]
    steps = random_steps(num_tokens(specs), device, SMALL)
    check_against_recurrence(specs, length, steps, TileShape(length, length, 1), 5e-6)
