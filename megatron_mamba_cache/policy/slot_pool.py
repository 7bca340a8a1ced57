"""The owner of each slot of the state pool: live, draft, reserved and cached states share the same rows."""

from collections.abc import Sequence
from itertools import pairwise

from ..errors import CacheCapacityError, CacheIntegrityError
from .boundary_journal import NoObserver, StateObserver
from .eviction import CachedEntry, EvictionHeap, Worth, lru_worth
from .identifiers import BlockId, SlotId
from .slot_owners import SlotOwner, SlotOwners
from .state_lineage import StateLineage


class SlotPool:
    """Slots 0 to num_slots - 1, one owner each; a cached slot belongs to one KV block, and a block has at most one.

    A cached state is evicted when a slot is needed and none is free, unless it is pinned: about to be read. Time is
    logical, as in the block pool.
    """

    def __init__(self, num_slots: int, worth: Worth = lru_worth) -> None:
        """Start with every slot free.

        Raises:
            ValueError: If `num_slots` is negative.
        """
        if num_slots < 0:
            raise ValueError(f"need num_slots >= 0, found {num_slots}")
        self._num_slots = num_slots
        self._owners = SlotOwners(num_slots)
        self._last_used = [(0, 0.0)] * num_slots  # when, and the floor of worth at that time
        self._lineage = StateLineage()
        self._slot_of: dict[BlockId, SlotId] = {}
        self._pins: dict[BlockId, int] = {}
        self._rolling: set[BlockId] = set()  # decode checkpoints that only their own request uses
        self._orphans: dict[BlockId, list[SlotId]] = {}  # flushed while pinned: freed at the block's last unpin
        self._evictable = EvictionHeap(worth)  # the blocks whose state is not pinned
        # A last use changes only with a push; any other worth is checked again before a state is evicted.
        self._pop = self._evictable.pop if worth is lru_worth else self._pop_current
        self._observer: StateObserver = NoObserver()
        self._num_evicted = 0
        self._clock = 0

    @property
    def num_slots(self) -> int:
        """All slots."""
        return self._num_slots

    @property
    def num_available(self) -> int:
        """The most that can be taken or reserved now: free slots and cached states that are not pinned."""
        return self._owners.num_free + len(self._evictable)

    @property
    def num_reserved(self) -> int:
        """Slots reserved and not yet published or cancelled."""
        return self._owners.count(SlotOwner.RESERVED)

    @property
    def num_live(self) -> int:
        """Slots of running requests' live states."""
        return self._owners.count(SlotOwner.LIVE)

    @property
    def num_evicted(self) -> int:
        """Cached states evicted to make room since the pool was made; dropped and flushed ones do not count."""
        return self._num_evicted

    def owner_of(self, slot: SlotId) -> SlotOwner:
        """Return what the slot is used for; a state flushed while pinned counts as cached until it is free."""
        return self._owners.owner_of(slot)

    def count_by_owner(self) -> dict[str, int]:
        """Return the number of slots by the lower-case name of their owner."""
        return {owner.value: self._owners.count(owner) for owner in SlotOwner}

    def slot_of(self, block: BlockId) -> SlotId | None:
        """Return the slot with the cached state at the end of the block."""
        return self._slot_of.get(block)

    def cached_blocks(self) -> list[BlockId]:
        """Return the blocks that have a cached state."""
        return list(self._slot_of)

    def is_pinned(self, block: BlockId) -> bool:
        """Return whether the block's state may not be evicted now."""
        return block in self._pins

    def observe(self, observer: StateObserver) -> None:
        """Notify the observer, replacing any other, of all cached states: first the existing ones, then each change."""
        self._observer = observer
        for block in self._slot_of:
            observer.published(block)

    def take_live(self) -> SlotId:
        """Give a slot to a running request, evicting the cached state worth least if none is free.

        Raises:
            CacheCapacityError: If every slot is in use; nothing has changed then.
        """
        return self._take(1, SlotOwner.LIVE)[0]

    def release_live(self, slot: SlotId) -> None:
        """Take a running request's slot back."""
        self._owners.free(slot, SlotOwner.LIVE)

    def take_draft(self, num_slots: int) -> list[SlotId]:
        """Give slots to draft states, as `take_live` does."""
        return self._take(num_slots, SlotOwner.DRAFT)

    def release_draft(self, slot: SlotId) -> None:
        """Take a draft state's slot back."""
        self._owners.free(slot, SlotOwner.DRAFT)

    def reserve(self, num_slots: int = 1) -> list[SlotId]:
        """Set slots aside for states that the coming step writes, as `take_live` does; all of them or none."""
        return self._take(num_slots, SlotOwner.RESERVED)

    def cancel(self, slot: SlotId) -> None:
        """Give a reserved slot back, unpublished."""
        self._owners.free(slot, SlotOwner.RESERVED)

    def publish(
        self,
        slot: SlotId,
        block: BlockId,
        num_tokens: int = 0,
        anchor: BlockId | None = None,
        num_continuations: int = 0,
    ) -> None:
        """Make a reserved slot, now written, the cached state at the end of the block.

        Args:
            num_tokens: Tokens from the root to the end of the block.
            anchor: The block of the nearest cached state before it: the tokens in between are lost with the state.
            num_continuations: Texts that continue after it and have no state with this one as anchor.

        Raises:
            CacheIntegrityError: If the slot is not reserved or the block has a state; nothing has changed then.
        """
        if block in self._slot_of:
            raise CacheIntegrityError(
                f"need a block without a state, found slot {self._slot_of[block]} at block {block}"
            )
        self._owners.hand_over(slot, SlotOwner.RESERVED, SlotOwner.CACHED)
        self._slot_of[block] = slot
        self._observer.published(block)
        self._lineage.add(block, num_tokens, anchor, num_continuations)
        if anchor is not None and anchor in self._evictable:
            self._evictable.push(anchor, self._entry(anchor))  # it is no longer the end
        self._set_last_used(block, self._tick())

    def mark_rolling(self, block: BlockId) -> None:
        """Let `retire` drop the block's state, until it is pinned or `keep` is called."""
        if block in self._slot_of:
            self._rolling.add(block)

    def keep(self, block: BlockId) -> None:
        """Undo `mark_rolling`: the state has become more than a request's own checkpoint."""
        self._rolling.discard(block)

    def retire(self, block: BlockId) -> None:
        """Drop the block's state if it still is a rolling checkpoint."""
        if block in self._rolling:
            self.drop(block)

    def pin(self, block: BlockId) -> None:
        """Protect the block's state from eviction until as many `unpin` calls; it counts as just used.

        Raises:
            CacheIntegrityError: If the block has no state.
        """
        if block not in self._slot_of:
            raise CacheIntegrityError(f"need a cached state to pin, found none at block {block}")
        self._pins[block] = self._pins.get(block, 0) + 1
        self._rolling.discard(block)
        self._evictable.discard(block)
        self._lineage.count_hit(block)
        self._set_last_used(block, self._tick())

    def unpin(self, block: BlockId) -> None:
        """Undo one `pin`.

        Raises:
            CacheIntegrityError: If the block is not pinned.
        """
        if block not in self._pins:
            raise CacheIntegrityError(f"need a pinned state to unpin, found block {block} not pinned")
        self._pins[block] -= 1
        if self._pins[block]:
            return
        del self._pins[block]
        for slot in self._orphans.pop(block, ()):
            self._owners.free(slot, SlotOwner.CACHED)
        if block in self._slot_of:
            self._set_last_used(block, self._tick())

    def drop(self, block: BlockId) -> None:
        """Forget the block's state and free its slot; nothing happens if it has none.

        Raises:
            CacheIntegrityError: If the state is pinned.
        """
        if block not in self._slot_of:
            return
        if block in self._pins:
            raise CacheIntegrityError(
                f"need an unpinned state to drop, found {self._pins[block]} pins at block {block}"
            )
        self._evictable.discard(block)
        self._forget_state(block)

    def touch(self, blocks: Sequence[BlockId], time: int | None = None) -> None:
        """Set the last use of the blocks' states, where they have one, to `time`, by default to now."""
        now = self._tick() if time is None else time
        self._clock = max(self._clock, now)
        for block in blocks:
            if block in self._slot_of:
                self._set_last_used(block, now)

    def touch_path(self, blocks: Sequence[BlockId]) -> None:
        """Set the last use of the states on a path from the root to now, and record which follows which."""
        path = [block for block in blocks if block in self._slot_of]
        for anchor, block in pairwise(path):
            self._lineage.relink(block, anchor)
        self.touch(path)

    def flush(self) -> None:
        """Forget every cached state. The slot of a pinned one becomes free at its last unpin, the others now.

        Flush this pool before a block pool that drops states as its own blocks are flushed.
        """
        for block in sorted(self._slot_of):
            slot = self._slot_of.pop(block)
            if block in self._pins:
                self._orphans.setdefault(block, []).append(slot)
            else:
                self._owners.free(slot, SlotOwner.CACHED)
        self._evictable.clear()
        self._rolling.clear()
        self._lineage.clear()
        self._observer.flushed()

    def check_integrity(self) -> None:
        """Raise CacheIntegrityError, with the equation that failed, unless every invariant of the pool holds. O(n)."""
        self._owners.check_integrity()
        orphans = [slot for slots in self._orphans.values() for slot in slots]
        self._owners.check_owned(SlotOwner.CACHED, [*self._slot_of.values(), *orphans])
        if self._pins.keys() - self._slot_of.keys() - self._orphans.keys() or self._orphans.keys() - self._pins.keys():
            raise CacheIntegrityError(
                f"pins {self._pins} != pins of states {self._slot_of} and orphans {self._orphans}"
            )
        if self._rolling - self._slot_of.keys() or self._rolling & self._pins.keys():
            raise CacheIntegrityError(f"rolling checkpoints {self._rolling} without a state, or pinned {self._pins}")
        unpinned = self._slot_of.keys() - self._pins.keys()
        if len(unpinned) != len(self._evictable) or not all(block in self._evictable for block in unpinned):
            raise CacheIntegrityError(f"unpinned states {unpinned} != {len(self._evictable)} evictable states")

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _take(self, num_slots: int, owner: SlotOwner) -> list[SlotId]:
        if num_slots < 0:
            raise ValueError(f"need a count of slots, found {num_slots}")
        num_free, num_evictable = self._owners.num_free, len(self._evictable)
        if num_slots > num_free + num_evictable:
            raise CacheCapacityError(
                f"need {num_slots} state slots, {num_free} free and {num_evictable} evictable of "
                f"{self._num_slots}; raise --inference-dynamic-batching-prefix-caching-mamba-gb or max requests"
            )
        for _ in range(num_free, num_slots):
            self._forget_state(BlockId(self._pop()))
            self._num_evicted += 1
        return self._owners.take(num_slots, owner)

    def _forget_state(self, block: BlockId) -> None:
        self._rolling.discard(block)
        self._owners.free(self._slot_of.pop(block), SlotOwner.CACHED)
        self._observer.dropped(block)

    def _set_last_used(self, block: BlockId, time: int) -> None:
        self._last_used[self._slot_of[block]] = (time, self._evictable.floor)
        if block not in self._pins:
            self._evictable.push(block, self._entry(block))

    def _pop_current(self) -> int:
        return self._evictable.pop_current(self._changed)

    def _changed(self, block: int) -> CachedEntry | None:
        return None if self._lineage.is_anchor_kept(block, self._slot_of) else self._entry(BlockId(block))

    def _entry(self, block: BlockId) -> CachedEntry:
        time, floor = self._last_used[self._slot_of[block]]
        return self._lineage.entry(block, time, floor, self._slot_of)
