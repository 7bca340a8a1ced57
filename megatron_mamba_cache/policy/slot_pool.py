"""The state slot pool: live, draft, reserved and cached states share one set of slots.

If cached states are quantized, live and draft states have separate slots with separate numbers.
"""

from collections.abc import Container, Sequence
from itertools import pairwise
from math import inf

from ..errors import CacheCapacityError, CacheIntegrityError
from .boundary_journal import CachedTexts, NoTexts, StateObserver, StateSaver
from .eviction import CachedEntry, EvictionOrder, Weight
from .eviction_rules import ENDS, EvictionRule, HeldStates, LeastRecentlyUsed
from .identifiers import BlockId, SlotId
from .index_pools import FixedIndexPool, IndexPool
from .slot_owners import SlotOwner, SlotOwners
from .state_lineage import StateLineage

_NOT_COUNTED = -1
_MOMENT = 2.0**-10  # separates the times of states used by the same request; a power of two, so sums are exact


class SlotPool:
    """Slots of the state pool, each with one owner. A cached state belongs to one KV block; a block has at most
    one cached state.

    A cached state can be evicted when a slot or a KV block is needed and none is free, unless the state is pinned
    because a step is about to read it. Time is logical: it advances when a request starts from a state or ends.

    Args:
        indices: Index pool for the slots, or the number of slots in a separate pool.
        rule: Rule that weighs states for eviction; None evicts the least recently used state first.
        running: Index pool for live and draft states; None to use `indices`.

    Raises:
        ValueError: If the number of slots is negative.
    """

    def __init__(
        self, indices: IndexPool | int, rule: EvictionRule | None = None, running: FixedIndexPool | None = None
    ) -> None:
        if isinstance(indices, int) and indices < 0:
            raise ValueError(f"the number of slots must be at least 0, found {indices}")
        self._indices = FixedIndexPool(indices) if isinstance(indices, int) else indices
        self.num_slots = self._indices.num_indices
        self._owners = SlotOwners(self._indices)
        self._running_indices = running
        self._running = self._owners if running is None else SlotOwners(running)
        self._rule = rule or LeastRecentlyUsed()
        self._texts: CachedTexts = NoTexts()
        self._kinds: list[int] = []  # by block: kind under which its state was last counted
        self._lineage = StateLineage()
        self.slot_by_block: dict[BlockId, SlotId] = {}
        """Slot of the cached state at the end of each block; always the same dict, changed only by this class."""
        self._pins: dict[BlockId, int] = {}
        self._rolling: set[BlockId] = set()  # blocks of decode checkpoints that only their own request uses
        self._orphans: dict[BlockId, list[SlotId]] = {}  # slots flushed while pinned, freed at the last unpin
        self._held = HeldStates()
        self._evictable = EvictionOrder()  # blocks whose state is not pinned
        self._observer = StateObserver()
        self._saver = StateSaver()
        self._saved: set[BlockId] = set()  # blocks whose states are being copied to a lower tier
        self._quiet_pins: dict[BlockId, float] = {}  # last use of blocks whose pin does not count as a use
        self.num_evicted = 0  # number of states evicted to make room; excludes dropped and flushed states
        self.num_blocks_evicted = 0  # number of KV blocks freed with evicted states
        self._clock = 0.0

    def attach(self, texts: CachedTexts) -> None:
        """Connect the KV blocks, which are freed together with the states that make them reusable."""
        self._texts = texts

    @property
    def num_available(self) -> int:
        """Maximum number of slots that can be reserved now: free slots, and slots that evictions can free."""
        return self._indices.num_available

    @property
    def num_available_to_run(self) -> int:
        """Maximum number of slots that live and draft states can take now."""
        return self._running.indices.num_available

    @property
    def shares_slots(self) -> bool:
        """True if live and draft states use the same slots as cached states."""
        return self._running is self._owners

    @property
    def num_free(self) -> int:
        """Number of slots that can be reserved without an eviction."""
        return self._indices.num_free

    @property
    def num_reserved(self) -> int:
        """Number of reserved slots that are not yet published or cancelled."""
        return self._owners.count(SlotOwner.RESERVED)

    @property
    def num_live(self) -> int:
        """Number of slots with live states of running requests."""
        return self._running.count(SlotOwner.LIVE)

    def owner_of(self, slot: SlotId) -> SlotOwner:
        """Return the owner of a slot for cached states. A slot flushed while pinned counts as cached."""
        return self._owners.owner_of(slot)

    def owner_of_running(self, slot: SlotId) -> SlotOwner:
        """Return the owner of a slot for live and draft states."""
        return self._running.owner_of(slot)

    def count_by_owner(self) -> dict[str, int]:
        """Return the number of slots by owner, keyed by lower-case name; "free" counts only slots for cached states."""
        running = {owner.value: self._running.count(owner) for owner in (SlotOwner.LIVE, SlotOwner.DRAFT)}
        return {owner.value: self._owners.count(owner) for owner in SlotOwner} | running

    def slot_of(self, block: BlockId) -> SlotId | None:
        """Return the slot with the cached state at the end of the block; None if it has none."""
        return self.slot_by_block.get(block)

    def deepest(self, blocks: Sequence[BlockId]) -> int:
        """Return the length of the longest prefix of `blocks` that ends in a cached state."""
        depth = len(blocks)
        while depth and blocks[depth - 1] not in self.slot_by_block:
            depth -= 1
        return depth

    def tokens_before(self, block: BlockId) -> int:
        """Return the number of tokens from the start of the text to the cached state before the block's state."""
        entry = self._entry(block)
        return entry.num_tokens - entry.lost_tokens

    def cached_blocks(self) -> list[BlockId]:
        """Return the blocks that have a cached state."""
        return list(self.slot_by_block)

    def is_pinned(self, block: BlockId) -> bool:
        """Return whether the block's state is protected from eviction."""
        return block in self._pins

    def observe(self, observer: StateObserver) -> None:
        """Set the observer. It is notified of the existing cached states now, and of each change later."""
        self._observer = observer
        for block in self.slot_by_block:
            observer.published(block)

    def take_live(self) -> SlotId:
        """Return a slot for a running request; if none is free, evict the cached state of lowest priority.

        Raises:
            CacheCapacityError: If every slot is in use; nothing is changed then.
        """
        return self._take(1, SlotOwner.LIVE, self._running)[0]

    def release_live(self, slot: SlotId) -> None:
        """Free the slot of a running request."""
        self._running.free(slot, SlotOwner.LIVE)

    def take_draft(self, num_slots: int) -> list[SlotId]:
        """Return slots for draft states; evict and raise like `take_live`."""
        return self._take(num_slots, SlotOwner.DRAFT, self._running)

    def release_draft(self, slot: SlotId) -> None:
        """Free the slot of a draft state."""
        self._running.free(slot, SlotOwner.DRAFT)

    def reserve(self, num_slots: int = 1) -> list[SlotId]:
        """Reserve all or none of the slots for states that the next step writes; evict and raise like `take_live`."""
        return self._take(num_slots, SlotOwner.RESERVED, self._owners)

    def cancel(self, slot: SlotId) -> None:
        """Free a reserved slot without publishing it."""
        self._owners.free(slot, SlotOwner.RESERVED)

    def publish(
        self,
        slot: SlotId,
        block: BlockId,
        num_tokens: int = 0,
        anchor: BlockId | None = None,
        num_continuations: int = 0,
    ) -> None:
        """Turn a reserved slot, which has been written, into the cached state at the end of the block.

        Args:
            num_tokens: Number of tokens from the start of the text to the end of the block.
            anchor: Block of the text's previous cached state; None if there is none. If this state is evicted, the
                tokens between both must be recomputed.
            num_continuations: Number of texts that are known to continue after the state, but have no later state
                anchored to it.

        Raises:
            CacheIntegrityError: If the slot is not reserved or the block has a state; nothing has changed then.
        """
        if block in self.slot_by_block:
            raise CacheIntegrityError(f"block {block} already has a state, in slot {self.slot_by_block[block]}")
        self._owners.hand_over(slot, SlotOwner.RESERVED, SlotOwner.CACHED)
        self.slot_by_block[block] = slot
        self._observer.published(block)
        self._lineage.add(block, num_tokens, anchor, num_continuations)
        if block >= len(self._kinds):
            self._kinds += [_NOT_COUNTED] * (block + 1 - len(self._kinds))
        self._kinds[block] = _NOT_COUNTED
        if anchor is not None and anchor in self._evictable:
            self._file_again(anchor)  # the anchor is no longer the last state of its text
        self._clock += _MOMENT
        if block not in self._pins:
            self._file(block, self._clock)

    def mark_rolling(self, block: BlockId) -> None:
        """Allow `retire` to drop the block's state, until the state is pinned or `keep` is called."""
        if block in self.slot_by_block:
            self._rolling.add(block)

    def keep(self, block: BlockId) -> None:
        """Undo `mark_rolling`, because other requests also use the state."""
        self._rolling.discard(block)

    def retire(self, block: BlockId) -> None:
        """Drop the block's state if it is still a rolling checkpoint."""
        if block in self._rolling:
            self.drop(block)

    def hold(self, block: BlockId, until: int) -> None:
        """Raise the priority of the block's state until the time of `pass_time` reaches `until`; it stays evictable."""
        if block in self.slot_by_block and self._held.hold(block, until) and block in self._evictable:
            self._file_again(block)

    def pass_time(self, now: int) -> None:
        """Set the time on which `hold` depends; ignore a time before the current one."""
        for block in self._held.pass_time(now):
            if block in self._evictable:
                self._file_again(block)

    def save_with(self, saver: StateSaver) -> None:
        """Set the saver, which copies states to a lower tier before they are evicted."""
        self._saver = saver

    def stop_saving(self, block: BlockId) -> None:
        """Return the block's state to its normal priority, because its save has ended."""
        if block in self._saved:
            self._saved.remove(block)
            if block in self._evictable:
                self._file_again(block)

    def priority_of(self, block: BlockId) -> float:
        """Return the current priority of the block's state; infinite if it cannot be evicted."""
        if block not in self._evictable:
            return inf
        return self._evictable.priority_of(block, self._clock, self._rule.likelihood)

    def likelihood(self, block: BlockId) -> float:
        """Return the likelihood of a hit for states of the same kind as the block's, at any age."""
        return self._rule.likelihood(self._weigh(block).kind)

    def min_priority(self) -> float:
        """Return the priority of the state to evict next; infinite if there is none."""
        return self.priority_of(self._next_evicted()) if len(self._evictable) else inf

    def pin(self, block: BlockId, *, is_hit: bool = True) -> None:
        """Protect the block's state from eviction until a matching number of `unpin` calls.

        Args:
            is_hit: True if the pin counts as a use of the state, by a request that starts from it.

        Raises:
            CacheIntegrityError: If the block has no state.
        """
        if block not in self.slot_by_block:
            raise CacheIntegrityError(f"block {block} has no cached state to pin")
        self._pins[block] = self._pins.get(block, 0) + 1
        self._rolling.discard(block)
        if is_hit:
            self._quiet_pins.pop(block, None)
            self._count_hit(block)
            self._clock += 1
        elif block in self._evictable:
            self._quiet_pins[block] = self._evictable.last_use_of(block)
        self._unfile(block)

    def unpin(self, block: BlockId) -> None:
        """Undo one `pin`; raise `CacheIntegrityError` if the block is not pinned."""
        if block not in self._pins:
            raise CacheIntegrityError(f"the state of block {block} is not pinned")
        self._pins[block] -= 1
        if self._pins[block]:
            return
        del self._pins[block]
        last_used = self._quiet_pins.pop(block, None)
        for slot in self._orphans.pop(block, ()):
            self._owners.free(slot, SlotOwner.CACHED)
        if block in self.slot_by_block:
            if last_used is None:
                self._clock += _MOMENT
            self._file(block, self._clock if last_used is None else last_used)

    def drop(self, block: BlockId) -> None:
        """Forget the block's state, if any, and free its slot; raise `CacheIntegrityError` if the state is pinned."""
        if block not in self.slot_by_block:
            return
        if block in self._pins:
            raise CacheIntegrityError(
                f"the state of block {block} has {self._pins[block]} pins, so it cannot be dropped"
            )
        self._forget_state(block)

    def note_end(self, block: BlockId) -> None:
        """Record that no block is cached after this one; do nothing if the block has no evictable state."""
        if block not in self.slot_by_block:
            return
        weight = self._file_again(block) if block in self._evictable else self._weigh(block)
        if self._kinds[block] != _NOT_COUNTED:
            self._count_kind(block, weight.kind)

    def evict(self, *, is_end: bool = False) -> None:
        """Evict the state of lowest priority and the KV blocks that cannot be reused without it.

        Args:
            is_end: True to consider only the last states of texts, whose eviction frees KV blocks.

        Raises:
            CacheIntegrityError: If every state under consideration is pinned.
        """
        kinds = ENDS if is_end else None
        block = self._next_evicted(kinds)
        while block not in self._saved and self._saver.saves(block):
            self._saved.add(block)
            self._file_again(block)
            block = self._next_evicted(kinds)
        self.num_blocks_evicted += self._forget_state(block)
        self.num_evicted += 1

    def touch_path(self, blocks: Sequence[BlockId], prompt_len: int | None = None) -> None:
        """Mark the states of a text's blocks as used now, and link each to the previous one.

        Args:
            blocks: Blocks from the start of the text.
            prompt_len: Number of tokens of the text's newest prompt, whose last state is marked; None if unknown.
        """
        path = [block for block in blocks if block in self.slot_by_block]
        for anchor, block in pairwise(path):
            self._lineage.relink(block, anchor)
        if prompt_len is not None:
            self._lineage.mark_prompt_end(path, prompt_len)
        self._clock += 1
        for block in reversed(path):  # last state first, in eviction order
            weight = self._weigh(block) if block in self._pins else self._file(block, self._clock)
            self._count_kind(block, weight.kind)

    def flush(self) -> None:
        """Drop all cached states; a pinned slot is freed at its last unpin. Flush the KV blocks afterwards."""
        for block in sorted(self.slot_by_block):
            if block in self._pins:
                self._orphans.setdefault(block, []).append(self.slot_by_block.pop(block))
            else:
                self._unfile(block)
                self._owners.free(self.slot_by_block.pop(block), SlotOwner.CACHED)
            self._texts.prune(block)
        self._evictable.clear()
        self._kinds.clear()
        self._rolling.clear()
        self._held.clear()
        self._saved.clear()
        self._quiet_pins.clear()
        self._lineage.clear()
        self._observer.flushed()
        self._saver.flushed()

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` with the violated invariant unless all invariants of the pool hold. O(n)."""
        self._owners.check_integrity()
        self._running.check_integrity()
        if self._running_indices is not None:
            self._running_indices.check_integrity()
        orphans = [slot for slots in self._orphans.values() for slot in slots]
        self._owners.check_owned(SlotOwner.CACHED, [*self.slot_by_block.values(), *orphans])
        pinned, orphaned = self._pins.keys(), self._orphans.keys()
        if pinned - self.slot_by_block.keys() - orphaned or orphaned - pinned:
            raise CacheIntegrityError(
                f"pinned blocks must have a cached or flushed state, and flushed blocks must be pinned, found pins "
                f"{self._pins}, states {self.slot_by_block} and flushed slots {self._orphans}"
            )
        if self._rolling - self.slot_by_block.keys() or self._rolling & self._pins.keys():
            raise CacheIntegrityError(
                f"rolling checkpoints {self._rolling} must have a state and no pin, found pins {self._pins}"
            )
        if self._held.until.keys() - self.slot_by_block.keys():
            raise CacheIntegrityError(
                f"held blocks {self._held.until.keys()} must have a state, found states {self.slot_by_block}"
            )
        unpinned = self.slot_by_block.keys() - self._pins.keys()
        if len(unpinned) != len(self._evictable) or not all(block in self._evictable for block in unpinned):
            raise CacheIntegrityError(
                f"the states of blocks {unpinned} are unpinned, but {len(self._evictable)} are evictable"
            )

    def _take(self, num_slots: int, owner: SlotOwner, owners: SlotOwners) -> list[SlotId]:
        if num_slots < 0:
            raise ValueError(f"num_slots must not be negative, found {num_slots}")
        if owners.indices.num_free < num_slots:
            self._make_room(num_slots, owners)
        return owners.take(num_slots, owner)

    def _make_room(self, num_slots: int, owners: SlotOwners) -> None:
        """Evict until `num_slots` slots are free; raise the same errors as `take_live`."""
        indices = owners.indices
        if num_slots > indices.num_available:
            raise CacheCapacityError(
                f"{num_slots} state slots are needed, but {indices.num_free} are free and "
                f"{indices.num_available - indices.num_free} "
                f"evictable of {indices.num_indices}; raise --cache-gb, or --inference-dynamic-batching-prefix-caching-"
                "mamba-gb if that is set, or lower max requests"
            )
        while indices.num_free < num_slots:
            self.evict()

    def _next_evicted(self, kinds: Container[int] | None = None) -> BlockId:
        """Return the block whose state has the lowest priority among states of these kinds, or of all kinds."""
        first, likelihood = self._evictable.first, self._rule.likelihood
        block = first(self._clock, likelihood, kinds)
        while self._has_changed(block):
            self._count_kind(block, self._file_again(block).kind)
            block = first(self._clock, likelihood, kinds)
        return block

    def _forget_state(self, block: BlockId) -> int:
        """Forget the block's state; return how many KV blocks were freed with it."""
        self._evictable.discard(block)
        self._rolling.discard(block)
        if block in self._held.until:
            self._held.release(block)
        self._saved.discard(block)
        self._owners.free(self.slot_by_block.pop(block), SlotOwner.CACHED, is_fixed=False)
        self._observer.dropped(block)
        self._saver.dropped(block)
        prompt_end = self._lineage.pass_prompt_end_on(block, self.slot_by_block)
        if prompt_end is not None and prompt_end in self._evictable:
            self._file_again(prompt_end)
        return self._texts.prune(block)

    def _file(self, block: BlockId, last_used: float) -> Weight:
        weight = self._weigh(block)
        if self._evictable.push(block, last_used, self._lineage.num_tokens(block), weight):
            self._indices.unfix(self.slot_by_block[block])
        return weight

    def _file_again(self, block: BlockId) -> Weight:
        return self._file(block, self._evictable.last_use_of(block))

    def _count_kind(self, block: BlockId, kind: int) -> None:
        """Count the block's state as a state of this kind, unless it was last counted as one."""
        if self._kinds[block] != kind:
            self._kinds[block] = kind
            self._rule.count_state(kind)

    def _count_hit(self, block: BlockId) -> None:
        if self._kinds[block] != _NOT_COUNTED:
            self._count_kind(block, self._weigh(block).kind)
            self._rule.count_hit(self._kinds[block])
            self._kinds[block] = _NOT_COUNTED
        if not self._texts.is_end(block):
            self._lineage.count_branch_hit(block)

    def _unfile(self, block: BlockId) -> None:
        if self._evictable.discard(block):
            self._indices.fix(self.slot_by_block[block])

    def _has_changed(self, block: BlockId) -> bool:
        """Return whether a state's weight has changed since it was queued, because states or blocks near it changed."""
        was_end = self._evictable.kind_of(block) in ENDS
        if was_end == self._texts.is_end(block) and self._lineage.is_anchor_kept(block, self.slot_by_block):
            return False
        return self._weigh(block) != self._evictable.weight_of(block)

    def _weigh(self, block: BlockId) -> Weight:
        weight = self._rule.weigh(self._entry(block))
        return weight._replace(is_held=True) if block in self._held.until or block in self._saved else weight

    def _entry(self, block: BlockId) -> CachedEntry:
        return self._lineage.entry(block, self.slot_by_block, is_end=self._texts.is_end(block))
