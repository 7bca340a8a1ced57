"""A cache's KV block pool and state slot pool, which evict together and may share memory."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import CacheIntegrityError
from .eviction_rules import EvictionRule
from .identifiers import BlockId, SlotId
from .index_pools import CacheSpace, FixedIndexPool
from .kv_block_pool import KVBlockPool
from .requests import RunningRequest
from .slot_owners import SlotOwner
from .slot_pool import SlotPool


@dataclass(frozen=True, slots=True)
class CachePools:
    """A KV block pool, a state slot pool, and the memory that both use."""

    kv: KVBlockPool
    slots: SlotPool
    space: CacheSpace

    @staticmethod
    def over(
        space: CacheSpace, rule: EvictionRule, *, block_size: int, running: FixedIndexPool | None = None
    ) -> "CachePools":
        """Return empty pools over `space`. To make room in either pool, the state of lowest priority is evicted.

        Args:
            running: Index pool for live and draft states if these have separate memory; None otherwise.
        """
        slots = SlotPool(space.slots, rule, running)
        kv = KVBlockPool(space.blocks, slots, block_size=block_size)
        slots.attach(kv)
        return CachePools(kv, slots, space)

    def fits(
        self,
        num_blocks: int,
        num_cached: int = 0,
        kept_blocks: Sequence[BlockId] = (),
        kept_slots: Sequence[SlotId] = (),
    ) -> bool:
        """Return whether a live state, the blocks and the cached states can all be allocated; see `CacheSpace.fits`."""
        slots = self.slots
        if slots.shares_slots:
            return self.space.fits(num_blocks, num_cached + 1, kept_blocks, kept_slots)
        return bool(slots.num_available_to_run) and self.space.fits(num_blocks, num_cached, kept_blocks, kept_slots)


def check_requests_and_pools(
    requests: Sequence[RunningRequest],
    pools: CachePools,
    held: Mapping[BlockId, int],
    expected: Sequence[SlotId],
) -> None:
    """Raise `CacheIntegrityError` with the mismatch unless the pools are consistent and agree with the requests.

    Args:
        held: For each block, the number of references held by something other than a request, such as a copy.
        expected: Slots reserved by something other than a request, such as a copy.
    """
    kv, slots = pools.kv, pools.slots
    pools.space.check_integrity()
    kv.check_integrity()
    slots.check_integrity()
    _check_blocks(requests, kv, held)
    stray = [block for block in slots.cached_blocks() if kv.key_of(block) is None]
    if stray:
        raise CacheIntegrityError(f"blocks {stray} have a cached state but no key")
    _check_slots(requests, slots, expected)


def _check_blocks(requests: Sequence[RunningRequest], kv: KVBlockPool, held: Mapping[BlockId, int]) -> None:
    refs = Counter(block for request in requests for block in request.block_ids)
    refs.update(held)
    for block, count in refs.items():
        if kv.num_refs(block) != count:
            raise CacheIntegrityError(
                f"block {block} has {kv.num_refs(block)} references, but requests and copies hold {count}"
            )
    if kv.num_referenced != len(refs):
        raise CacheIntegrityError(
            f"{kv.num_referenced} blocks are referenced, but requests and copies hold {len(refs)}"
        )


def _check_slots(requests: Sequence[RunningRequest], slots: SlotPool, expected: Sequence[SlotId]) -> None:
    held = {
        SlotOwner.LIVE: [request.cursor.live_slot for request in requests],
        SlotOwner.RESERVED: [*expected, *(state.slot for request in requests for state in request.reserved)],
        SlotOwner.DRAFT: [slot for request in requests for slot in request.cursor.draft_slots],
    }
    counts = slots.count_by_owner()
    for owner, listed in held.items():
        owner_of = slots.owner_of if owner is SlotOwner.RESERVED else slots.owner_of_running
        strange = [slot for slot in listed if owner_of(slot) is not owner]
        if strange or len(set(listed)) != len(listed) or len(listed) != counts[owner.value]:
            raise CacheIntegrityError(f"requests hold {owner.value} slots {listed}, but the pool counts {counts}")
