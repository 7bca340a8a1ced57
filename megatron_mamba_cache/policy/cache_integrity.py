"""Check that running requests and the pools agree about every KV block and state slot."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ..errors import CacheIntegrityError
from .identifiers import BlockId, SlotId
from .kv_block_pool import KVBlockPool
from .pools import CachePools
from .requests import RunningRequest
from .slot_owners import SlotOwner
from .slot_pool import SlotPool


def check_rows_and_pools(
    rows: Sequence[RunningRequest],
    pools: CachePools,
    held: Mapping[BlockId, int] = MappingProxyType({}),
    expected: Sequence[SlotId] = (),
) -> None:
    """Raise `CacheIntegrityError`, naming the mismatch, unless the pools are intact and agree with the requests.

    Args:
        held: References on blocks that others than requests hold.
        expected: Slots that others have reserved.
    """
    kv, slots = pools.kv, pools.slots
    pools.space.check_integrity()
    kv.check_integrity()
    slots.check_integrity()
    _check_blocks(rows, kv, held)
    stray = [block for block in slots.cached_blocks() if kv.key_of(block) is None]
    if stray:
        raise CacheIntegrityError(f"blocks {stray} have a cached state but no key")
    _check_slots(rows, slots, expected)


def _check_blocks(rows: Sequence[RunningRequest], kv: KVBlockPool, held: Mapping[BlockId, int]) -> None:
    refs = Counter(block for row in rows for block in row.block_ids)
    refs.update(held)
    for block, count in refs.items():
        if kv.num_refs(block) != count:
            raise CacheIntegrityError(f"block {block}: {kv.num_refs(block)} references, {count} rows hold it")
    if kv.num_referenced != len(refs):
        raise CacheIntegrityError(f"{kv.num_referenced} blocks referenced, rows hold {len(refs)}")


def _check_slots(rows: Sequence[RunningRequest], slots: SlotPool, expected: Sequence[SlotId]) -> None:
    held = {
        SlotOwner.LIVE: [row.cursor.live_slot for row in rows],
        SlotOwner.RESERVED: [*expected, *(state.slot for row in rows for state in row.reserved)],
        SlotOwner.DRAFT: [slot for row in rows for slot in row.cursor.draft_slots],
    }
    counts = slots.count_by_owner()
    for owner, listed in held.items():
        owner_of = slots.owner_of if owner is SlotOwner.RESERVED else slots.owner_of_running
        strange = [slot for slot in listed if owner_of(slot) is not owner]
        if strange or len(set(listed)) != len(listed) or len(listed) != counts[owner.value]:
            raise CacheIntegrityError(f"rows hold {owner.value} slots {listed}, the pool owns {counts}")
