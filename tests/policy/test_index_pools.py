"""Index pools with separate and shared memory, compared with a model that recounts after every operation."""

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_mamba_cache.errors import CacheIntegrityError
from megatron_mamba_cache.policy.index_pools import CacheSpace, FixedIndexPool, IndexPool
from megatron_mamba_cache.policy.slabs import SlabIndexPool, SlabSpace
from tests.policy.split_space import SplitSpace


def test_lowest_indices_are_allocated_first_and_released_indices_are_reused() -> None:
    indices = FixedIndexPool(4)
    assert indices.take(3) == [0, 1, 2]
    for index in (2, 0):
        indices.unfix(index)
        indices.release(index)
    assert indices.take(3) == [0, 2, 3]


def test_only_evictable_and_free_indices_are_available() -> None:
    indices = FixedIndexPool(4)
    first, second = indices.take(2)
    assert (indices.num_free, indices.num_available) == (2, 2)
    indices.unfix(first)
    assert (indices.num_free, indices.num_available) == (2, 3)
    indices.fix(first)
    indices.unfix(second)
    indices.release(second)
    assert (indices.num_free, indices.num_available) == (3, 3)


def test_blocks_and_slots_with_separate_memory_are_independent() -> None:
    space = SplitSpace(3, 2)
    (block,), (slot,) = space.blocks.take(1), space.slots.take(1)
    assert space.fits(2, 1) and not space.fits(3, 1) and not space.fits(2, 2)
    space.blocks.unfix(block)
    space.slots.unfix(slot)
    assert space.fits(3, 2) and not space.fits(3, 2, [block]) and not space.fits(3, 2, [], [slot])
    assert space.fits(2, 1, [block], [slot])


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(-1, 1), (1, -1)])
def test_negative_number_of_blocks_or_slots_is_refused(num_blocks: int, num_slots: int) -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 0"):
        SplitSpace(num_blocks, num_slots)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda indices: indices._free.append(indices._free[-1]),
        lambda indices: indices._free.__setitem__(0, indices._free[1]),
        lambda indices: setattr(indices, "num_free", 2),
        lambda indices: setattr(indices, "num_available", 2),
        lambda indices: setattr(indices, "num_available", 6),
    ],
)
def test_check_integrity_detects_corrupt_free_lists_and_counts(corrupt: object) -> None:
    space = SplitSpace(5, 5)
    space.blocks.take(2)
    corrupt(space.blocks)  # type: ignore[operator]
    with pytest.raises(CacheIntegrityError):
        space.check_integrity()


SPACES = st.one_of(
    st.builds(SplitSpace, st.integers(0, 7), st.integers(0, 4)),
    st.builds(SlabSpace, st.integers(0, 6), st.integers(1, 4), st.integers(1, 4)),
)
Use = int


class IndexPoolMachine(RuleBasedStateMachine):
    """Blocks and slots are taken, fixed, unfixed and released; the model records which are taken and fixed."""

    uses = st.integers(0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.space: CacheSpace = SplitSpace(0, 0)
        self.is_fixed: tuple[dict[int, bool], dict[int, bool]] = ({}, {})

    @initialize(space=SPACES)
    def build(self, space: CacheSpace) -> None:
        self.space = space

    def _indices(self, use: Use, space: CacheSpace | None = None) -> IndexPool:
        space = space or self.space
        return (space.blocks, space.slots)[use]

    def _evictable(self, use: Use) -> list[int]:
        return sorted(index for index, is_fixed in self.is_fixed[use].items() if not is_fixed)

    def _slabs(self, use: Use) -> Counter[int]:
        """Return the number of taken indices in each slab of a use."""
        indices = self._indices(use)
        assert isinstance(indices, SlabIndexPool)
        return Counter(index // indices.per_slab for index in self.is_fixed[use])

    @rule(use=uses, num_indices=st.integers(0, 9))
    def take(self, use: Use, num_indices: int) -> None:
        indices = self._indices(use)
        num_indices = min(num_indices, indices.num_free)
        fill = self._expected_fill(use, num_indices) if isinstance(indices, SlabIndexPool) else None
        taken = indices.take(num_indices)
        assert len(set(taken)) == num_indices and all(0 <= index < indices.num_indices for index in taken)
        assert not set(taken) & self.is_fixed[use].keys()
        self.is_fixed[use].update(dict.fromkeys(taken, True))
        if fill is not None:
            assert all(self._slabs(use)[slab] == count for slab, count in fill.items())

    def _expected_fill(self, use: Use, num_indices: int) -> dict[int, int]:
        """Return the expected contents of a use's slabs: the lowest are filled before another slab is opened."""
        indices, fill = self._indices(use), dict(self._slabs(use))
        assert isinstance(indices, SlabIndexPool)
        for slab in sorted(fill):
            more = min(indices.per_slab - fill[slab], num_indices)
            fill[slab] += more
            num_indices -= more
        return fill

    @precondition(lambda self: any(self.is_fixed))
    @rule(data=st.data(), num_indices=st.integers(1, 4))
    def change(self, data: st.DataObject, num_indices: int) -> None:
        """Unfix a fixed index; fix or release another."""
        use = data.draw(st.sampled_from([use for use in (0, 1) if self.is_fixed[use]]))
        indices, is_fixed = self._indices(use), self.is_fixed[use]
        for index in data.draw(st.lists(st.sampled_from(sorted(is_fixed)), max_size=num_indices, unique=True)):
            if is_fixed[index]:
                indices.unfix(index)
                is_fixed[index] = False
            elif data.draw(st.booleans()):
                indices.fix(index)
                is_fixed[index] = True
            else:
                indices.release(index)
                del is_fixed[index]

    def _emptied(self, kept: tuple[Sequence[int], Sequence[int]] = ((), ())) -> CacheSpace:
        """Return the space after releasing everything that is not fixed and need not stay."""
        space = deepcopy(self.space)
        for use in (0, 1):
            for index in self._evictable(use):
                if index not in kept[use]:
                    self._indices(use, space).release(index)
        return space

    @rule(data=st.data(), num_blocks=st.integers(0, 16), num_slots=st.integers(0, 8))
    def ask_what_fits(self, data: st.DataObject, num_blocks: int, num_slots: int) -> None:
        kept = [
            data.draw(st.lists(st.sampled_from(self._evictable(use)), unique=True)) if self._evictable(use) else []
            for use in (0, 1)
        ]
        space = self._emptied((kept[0], kept[1]))
        can_take = space.blocks.num_free >= num_blocks
        if can_take:
            space.blocks.take(num_blocks)
            can_take = space.slots.num_free >= num_slots
        assert self.space.fits(num_blocks, num_slots, *kept) == can_take

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        self.space.check_integrity()
        emptied = self._emptied()
        emptied.check_integrity()
        for use in (0, 1):
            indices = self._indices(use)
            assert indices.num_available == self._indices(use, emptied).num_free
            if isinstance(indices, SlabIndexPool):
                num_open = indices.num_indices // indices.per_slab - len(self._slabs(1 - use))
                assert indices.num_free == num_open * indices.per_slab - len(self.is_fixed[use])
            else:
                assert indices.num_free == indices.num_indices - len(self.is_fixed[use])

    @invariant()
    def a_slab_serves_one_use(self) -> None:
        if isinstance(self.space, SlabSpace):
            blocks, states = set(self._slabs(0)), set(self._slabs(1))
            assert not blocks & states
            num_unused = self.space.num_slabs - len(blocks | states)
            assert self.space.count_slabs() == {
                "unused": num_unused,
                "kv_blocks": len(blocks),
                "states": len(states),
            }

    def teardown(self) -> None:
        for use in (0, 1):
            indices = self._indices(use)
            for index, is_fixed in self.is_fixed[use].items():
                if is_fixed:
                    indices.unfix(index)
                indices.release(index)
        self.space.check_integrity()
        for use in (0, 1):
            indices = self._indices(use)
            assert indices.num_free == indices.num_available == indices.num_indices


TestIndexPoolsAgainstModel = IndexPoolMachine.TestCase
TestIndexPoolsAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
