from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megatron_mamba_cache.errors import CacheCapacityError, CacheIntegrityError
from megatron_mamba_cache.policy.eviction_rules import LeastRecentlyUsed
from megatron_mamba_cache.policy.identifiers import BlockId, BlockKey, SlotId
from megatron_mamba_cache.policy.index_pools import FixedIndexPool
from megatron_mamba_cache.policy.pools import CachePools
from megatron_mamba_cache.policy.slot_owners import SlotOwner
from megatron_mamba_cache.policy.slot_pool import SlotPool
from tests.policy.split_space import SplitSpace


def cache(pool: SlotPool, *blocks: int) -> list[SlotId]:
    slots = []
    for block in blocks:
        slots += pool.reserve()
        pool.publish(slots[-1], BlockId(block))
    pool.check_integrity()
    return slots


def cached_blocks(pool: SlotPool, num_blocks: int = 10) -> list[int]:
    return [block for block in range(num_blocks) if pool.slot_of(BlockId(block)) is not None]


def snapshot(pool: SlotPool) -> tuple[object, ...]:
    owners = [pool.owner_of(SlotId(slot)) for slot in range(pool.num_slots)]
    return owners, cached_blocks(pool), pool.num_available, pool.num_evicted, pool.count_by_owner()


def test_new_slot_pool_is_free_and_allocates_low_numbers_first() -> None:
    pool = SlotPool(3)
    assert pool.count_by_owner() == {"free": 3, "live": 0, "reserved": 0, "cached": 0, "draft": 0}
    assert [pool.take_live(), *pool.reserve(2)] == [0, 1, 2]
    pool.check_integrity()


def test_states_of_three_blocks_are_in_three_slots() -> None:
    pool = SlotPool(5)
    assert len(set(cache(pool, 0, 1, 2))) == 3
    assert pool.count_by_owner()["cached"] == 3


def test_block_has_at_most_one_state_slot() -> None:
    pool = SlotPool(5)
    (slot,) = cache(pool, 0)
    (second,) = pool.reserve()
    with pytest.raises(CacheIntegrityError, match="already has a state"):
        pool.publish(second, BlockId(0))
    assert pool.slot_of(BlockId(0)) == slot
    assert pool.owner_of(second) is SlotOwner.RESERVED
    pool.cancel(second)
    assert pool.count_by_owner()["cached"] == 1


def test_least_recently_used_states_are_evicted_first() -> None:
    pool = SlotPool(4)
    cache(pool, 0, 1, 2, 3)
    for block in (1, 3, 2, 0):
        pool.touch_path([BlockId(block)])
    pool.reserve(2)
    assert cached_blocks(pool) == [0, 2]
    assert pool.num_evicted == 2
    pool.check_integrity()


def test_resuming_from_a_state_counts_as_a_use() -> None:
    pool = SlotPool(2)
    cache(pool, 0, 1)
    pool.pin(BlockId(0))
    pool.unpin(BlockId(0))
    pool.take_live()
    assert cached_blocks(pool) == [0]


def test_marking_a_block_without_a_state_as_used_does_nothing() -> None:
    pool = SlotPool(2)
    cache(pool, 0)
    pool.touch_path([BlockId(7), BlockId(0)])
    assert cached_blocks(pool) == [0]
    pool.check_integrity()


def test_equally_recent_states_are_evicted_deepest_first() -> None:
    pool = SlotPool(2)
    for block, num_tokens in enumerate([256, 512]):
        (slot,) = pool.reserve()
        pool.publish(slot, BlockId(block), num_tokens)
    pool.touch_path([BlockId(0), BlockId(1)])
    pool.take_live()
    assert cached_blocks(pool) == [0]


def test_reserving_more_slots_than_available_raises_and_changes_nothing() -> None:
    pool = SlotPool(2)
    pool.take_live()
    before = snapshot(pool)
    with pytest.raises(
        CacheCapacityError, match=r"2 state slots are needed, but 1 are free and 0 evictable.*caching-mamba-gb"
    ):
        pool.reserve(2)
    assert snapshot(pool) == before
    cache(pool, 0)
    assert cached_blocks(pool) == [0]


def test_running_request_takes_the_slot_of_a_cached_state() -> None:
    pool = SlotPool(2)
    cache(pool, 0, 1)
    pool.take_live()
    pool.take_live()
    assert cached_blocks(pool) == []
    with pytest.raises(CacheCapacityError, match="max requests"):
        pool.take_live()


def test_draft_slots_are_taken_and_released_like_live_slots() -> None:
    pool = SlotPool(3)
    cache(pool, 0)
    slots = pool.take_draft(3)
    assert pool.count_by_owner()["draft"] == 3
    with pytest.raises(CacheIntegrityError, match="live"):
        pool.release_live(slots[0])
    for slot in slots:
        pool.release_draft(slot)
    pool.check_integrity()
    assert pool.num_available == 3


def test_num_live_counts_slots_of_running_requests() -> None:
    pool = SlotPool(4)
    live, _, _ = pool.take_live(), pool.reserve(), pool.take_draft(1)
    assert pool.num_live == 1
    pool.release_live(live)
    assert pool.num_live == 0


def test_only_rolling_checkpoints_are_retired() -> None:
    pool = SlotPool(3)
    rolling, _ = cache(pool, 0, 1)
    pool.mark_rolling(BlockId(0))
    for block in (0, 1, 2):
        pool.retire(BlockId(block))
    pool.check_integrity()
    assert cached_blocks(pool) == [1]
    assert pool.owner_of(rolling) is SlotOwner.FREE and pool.num_evicted == 0


@pytest.mark.parametrize("how", ["pin", "keep"])
def test_rolling_checkpoint_is_not_retired_once_pinned_or_kept(how: str) -> None:
    pool = SlotPool(3)
    cache(pool, 0)
    pool.mark_rolling(BlockId(0))
    getattr(pool, how)(BlockId(0))
    pool.check_integrity()
    if how == "pin":
        pool.unpin(BlockId(0))
    pool.retire(BlockId(0))
    assert cached_blocks(pool) == [0]


@pytest.mark.parametrize("leave", ["drop", "flush", "retire", "evict"])
def test_checkpoint_mark_is_removed_with_its_state(leave: str) -> None:
    pool = SlotPool(1)
    cache(pool, 0)
    pool.mark_rolling(BlockId(0))
    if leave == "flush":
        pool.flush()
    elif leave == "evict":
        pool.release_live(pool.take_live())
    else:
        getattr(pool, leave)(BlockId(0))
    pool.check_integrity()
    cache(pool, 0)
    pool.retire(BlockId(0))
    assert cached_blocks(pool) == [0]


def test_block_without_a_state_is_never_marked_as_a_checkpoint() -> None:
    pool = SlotPool(1)
    pool.mark_rolling(BlockId(0))
    pool.check_integrity()
    cache(pool, 0)
    pool.retire(BlockId(0))
    assert cached_blocks(pool) == [0]


def test_cancelled_slot_reservation_frees_the_slot() -> None:
    pool = SlotPool(2)
    (slot,) = pool.reserve()
    assert pool.num_reserved == 1
    pool.cancel(slot)
    assert pool.owner_of(slot) is SlotOwner.FREE
    assert pool.num_reserved == 0
    with pytest.raises(CacheIntegrityError):
        pool.cancel(slot)
    pool.check_integrity()


def test_only_the_owner_releases_a_slot() -> None:
    pool = SlotPool(4)
    live, (reserved,), (cached,) = pool.take_live(), pool.reserve(), cache(pool, 0)
    before = snapshot(pool)
    for call, slot in [(pool.cancel, live), (pool.release_live, reserved), (pool.cancel, cached)]:
        with pytest.raises(CacheIntegrityError, match=f"slot {slot}"):
            call(slot)
    with pytest.raises(CacheIntegrityError, match="reserved"):
        pool.publish(live, BlockId(5))
    assert snapshot(pool) == before


def test_slot_number_out_of_range_is_refused() -> None:
    pool = SlotPool(1)
    pool.take_live()
    for slot in (-1, 1):
        with pytest.raises(ValueError, match="the slot must be between"):
            pool.release_live(SlotId(slot))
    assert pool.count_by_owner()["live"] == 1


def test_pinned_state_is_never_evicted() -> None:
    pool = SlotPool(2)
    cache(pool, 0, 1)
    pool.pin(BlockId(0))
    pool.pin(BlockId(0))
    pool.unpin(BlockId(0))
    assert pool.is_pinned(BlockId(0))
    assert pool.num_available == 1
    pool.take_live()
    assert cached_blocks(pool) == [0]
    with pytest.raises(CacheCapacityError):
        pool.take_live()
    pool.unpin(BlockId(0))
    pool.check_integrity()
    pool.take_live()
    assert cached_blocks(pool) == []


def test_pinning_without_a_state_and_unpinning_without_a_pin_raise() -> None:
    pool = SlotPool(2)
    cache(pool, 0)
    with pytest.raises(CacheIntegrityError, match="block 5 has no cached state"):
        pool.pin(BlockId(5))
    with pytest.raises(CacheIntegrityError, match="not pinned"):
        pool.unpin(BlockId(0))


def test_dropping_a_state_frees_its_slot_and_ignores_blocks_without_a_state() -> None:
    pool = SlotPool(2)
    (slot,) = cache(pool, 0)
    pool.drop(BlockId(0))
    pool.drop(BlockId(0))
    assert pool.owner_of(slot) is SlotOwner.FREE
    assert pool.slot_of(BlockId(0)) is None
    assert pool.num_evicted == 0
    pool.check_integrity()


def test_dropping_a_pinned_state_raises() -> None:
    pool = SlotPool(2)
    cache(pool, 0)
    pool.pin(BlockId(0))
    with pytest.raises(CacheIntegrityError, match="the state of block 0 has 1 pins"):
        pool.drop(BlockId(0))
    assert cached_blocks(pool) == [0]


def test_flush_frees_the_slots_of_pinned_states_only_after_their_unpin() -> None:
    pool = SlotPool(3)
    pinned, _ = cache(pool, 0, 1)
    pool.pin(BlockId(0))
    pool.pin(BlockId(0))
    pool.flush()
    pool.check_integrity()
    assert cached_blocks(pool) == []
    assert pool.num_available == 2
    pool.drop(BlockId(0))
    pool.unpin(BlockId(0))
    assert pool.owner_of(pinned) is SlotOwner.CACHED
    pool.unpin(BlockId(0))
    assert pool.owner_of(pinned) is SlotOwner.FREE
    assert pool.num_available == 3
    pool.check_integrity()


def test_unpinning_a_flushed_state_keeps_the_new_state_of_its_block() -> None:
    pool = SlotPool(3)
    (orphan,) = cache(pool, 0)
    pool.pin(BlockId(0))
    pool.flush()
    (successor,) = cache(pool, 0)
    pool.unpin(BlockId(0))
    pool.check_integrity()
    assert pool.slot_of(BlockId(0)) == successor
    assert pool.owner_of(orphan) is SlotOwner.FREE
    assert pool.num_available == 3


def test_flush_keeps_slots_of_running_requests_and_reserved_slots() -> None:
    pool = SlotPool(3)
    live, (reserved,) = pool.take_live(), pool.reserve()
    pool.flush()
    assert pool.owner_of(live) is SlotOwner.LIVE
    assert pool.owner_of(reserved) is SlotOwner.RESERVED


def pools_with_a_state(num_blocks: int, num_slots: int) -> tuple[CachePools, BlockId]:
    """Return both pools and a held block that has a cached state."""
    pools = CachePools.over(SplitSpace(num_blocks, num_slots), LeastRecentlyUsed(), block_size=1)
    (block,) = pools.kv.allocate(1)
    pools.kv.register(block, BlockKey(1), None)
    cache(pools.slots, block)
    return pools, block


def test_block_is_freed_when_its_state_is_evicted() -> None:
    pools, block = pools_with_a_state(1, 2)
    pools.kv.release([block])
    assert (pools.kv.num_cached, pools.kv.num_available) == (1, 1)
    assert pools.kv.allocate(1) == [block]
    assert pools.slots.slot_of(block) is None
    assert pools.slots.count_by_owner()["free"] == 2
    assert (pools.slots.num_evicted, pools.slots.num_blocks_evicted) == (1, 1)
    pools.slots.check_integrity()


def test_block_in_use_stays_when_its_state_is_evicted() -> None:
    pools, block = pools_with_a_state(1, 1)
    pools.slots.take_live()
    assert pools.kv.find(BlockKey(1)) == block
    assert (pools.slots.num_evicted, pools.slots.num_blocks_evicted) == (1, 0)
    pools.kv.release([block])
    assert pools.kv.find(BlockKey(1)) is None
    pools.kv.check_integrity()


def test_flushing_both_pools_works_while_a_state_is_pinned() -> None:
    pools, block = pools_with_a_state(2, 2)
    pools.slots.pin(block)
    pools.slots.flush()
    pools.kv.flush()
    assert pools.slots.slot_of(block) is None
    pools.slots.unpin(block)
    assert pools.slots.count_by_owner()["free"] == 2
    pools.kv.check_integrity()
    pools.slots.check_integrity()


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda pool: pool._owners._owners.__setitem__(0, SlotOwner.LIVE), "slot counts by owner"),
        (lambda pool: pool.slot_by_block.clear(), "listed as cached"),
        (lambda pool: pool._pins.__setitem__(9, 1), "pins"),
        (lambda pool: pool._evictable.clear(), "evictable"),
        (lambda pool: pool._rolling.add(BlockId(9)), "rolling"),
    ],
)
def test_check_integrity_detects_each_broken_invariant(corrupt: object, message: str) -> None:
    pool = SlotPool(4)
    cache(pool, 0)
    corrupt(pool)  # type: ignore[operator]
    with pytest.raises(CacheIntegrityError, match=message):
        pool.check_integrity()


class SlotMachine(RuleBasedStateMachine):
    """Slots change owners at random; the model is a dict of owners, a dict of states and a list in order of use."""

    num_slots = 5
    num_running: int | None = None
    blocks = st.integers(0, 6).map(BlockId)

    def __init__(self) -> None:
        super().__init__()
        running = None if self.num_running is None else FixedIndexPool(self.num_running)
        self.pool = SlotPool(self.num_slots, running=running)
        self.held: dict[SlotOwner, list[SlotId]] = {owner: [] for owner in SlotOwner}
        self.states: dict[BlockId, SlotId] = {}
        self.by_use: list[BlockId] = []  # least recently used first
        self.pins: Counter[BlockId] = Counter()
        self.rolling: set[BlockId] = set()
        self.orphans: dict[BlockId, list[SlotId]] = {}

    def _use(self, block: BlockId) -> None:
        self.by_use = [*(other for other in self.by_use if other != block), block]

    def _forget(self, block: BlockId) -> None:
        del self.states[block]
        self.rolling.discard(block)

    def _unpinned(self) -> list[BlockId]:
        return [block for block in self.by_use if block in self.states and not self.pins[block]]

    def _num_free(self) -> int:
        held = self.held if self.num_running is None else {SlotOwner.RESERVED: self.held[SlotOwner.RESERVED]}
        in_use = sum(map(len, [*held.values(), *self.orphans.values()])) + len(self.states)
        return self.num_slots - in_use

    def _num_free_to_run(self) -> int:
        assert self.num_running is not None
        return self.num_running - len(self.held[SlotOwner.LIVE]) - len(self.held[SlotOwner.DRAFT])

    @rule(num_slots=st.integers(0, 3), owner=st.sampled_from([SlotOwner.LIVE, SlotOwner.RESERVED, SlotOwner.DRAFT]))
    def take(self, num_slots: int, owner: SlotOwner) -> None:
        num_slots = 1 if owner is SlotOwner.LIVE else num_slots
        calls = {
            SlotOwner.LIVE: lambda: [self.pool.take_live()],
            SlotOwner.RESERVED: lambda: self.pool.reserve(num_slots),
            SlotOwner.DRAFT: lambda: self.pool.take_draft(num_slots),
        }
        is_apart = self.num_running is not None and owner is not SlotOwner.RESERVED
        available = self._num_free_to_run() if is_apart else self._num_free() + len(self._unpinned())
        if num_slots > available:
            with pytest.raises(CacheCapacityError):
                calls[owner]()
            return
        num_evicted = 0 if is_apart else max(0, num_slots - self._num_free())
        for block in self._unpinned()[:num_evicted]:
            self._forget(block)
        self.held[owner] += calls[owner]()

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from([owner for owner in SlotOwner if self.held[owner]]))
        slot = self.held[owner].pop(data.draw(st.integers(0, len(self.held[owner]) - 1)))
        calls = {
            SlotOwner.LIVE: self.pool.release_live,
            SlotOwner.RESERVED: self.pool.cancel,
            SlotOwner.DRAFT: self.pool.release_draft,
        }
        calls[owner](slot)

    @precondition(lambda self: self.held[SlotOwner.RESERVED])
    @rule(block=blocks)
    def publish(self, block: BlockId) -> None:
        slot = self.held[SlotOwner.RESERVED][-1]
        if block in self.states:
            with pytest.raises(CacheIntegrityError):
                self.pool.publish(slot, block)
            return
        self.pool.publish(slot, block)
        self.states[block] = self.held[SlotOwner.RESERVED].pop()
        self._use(block)

    @rule(block=blocks)
    def pin(self, block: BlockId) -> None:
        if block not in self.states:
            with pytest.raises(CacheIntegrityError):
                self.pool.pin(block)
            return
        self.pool.pin(block)
        self.pins[block] += 1
        self.rolling.discard(block)
        self._use(block)

    @rule(block=blocks)
    def unpin(self, block: BlockId) -> None:
        if not self.pins[block]:
            with pytest.raises(CacheIntegrityError):
                self.pool.unpin(block)
            return
        self.pool.unpin(block)
        self.pins[block] -= 1
        if not self.pins[block]:
            self.orphans.pop(block, None)
            self._use(block)

    @rule(block=blocks)
    def drop(self, block: BlockId) -> None:
        if block in self.states and self.pins[block]:
            with pytest.raises(CacheIntegrityError):
                self.pool.drop(block)
            return
        self.pool.drop(block)
        if block in self.states:
            self._forget(block)

    @rule(block=blocks)
    def mark_rolling(self, block: BlockId) -> None:
        """Mark a state that no request reads as a rolling checkpoint, as its request does after publishing it."""
        if not self.pins[block]:
            self.pool.mark_rolling(block)
            self.rolling |= {block} & self.states.keys()

    @rule(block=blocks)
    def keep(self, block: BlockId) -> None:
        self.pool.keep(block)
        self.rolling.discard(block)

    @rule(block=blocks)
    def retire(self, block: BlockId) -> None:
        self.pool.retire(block)
        if block in self.rolling:
            self._forget(block)

    @rule(block=blocks)
    def touch(self, block: BlockId) -> None:
        self.pool.touch_path([block])
        if block in self.states:
            self._use(block)

    @rule()
    def flush(self) -> None:
        self.pool.flush()
        for block, slot in self.states.items():
            if self.pins[block]:
                self.orphans.setdefault(block, []).append(slot)
        self.states = {}
        self.rolling = set()

    @invariant()
    def pool_agrees_with_model(self) -> None:
        self.pool.check_integrity()
        counts = {owner.value: len(slots) for owner, slots in self.held.items()}
        counts["free"] = self._num_free()
        counts["cached"] = len(self.states) + sum(map(len, self.orphans.values()))
        assert self.pool.count_by_owner() == counts
        assert (self.pool.num_live, self.pool.num_reserved) == (counts["live"], counts["reserved"])
        assert self.pool.num_available == self._num_free() + len(self._unpinned())
        assert all(self.pool.slot_of(BlockId(block)) == self.states.get(BlockId(block)) for block in range(7))
        self._check_distinct()

    def _check_distinct(self) -> None:
        """Assert that each slot of a pool has one use."""
        running = [slot for owner in (SlotOwner.LIVE, SlotOwner.DRAFT) for slot in self.held[owner]]
        cached = [*self.held[SlotOwner.RESERVED], *self.states.values()]
        cached += [slot for slots in self.orphans.values() for slot in slots]
        for used in [running + cached] if self.num_running is None else [running, cached]:
            assert len(set(used)) == len(used)
        if self.num_running is not None:
            assert self.pool.num_available_to_run == self._num_free_to_run()


class RunningApart(SlotMachine):
    """Live and draft states have separate slots, with numbers that slots of cached states also have."""

    num_slots = 3
    num_running = 4


TestRunningApart = RunningApart.TestCase
TestRunningApart.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

TestSlotsAgainstModel = SlotMachine.TestCase
TestSlotsAgainstModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
