from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_mamba_cache.errors import CacheCapacityError, CacheIntegrityError
from megatron_mamba_cache.policy.eviction_rules import LeastRecentlyUsed
from megatron_mamba_cache.policy.identifiers import BlockId, BlockKey, SlotId
from megatron_mamba_cache.policy.index_pools import CacheSpace
from megatron_mamba_cache.policy.kv_block_pool import KVBlockPool
from megatron_mamba_cache.policy.pools import CachePools
from megatron_mamba_cache.policy.slabs import SlabSpace
from megatron_mamba_cache.policy.slot_pool import NoTexts
from tests.policy.split_space import SplitSpace

LAST = -1


def new_pools(num_blocks: int, num_slots: int = 20) -> CachePools:
    return CachePools.over(SplitSpace(num_blocks, num_slots), LeastRecentlyUsed(), block_size=1)


def keys_of(path: Sequence[int]) -> list[BlockKey]:
    """Return readable keys for a chain of one-token blocks: each key is the path to the block in base 100."""
    keys, key = [], 0
    for token in path:
        key = key * 100 + token
        keys.append(BlockKey(key))
    return keys


def hold(pools: CachePools, path: Sequence[int]) -> list[BlockId]:
    """Match, acquire, allocate and register the chain, as a request does."""
    kv, keys = pools.kv, keys_of(path)
    blocks = kv.longest_match(keys)
    num_matched = len(blocks)
    kv.acquire(blocks)
    blocks += kv.allocate(len(keys) - num_matched)
    for index in range(num_matched, len(keys)):
        blocks[index] = kv.register(blocks[index], keys[index], blocks[index - 1] if index else None)
    kv.check_integrity()
    return blocks


def cache(pools: CachePools, path: Sequence[int], states_at: Collection[int] = (LAST,)) -> list[BlockId]:
    """Hold the chain, publish states after some of its blocks, and release it."""
    blocks = hold(pools, path)
    for index in states_at:
        pools.slots.publish(pools.slots.reserve()[0], blocks[index], num_tokens=pools.kv.depth(blocks[index]))
    pools.kv.release(blocks)
    pools.kv.check_integrity()
    return blocks


def registered(pools: CachePools) -> set[BlockId]:
    blocks = (BlockId(block) for block in range(pools.kv.num_blocks))
    return {block for block in blocks if pools.kv.key_of(block) is not None}


def snapshot(pools: CachePools) -> tuple[object, ...]:
    kv, slots = pools.kv, pools.slots
    blocks = [BlockId(block) for block in range(kv.num_blocks)]
    states = [(kv.num_refs(b), kv.key_of(b), kv.parent_of(b), kv.depth(b), slots.slot_of(b)) for b in blocks]
    return states, kv.count_by_kind(), kv.num_available, slots.count_by_owner(), slots.num_evicted


def test_all_blocks_of_a_new_pool_are_free() -> None:
    kv = new_pools(10).kv
    assert (kv.num_free, kv.num_cached, kv.num_referenced, kv.num_available) == (10, 0, 0, 10)
    kv.check_integrity()


@pytest.mark.parametrize(("indices", "block_size"), [(-1, 1), (1, 0)])
def test_pool_sizes_out_of_range_are_refused(indices: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 0"):
        KVBlockPool(indices, new_pools(1).slots, block_size=block_size)


def test_allocate_returns_distinct_blocks_with_one_reference() -> None:
    kv = new_pools(10).kv
    blocks = kv.allocate(9)
    assert sorted(blocks) == list(range(9))
    assert {kv.num_refs(block) for block in blocks} == {1}
    assert (kv.num_free, kv.num_referenced) == (1, 9)


def test_failed_allocation_changes_nothing_and_its_error_names_the_setting() -> None:
    pools = new_pools(4)
    pools.kv.allocate(2)
    cache(pools, [1])
    before = snapshot(pools)
    with pytest.raises(
        CacheCapacityError, match=r"3 KV blocks are needed, but 1 are free and 1 evictable.*buffer-size-gb"
    ):
        pools.kv.allocate(3)
    assert snapshot(pools) == before
    assert len(pools.kv.allocate(2)) == 2


def test_ten_identical_prompts_share_the_blocks_of_the_first() -> None:
    pools = new_pools(10)
    first = hold(pools, [1, 2, 3])
    available = pools.kv.num_available
    for _ in range(9):
        assert hold(pools, [1, 2, 3]) == first
    assert pools.kv.num_available == available
    assert [pools.kv.num_refs(block) for block in first] == [10, 10, 10]


def test_prompt_that_differs_in_its_third_block_shares_two_blocks() -> None:
    pools = new_pools(10)
    first, second = hold(pools, [1, 2, 3]), hold(pools, [1, 2, 4])
    assert second[:2] == first[:2] and second[2] != first[2]
    assert pools.kv.num_referenced == 4


def test_prompt_matches_only_cached_blocks_before_a_gap() -> None:
    pools = new_pools(10)
    blocks = cache(pools, [1, 2, 3])
    keys = keys_of([1, 2, 3])
    assert pools.kv.longest_match([keys[0], BlockKey(77), keys[2]]) == blocks[:1]
    assert pools.kv.longest_match([BlockKey(77), *keys]) == []


def test_prefix_match_changes_no_pool_state() -> None:
    pools = new_pools(2)
    (old,) = cache(pools, [1])
    cache(pools, [2])
    before = snapshot(pools)
    assert pools.kv.longest_match(keys_of([1])) == [old]
    assert pools.kv.find(BlockKey(1)) == old
    assert pools.kv.unreferenced([old]) == [old]
    assert snapshot(pools) == before
    assert pools.kv.allocate(1) == [old]


def test_unregistered_block_is_never_matched() -> None:
    pools = new_pools(3)
    blocks = pools.kv.allocate(2)
    pools.kv.register(blocks[0], BlockKey(1), None)
    assert pools.kv.longest_match(keys_of([1, 2])) == blocks[:1]


def test_last_release_caches_only_blocks_up_to_the_last_state() -> None:
    pools = new_pools(5)
    blocks = hold(pools, [1, 2, 3])
    pools.slots.publish(pools.slots.reserve()[0], blocks[1])
    pools.kv.acquire(blocks)
    pools.kv.release(blocks)
    assert pools.kv.num_referenced == 3
    pools.kv.release(blocks)
    assert (pools.kv.num_free, pools.kv.num_cached, pools.kv.num_referenced) == (3, 2, 0)
    assert pools.kv.longest_match(keys_of([1, 2, 3])) == blocks[:2]


def test_released_blocks_without_a_state_are_freed_not_cached() -> None:
    pools = new_pools(5)
    pools.kv.release(hold(pools, [1, 2, 3]))
    assert pools.kv.count_by_kind() == {"free": 5, "cached": 0, "in_use": 0}
    assert pools.kv.longest_match(keys_of([1])) == []
    pools.kv.check_integrity()


def test_block_released_by_every_owner_in_one_call_is_freed_once() -> None:
    kv = new_pools(3).kv
    (block,) = kv.allocate(1)
    kv.acquire([block])
    kv.release([block, block])
    assert kv.num_free == 3
    kv.check_integrity()
    assert len(set(kv.allocate(3))) == 3


def test_releasing_a_block_too_often_raises_and_changes_nothing() -> None:
    pools = new_pools(4)
    kept, lost = hold(pools, [1]), pools.kv.allocate(1)
    pools.kv.release(lost)
    before = snapshot(pools)
    for blocks in ([*kept, *lost], [*kept, *kept]):
        with pytest.raises(CacheIntegrityError, match="release"):
            pools.kv.release(blocks)
        assert snapshot(pools) == before
        pools.kv.check_integrity()


def test_acquiring_a_free_block_raises_and_changes_nothing() -> None:
    pools = new_pools(4)
    held = hold(pools, [1])
    before = snapshot(pools)
    with pytest.raises(CacheIntegrityError, match="free"):
        pools.kv.acquire([*held, BlockId(3)])
    assert snapshot(pools) == before


def test_block_id_out_of_range_is_refused() -> None:
    kv = new_pools(2).kv
    blocks = kv.allocate(2)
    for block in (-1, 2):
        for call in (kv.acquire, kv.release):
            with pytest.raises(ValueError, match="block ids"):
                call([BlockId(block)])
        with pytest.raises(ValueError, match="block ids"):
            kv.register(BlockId(block), BlockKey(1), None)
    assert [kv.num_refs(block) for block in blocks] == [1, 1]


def test_cached_blocks_are_freed_when_the_last_state_after_them_is_dropped() -> None:
    pools = new_pools(3)
    parent, leaf = cache(pools, [1, 2], states_at=(0, 1))
    pools.slots.drop(parent)
    assert registered(pools) == {parent, leaf}
    pools.slots.drop(leaf)
    assert registered(pools) == set()
    assert pools.kv.num_free == 3
    pools.kv.check_integrity()


def test_dropping_a_state_frees_only_blocks_after_the_previous_state() -> None:
    pools = new_pools(4)
    blocks = cache(pools, [1, 2, 3, 4], states_at=(1, 3))
    pools.slots.drop(blocks[3])
    assert pools.kv.longest_match(keys_of([1, 2, 3, 4])) == blocks[:2]
    pools.slots.drop(blocks[1])
    assert pools.kv.num_free == 4


def test_pruning_stops_at_blocks_in_use_or_before_a_state() -> None:
    pools = new_pools(5)
    blocks = cache(pools, [1, 2, 3, 4, 5], states_at=(0, 4))
    pools.slots.attach(NoTexts())  # so that nothing is pruned as the state is dropped
    assert pools.kv.prune(blocks[4]) == 0
    pools.slots.drop(blocks[4])
    pools.kv.acquire(blocks[:2])
    assert pools.kv.prune(blocks[3]) == 0  # not a leaf
    assert pools.kv.prune(blocks[4]) == 3
    assert registered(pools) == set(blocks[:2])
    pools.kv.release(blocks[:2])
    assert registered(pools) == {blocks[0]}
    pools.kv.check_integrity()


def test_parent_block_is_evicted_only_after_both_children() -> None:
    pools = new_pools(3)
    parent, left = cache(pools, [1, 2])
    right = cache(pools, [1, 3])[1]
    for num_held, left_over in ((1, {parent, right}), (2, set()), (3, set())):
        pools.kv.allocate(1)
        assert registered(pools) == left_over
        assert pools.kv.num_referenced == num_held
        pools.kv.check_integrity()
    assert left not in registered(pools)
    assert (pools.slots.num_evicted, pools.slots.num_blocks_evicted) == (2, 3)


def test_least_recently_used_child_is_evicted_before_its_parent() -> None:
    pools = new_pools(2)
    parent, leaf = cache(pools, [1, 2], states_at=(0, 1))
    pools.slots.touch_path([leaf])
    pools.slots.touch_path([parent])
    pools.kv.allocate(1)
    assert registered(pools) == {parent}


@pytest.mark.parametrize(
    ("space", "num_evicted"), [(SplitSpace(2, 2), 1), (SlabSpace(2, 2, 2), 2)], ids=["split", "slabs"]
)
def test_state_is_evicted_for_a_block_only_if_its_memory_can_hold_a_block(space: CacheSpace, num_evicted: int) -> None:
    pools = CachePools.over(deepcopy(space), LeastRecentlyUsed(), block_size=1)
    parent, leaf = cache(pools, [1, 2], states_at=(0, 1))
    pools.slots.touch_path([parent])
    pools.slots.touch_path([leaf])
    pools.kv.allocate(1)  # the parent's state is the older one, but its block stays for the leaf's
    assert pools.slots.num_evicted == num_evicted
    assert registered(pools) == ({parent} if num_evicted == 1 else set())
    pools.kv.check_integrity()


def test_state_becomes_a_text_end_when_later_blocks_are_freed() -> None:
    pools = new_pools(2)
    parent, leaf = cache(pools, [1, 2], states_at=(0, 1))
    pools.slots.drop(leaf)
    assert pools.kv.is_end(parent)
    assert sorted(pools.kv.allocate(2)) == [parent, leaf]


def test_parent_of_a_referenced_block_is_never_evicted() -> None:
    pools = new_pools(3)
    blocks = hold(pools, [1, 2])
    pools.kv.allocate(1)
    with pytest.raises(CacheCapacityError):
        pools.kv.allocate(1)
    assert pools.kv.longest_match(keys_of([1, 2])) == blocks


def test_least_recently_used_blocks_are_evicted_first() -> None:
    pools = new_pools(4)
    blocks = [cache(pools, [token])[0] for token in (1, 2, 3, 4)]
    for number in (1, 3, 2, 0):
        pools.slots.touch_path([blocks[number]])
    assert set(pools.kv.allocate(2)) == {blocks[1], blocks[3]}
    assert registered(pools) == {blocks[0], blocks[2]}


def test_blocks_in_use_are_not_available() -> None:
    pools = new_pools(4)
    shared = cache(pools, [1, 2])
    hold(pools, [3])
    assert pools.kv.num_available == 3
    assert pools.kv.unreferenced(shared) == shared
    pools.kv.acquire(shared)
    assert pools.kv.num_available == 1
    assert pools.kv.unreferenced(shared) == []
    pools.kv.allocate(1)
    assert pools.kv.longest_match(keys_of([1, 2])) == shared


def test_second_block_with_the_same_key_is_replaced_by_the_first() -> None:
    pools = new_pools(4)
    (known,) = hold(pools, [1])
    (twin,) = pools.kv.allocate(1)
    assert pools.kv.register(twin, BlockKey(1), None) == known
    assert (pools.kv.num_refs(known), pools.kv.num_refs(twin), pools.kv.num_free) == (2, 0, 3)
    assert pools.kv.key_of(twin) is None
    pools.kv.check_integrity()


def test_cached_block_that_replaced_a_duplicate_cannot_be_evicted() -> None:
    pools = new_pools(2)
    (known,) = cache(pools, [1])
    (twin,) = pools.kv.allocate(1)
    assert pools.kv.register(twin, BlockKey(1), None) == known
    assert pools.kv.num_refs(known) == 1
    assert pools.kv.allocate(1) == [twin]
    with pytest.raises(CacheCapacityError):
        pools.kv.allocate(1)
    pools.kv.check_integrity()


def test_registering_a_duplicate_moves_only_the_callers_reference() -> None:
    pools = new_pools(4)
    (known,) = hold(pools, [1])
    (twin,) = pools.kv.allocate(1)
    pools.kv.acquire([twin])
    assert pools.kv.register(twin, BlockKey(1), None) == known
    assert (pools.kv.num_refs(known), pools.kv.num_refs(twin)) == (2, 1)


def test_registering_a_block_again_with_its_key_changes_nothing() -> None:
    pools = new_pools(4)
    parent, block = hold(pools, [1, 2])
    before = snapshot(pools)
    assert pools.kv.register(block, keys_of([1, 2])[1], parent) == block
    assert snapshot(pools) == before
    pools.kv.check_integrity()


def test_invalid_registration_raises_and_changes_nothing() -> None:
    pools = new_pools(8)
    kv = pools.kv
    parent, block = hold(pools, [1, 2])
    (cached,) = cache(pools, [5])
    (new,) = kv.allocate(1)
    (unregistered,) = kv.allocate(1)
    key = BlockKey(77)
    before = snapshot(pools)
    wrong = {
        "another key": (block, key, parent),
        "has no reference": (BlockId(7), key, None),
        "must be registered and referenced": (new, key, unregistered),
        "already has parent": (new, keys_of([1, 2])[1], None),
    }
    for message, arguments in wrong.items():
        with pytest.raises(CacheIntegrityError, match=message):
            kv.register(*arguments)
        assert snapshot(pools) == before
    with pytest.raises(CacheIntegrityError, match="must be registered and referenced"):
        kv.register(new, key, cached)
    for no_key in (0, -1):
        with pytest.raises(ValueError, match=r"the key of block . must be positive"):
            kv.register(new, BlockKey(no_key), None)
    assert snapshot(pools) == before
    kv.check_integrity()


def test_registered_blocks_know_their_parent_and_depth() -> None:
    pools = new_pools(4)
    blocks = hold(pools, [1, 2, 3])
    assert [pools.kv.parent_of(block) for block in blocks] == [None, *blocks[:2]]
    assert [pools.kv.depth(block) for block in blocks] == [1, 2, 3]
    assert [pools.kv.key_of(block) for block in blocks] == keys_of([1, 2, 3])
    assert [pools.kv.is_end(block) for block in blocks] == [False, False, True]


def test_flush_forgets_every_key_and_keeps_blocks_in_use() -> None:
    pools = new_pools(6)
    held = hold(pools, [1, 2])
    cache(pools, [1, 3, 4])
    pools.kv.flush()
    pools.kv.check_integrity()
    assert pools.slots.cached_blocks() == []
    assert (pools.slots.num_evicted, pools.slots.num_blocks_evicted) == (0, 0)
    assert (pools.kv.num_free, pools.kv.num_cached, pools.kv.num_referenced) == (4, 0, 2)
    assert pools.kv.longest_match(keys_of([1, 2])) == []
    pools.kv.release(held)
    assert pools.kv.num_free == 6
    assert len(set(pools.kv.allocate(6))) == 6


def test_flush_frees_every_block_and_slot_of_a_cached_chain() -> None:
    pools = new_pools(4)
    blocks = hold(pools, [1, 2])
    for block in blocks:
        pools.slots.publish(pools.slots.reserve()[0], block, num_tokens=pools.kv.depth(block))
    pools.slots.touch_path(blocks)
    pools.kv.release(blocks)
    pools.slots.flush()
    pools.kv.flush()
    pools.slots.check_integrity()
    pools.kv.check_integrity()
    assert (pools.kv.num_free, pools.slots.num_free) == (4, 20)


def test_block_cannot_be_registered_with_a_parent_from_before_a_flush() -> None:
    pools = new_pools(6)
    held = hold(pools, [1])
    (new,) = pools.kv.allocate(1)
    pools.kv.flush()
    with pytest.raises(CacheIntegrityError, match="parent"):
        pools.kv.register(new, keys_of([1, 2])[1], held[0])


def test_check_integrity_detects_a_child_in_use_without_its_parent() -> None:
    pools = new_pools(4)
    parent, child = cache(pools, [1, 2])
    pools.kv.acquire([child])
    with pytest.raises(CacheIntegrityError, match=f"its parent {parent} has none"):
        pools.kv.check_integrity()


def test_check_integrity_detects_a_cached_block_with_no_state_after_it() -> None:
    pools = new_pools(4)
    blocks = cache(pools, [1, 2])
    pools.slots.slot_by_block.clear()
    with pytest.raises(CacheIntegrityError, match=rf"block {blocks[1]} is cached, but"):
        pools.kv.check_integrity()


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda kv: kv._tree._block_of.popitem(), "inverse"),
        (lambda kv: kv._tree._num_children.__setitem__(0, 9), "child counts"),
        (lambda kv: setattr(kv, "num_cached", 0), "and 0 are counted"),
        (lambda kv: kv._refs.__setitem__(3, 1), "but 0 and 2 are"),
    ],
)
def test_check_integrity_detects_each_broken_invariant(corrupt: object, message: str) -> None:
    pools = new_pools(4)
    cache(pools, [1, 2])
    corrupt(pools.kv)  # type: ignore[operator]
    with pytest.raises(CacheIntegrityError, match=message):
        pools.kv.check_integrity()


@dataclass(slots=True)
class Row:
    """A request: its tokens, its blocks, and the number of registered blocks."""

    path: list[int]
    blocks: list[BlockId]
    num_registered: int
    stale: bool = False


@dataclass(slots=True)
class Model:
    """Simple reference model of the pools: three dicts, searched for the blocks that a state makes reusable."""

    refs: dict[BlockId, int] = field(default_factory=dict)
    registered: dict[BlockKey, BlockId] = field(default_factory=dict)
    states: dict[BlockKey, int] = field(default_factory=dict)  # -> last use
    clock: int = 0

    def use(self, key: BlockKey) -> None:
        self.clock += 1
        self.states[key] = self.clock

    def is_held(self, key: BlockKey) -> bool:
        return bool(self.refs.get(self.registered[key]))

    def cached(self) -> set[BlockId]:
        return {block for key, block in self.registered.items() if not self.is_held(key)}

    def referenced(self) -> set[BlockId]:
        return {block for block, refs in self.refs.items() if refs}

    def prune(self) -> None:
        """Forget blocks that no request holds and that have no state at their end or after it."""
        self.registered = {
            key: block
            for key, block in self.registered.items()
            # Keys have two digits a block, so one key is a prefix of another's if it comes before it.
            if self.is_held(key) or any(str(state).startswith(str(key)) for state in self.states)
        }

    def evict(self, *, is_end: bool) -> None:
        """Evict the least recently used state; optionally only one without registered successors."""
        parents = {int(key) // 100 for key in self.registered} if is_end else set()
        del self.states[min(self.states.keys() - parents, key=self.states.__getitem__)]
        self.prune()


class PoolMachine(RuleBasedStateMachine):
    """Requests arrive, publish, grow and leave in small pools; the model predicts every count and every eviction."""

    tokens = st.integers(10, 12)
    spaces = st.sampled_from([None, (4, 2, 1), (6, 1, 2), (3, 4, 3)])

    def __init__(self) -> None:
        super().__init__()
        self.slabs: tuple[int, int, int] | None = None
        self.pools = new_pools(8, 4)
        self.model = Model()
        self.requests: list[Row] = []

    @initialize(slabs=spaces)
    def build(self, slabs: tuple[int, int, int] | None) -> None:
        self.slabs = slabs
        if slabs:
            self.pools = CachePools.over(SlabSpace(*slabs), LeastRecentlyUsed(), block_size=1)

    def _num_free(self, blocks: Collection[int], slots: Collection[int]) -> tuple[int, int]:
        """Return the numbers of free blocks and slots if these blocks and slots are taken."""
        if self.slabs is None:
            return 8 - len(blocks), 4 - len(slots)
        num_slabs, blocks_per_slab, slots_per_slab = self.slabs
        with_blocks = {block // blocks_per_slab for block in blocks}
        with_slots = {slot // slots_per_slab for slot in slots}
        assert not with_blocks & with_slots, "a slab holds blocks and states"
        return (
            (num_slabs - len(with_slots)) * blocks_per_slab - len(blocks),
            (num_slabs - len(with_blocks)) * slots_per_slab - len(slots),
        )

    def _slots(self) -> list[SlotId]:
        found = [self.pools.slots.slot_of(self.model.registered[key]) for key in self.model.states]
        assert None not in found
        return [slot for slot in found if slot is not None]

    def _free_now(self) -> tuple[int, int]:
        return self._num_free(self.model.cached() | self.model.referenced(), self._slots())

    def _available(self) -> tuple[int, int]:
        return self._num_free(self.model.referenced(), [])

    def _make_room(self, num_blocks: int, num_slots: int) -> None:
        """Evict from the model until enough are free: for blocks, those that leave with a state."""
        while not all(map(int.__le__, (num_blocks, num_slots), self._free_now())):
            self.model.evict(is_end=self.slabs is None and num_blocks > 0)

    def _allocate(self, num_blocks: int) -> list[BlockId]:
        if num_blocks > self._available()[0]:
            before = snapshot(self.pools)
            with pytest.raises(CacheCapacityError):
                self.pools.kv.allocate(num_blocks)
            assert snapshot(self.pools) == before
            return []
        self._make_room(num_blocks, 0)
        blocks = self.pools.kv.allocate(num_blocks)
        assert not any(self.model.refs.get(block) for block in blocks)
        self.model.refs.update(dict.fromkeys(blocks, 1))
        return blocks

    @rule(path=st.lists(tokens, min_size=1, max_size=4))
    def admit(self, path: list[int]) -> None:
        matched = self.pools.kv.longest_match(keys_of(path))
        num_new = len(path) - len(matched)
        unreferenced = self.pools.kv.unreferenced(matched)
        fits = self.pools.space.fits(num_new, 0, unreferenced)
        assert fits == (self._num_free(self.model.referenced() | set(matched), [])[0] >= num_new)
        if not fits:
            return
        self.pools.kv.acquire(matched)
        for block in matched:
            self.model.refs[block] = self.model.refs.get(block, 0) + 1
        blocks = [*matched, *self._allocate(num_new)]
        assert len(blocks) == len(path)
        self.requests.append(Row(path, blocks, len(matched)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=tokens)
    def grow(self, data: st.DataObject, token: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if len(request.path) < 6 and (blocks := self._allocate(1)):
            request.path.append(token)
            request.blocks += blocks

    @precondition(
        lambda self: any(request.num_registered < len(request.path) and not request.stale for request in self.requests)
    )
    @rule(data=st.data(), has_state=st.booleans())
    def publish(self, data: st.DataObject, has_state: bool) -> None:
        requests = [
            request for request in self.requests if request.num_registered < len(request.path) and not request.stale
        ]
        request = data.draw(st.sampled_from(requests))
        index = request.num_registered
        own, key = request.blocks[index], keys_of(request.path)[index]
        expected = self.model.registered.setdefault(key, own)
        held = self.pools.kv.register(own, key, request.blocks[index - 1] if index else None)
        assert held == expected
        if held != own:
            self.model.refs[own] -= 1
            self.model.refs[held] = self.model.refs.get(held, 0) + 1
        request.blocks[index] = held
        request.num_registered += 1
        if has_state and key not in self.model.states and self._available()[1]:
            self._make_room(0, 1)
            self.pools.slots.publish(self.pools.slots.reserve()[0], held, self.pools.kv.depth(held))
            self.model.use(key)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        self._release(request.blocks)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release_the_last_block(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if len(request.blocks) > 1:
            request.path.pop()
            self._release([request.blocks.pop()])
            request.num_registered = min(request.num_registered, len(request.path))

    def _release(self, blocks: list[BlockId]) -> None:
        self.pools.kv.release(blocks)
        for block in blocks:
            self.model.refs[block] -= 1
        self.model.prune()

    @precondition(lambda self: self.model.states)
    @rule(data=st.data(), is_dropped=st.booleans())
    def use_or_drop_a_state(self, data: st.DataObject, is_dropped: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.states)))
        block = self.model.registered[key]
        if is_dropped:
            self.pools.slots.drop(block)
            del self.model.states[key]
            self.model.prune()
        else:
            self.pools.slots.touch_path([block])
            self.model.use(key)

    @rule()
    def flush(self) -> None:
        self.pools.slots.flush()
        self.pools.kv.flush()
        self.model.registered, self.model.states = {}, {}
        for request in self.requests:
            request.stale = True

    @invariant()
    def pools_agree_with_model(self) -> None:
        kv, slots = self.pools.kv, self.pools.slots
        for part in (self.pools.space, kv, slots):
            part.check_integrity()
        assert (kv.num_cached, kv.num_referenced) == (len(self.model.cached()), len(self.model.referenced()))
        assert registered(self.pools) == set(self.model.registered.values())
        assert all(kv.num_refs(block) == refs for block, refs in self.model.refs.items())
        assert all(kv.find(key) == block for key, block in self.model.registered.items())
        assert set(slots.cached_blocks()) == {self.model.registered[key] for key in self.model.states}
        assert (kv.num_free, slots.num_free) == self._free_now()
        assert (kv.num_available, slots.num_available) == self._available()

    def teardown(self) -> None:
        for request in self.requests:
            self.pools.kv.release(request.blocks)
        assert self.pools.kv.num_available == self.pools.kv.num_blocks
        assert sorted(self.pools.kv.allocate(self.pools.kv.num_blocks)) == list(range(self.pools.kv.num_blocks))
        assert registered(self.pools) == set() and self.pools.slots.cached_blocks() == []


TestPoolAgainstModel = PoolMachine.TestCase
TestPoolAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
