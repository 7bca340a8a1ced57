"""Examples of slabs that change between KV blocks and states."""

import pytest

from megatron_mamba_cache.errors import CacheIntegrityError
from megatron_mamba_cache.policy.index_pools import IndexPool
from megatron_mamba_cache.policy.slabs import SlabSpace


def leave(indices: IndexPool, *numbers: int) -> None:
    """Unfix and release indices."""
    for index in numbers:
        indices.unfix(index)
        indices.release(index)


def test_block_and_slot_indices_are_numbered_by_slab() -> None:
    space = SlabSpace(3, blocks_per_slab=2, slots_per_slab=3)
    assert (space.blocks.num_indices, space.slots.num_indices) == (6, 9)
    assert space.blocks.take(1) == [0]
    assert space.slots.take(1) == [6]  # the first of slab 2


def test_blocks_use_the_lowest_slabs_and_states_the_highest() -> None:
    space = SlabSpace(4, blocks_per_slab=1, slots_per_slab=1)
    assert (space.blocks.take(2), space.slots.take(2)) == ([0, 1], [3, 2])
    leave(space.slots, 3, 2)
    leave(space.blocks, 0)
    assert (space.slots.take(1), space.blocks.take(2)) == ([3], [0, 2])


def test_memory_slab_changes_between_blocks_and_states_only_when_empty() -> None:
    space = SlabSpace(1, blocks_per_slab=2, slots_per_slab=1)
    space.blocks.take(2)
    leave(space.blocks, 0)
    assert (space.blocks.num_free, space.slots.num_free) == (1, 0)
    leave(space.blocks, 1)
    assert (space.blocks.num_free, space.slots.num_free) == (2, 1)
    assert space.slots.take(1) == [0]
    assert space.count_slabs() == {"unused": 0, "kv_blocks": 0, "states": 1}


def test_lowest_partly_used_slab_is_filled_before_an_unused_one() -> None:
    space = SlabSpace(4, blocks_per_slab=2, slots_per_slab=1)
    space.blocks.take(6)
    leave(space.blocks, 4, 1)
    assert space.blocks.take(3) == [1, 4, 6]


def test_slab_that_changed_use_twice_is_listed_once() -> None:
    space = SlabSpace(2, blocks_per_slab=2, slots_per_slab=2)
    for _ in range(3):
        leave(space.blocks, *space.blocks.take(3))
        leave(space.slots, *space.slots.take(3))
        space.check_integrity()
    assert sorted(space.blocks.take(4)) == [0, 1, 2, 3]


def test_slab_with_a_block_in_use_is_unavailable_for_states() -> None:
    space = SlabSpace(2, blocks_per_slab=4, slots_per_slab=1)
    blocks = space.blocks.take(8)
    for block in blocks[1:]:
        space.blocks.unfix(block)
    assert (space.blocks.num_available, space.slots.num_available) == (7, 1)
    space.blocks.unfix(blocks[0])
    assert (space.blocks.num_available, space.slots.num_available) == (8, 2)


def test_capacity_check_does_not_count_a_slab_for_both_uses() -> None:
    space = SlabSpace(2, blocks_per_slab=4, slots_per_slab=1)
    assert space.fits(8, 0) and space.fits(0, 2) and space.fits(4, 1)
    assert not space.fits(5, 1)
    assert not space.fits(4, 2)


def test_capacity_check_excludes_slabs_of_blocks_to_keep() -> None:
    space = SlabSpace(2, blocks_per_slab=4, slots_per_slab=1)
    first, second = space.blocks.take(2)
    for block in (first, second):
        space.blocks.unfix(block)
    assert space.fits(0, 2)
    assert not space.fits(0, 2, [first])
    assert space.fits(3, 1, [first]) and not space.fits(4, 1, [first])
    assert space.fits(2, 1, [first, second]) and not space.fits(3, 1, [first, second])


def test_capacity_check_excludes_slabs_of_states_to_keep() -> None:
    space = SlabSpace(2, blocks_per_slab=4, slots_per_slab=2)
    (slot,) = space.slots.take(1)
    space.slots.unfix(slot)
    assert space.fits(8, 0)
    assert space.fits(4, 1, (), (slot,)) and not space.fits(4, 2, (), (slot,)) and not space.fits(5, 1, (), (slot,))


def test_memory_without_slabs_has_no_room() -> None:
    space = SlabSpace(0, blocks_per_slab=4, slots_per_slab=2)
    assert space.fits(0, 0) and not space.fits(1, 0) and not space.fits(0, 1)
    assert (space.blocks.take(0), space.blocks.num_free, space.slots.num_available) == ([], 0, 0)
    space.check_integrity()


@pytest.mark.parametrize("numbers", [(-1, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_slab_counts_and_sizes_out_of_range_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="num_slabs must be at least 0"):
        SlabSpace(*numbers)


def _fix_in_unused_slab(space: SlabSpace) -> None:
    space._slabs.num_fixed[2] = 1
    space._slabs.num_open -= 1


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda space: space._slabs.unused.append(0), "listed as unused"),
        (lambda space: space._slabs.unused.pop(), "listed as unused"),
        (lambda space: space._slabs.unused.reverse(), "listed as unused"),
        (lambda space: space._slabs.use.__setitem__(3, -1), "listed as unused"),
        (lambda space: setattr(space._slabs, "num_open", 3), "num_open is ., but . slabs"),
        (lambda space: space._slabs.num_fixed.__setitem__(0, 0), "num_open is ., but . slabs"),
        (_fix_in_unused_slab, "unused slabs must not have fixed indices, but"),
        (lambda space: space._slabs.num_fixed.__setitem__(0, 2), "fixed and"),
        (lambda space: space._slabs.use.__setitem__(0, 1), "have free indices, but this pool has only"),
        (lambda space: space.blocks._free[2].append(9), "have free indices, but this pool has only"),
        (lambda space: space.blocks._free[0].__setitem__(0, space.blocks._free[0][1]), "must be distinct and inside"),
        (lambda space: space.blocks._partly.clear(), "the heap has slabs"),
        (lambda space: space.blocks._partly.append(0), "the heap has slabs"),
        (lambda space: space.blocks._free[0].pop(), "num_free is .+ and num_next_to_fixed"),
        (lambda space: setattr(space.blocks, "num_free", 9), "num_free is .+ and num_next_to_fixed"),
        (lambda space: setattr(space.slots, "num_next_to_fixed", 2), "num_free is .+ and num_next_to_fixed"),
    ],
)
def test_check_integrity_detects_each_broken_invariant(corrupt: object, message: str) -> None:
    space = SlabSpace(4, blocks_per_slab=4, slots_per_slab=2)
    space.blocks.take(1)
    space.slots.take(1)
    space.check_integrity()
    corrupt(space)  # type: ignore[operator]
    with pytest.raises(CacheIntegrityError, match=message):
        space.check_integrity()
