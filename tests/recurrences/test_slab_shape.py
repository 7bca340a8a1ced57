"""Slab sizes waste little memory for any sizes of states and blocks, and keep all of them aligned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.recurrences.slab_shape import SlabShape, UnitBytes

MIB = 2**20
NANO = UnitBytes(49_000_000, 256 * 6 * 1024, 512)


@pytest.mark.parametrize(
    ("unit", "shape"),
    [
        (NANO, SlabShape(31, 1)),
        (UnitBytes(103_000_000, 4 * MIB, 2048), SlabShape(24, 1)),
        (UnitBytes(168_000_000, 2 * MIB, 512), SlabShape(80, 1)),
        (UnitBytes(52_000_000, 4 * MIB, 2048), SlabShape(25, 2)),  # a bf16 state as large as 12.4 blocks
        (UnitBytes(MIB, 4 * MIB, 512), SlabShape(1, 4)),  # states smaller than blocks
    ],
)
def test_slab_size_is_the_smallest_that_wastes_little_memory(unit: UnitBytes, shape: SlabShape) -> None:
    found = SlabShape.fitting([unit])
    print(f"{unit}: {found}, loses {found.loss([unit]):.4f}")
    assert found == shape and found.loss([unit]) <= 0.03


@given(st.integers(10_000, 10**9), st.integers(10_000, 10**8), st.sampled_from([64, 512, 768]))
def test_slots_and_blocks_in_a_slab_are_aligned_and_large_enough(state: int, block: int, row: int) -> None:
    unit = UnitBytes(state, block * row, row)
    shape = SlabShape.fitting([unit])
    slab_bytes = shape.slab_bytes(unit)
    slot, unit_size = slab_bytes // shape.slots_per_slab, slab_bytes // shape.blocks_per_slab
    assert slot * shape.slots_per_slab == unit_size * shape.blocks_per_slab == slab_bytes
    assert slot >= state and unit_size >= unit.block
    assert slot % 256 == unit_size % 256 == unit_size % row == 0


@given(st.floats(1 / 200, 200), st.integers(MIB, 64 * MIB))
def test_slab_with_at_most_16_of_the_larger_unit_wastes_at_most_3_percent(ratio: float, smaller: int) -> None:
    larger = int(smaller * max(ratio, 1 / ratio))
    unit = UnitBytes(*((larger, smaller) if ratio >= 1 else (smaller, larger)), 512)
    shape = SlabShape.fitting([unit])
    print(f"{ratio:.4f}: {shape}, loses {shape.loss([unit]):.4f}")
    assert shape.loss([unit]) <= 0.032 and min(shape.blocks_per_slab, shape.slots_per_slab) <= 16


@pytest.mark.parametrize("shape", [SlabShape(31, 1), SlabShape(5, 4), SlabShape(1, 4)])
@pytest.mark.parametrize("num_states", [1, 2, 5])
def test_longest_allowed_request_fits_the_slabs_but_one_more_block_does_not(shape: SlabShape, num_states: int) -> None:
    for num_slabs in range(12):
        longest = shape.blocks_of_request(num_slabs, num_states)
        assert shape.slabs_of_request(longest + 1, num_states) > num_slabs
        assert not longest or shape.slabs_of_request(longest, num_states) <= num_slabs


def test_slab_shape_fits_the_largest_blocks_of_all_ranks() -> None:
    # A pipeline stage with more attention layers has larger blocks and the same states.
    heavier = UnitBytes(NANO.state, 2 * NANO.block, NANO.token_row)
    shape = SlabShape.fitting([NANO, heavier])
    assert shape.blocks_per_slab / shape.slots_per_slab <= 16
    for unit in (NANO, heavier):
        assert shape.slab_bytes(unit) >= max(shape.blocks_per_slab * unit.block, shape.slots_per_slab * unit.state)


@pytest.mark.parametrize("unit", [UnitBytes(NANO.state, 0, 0), UnitBytes(0, NANO.block, 512)])
def test_stage_with_one_layer_type_uses_the_slab_shape_of_other_stages(unit: UnitBytes) -> None:
    assert SlabShape.fitting([NANO, unit]) == SlabShape.fitting([NANO])
    assert SlabShape.fitting([NANO]).slab_bytes(unit) > 0
