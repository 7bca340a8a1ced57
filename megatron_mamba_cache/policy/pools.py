"""The pools of a cache: KV blocks and states over one space, which leave together."""

from dataclasses import dataclass

from .eviction_rules import EvictionRule
from .kv_block_pool import KVBlockPool
from .places import CacheSpace
from .slot_pool import SlotPool


@dataclass(frozen=True, slots=True)
class CachePools:
    """KV blocks, state slots, and the space they share."""

    kv: KVBlockPool
    slots: SlotPool
    space: CacheSpace

    @staticmethod
    def over(space: CacheSpace, rule: EvictionRule, *, block_size: int) -> "CachePools":
        """Return empty pools, connected: room for either is made by evicting the state of least worth."""
        slots = SlotPool(space.slots, rule)
        kv = KVBlockPool(space.blocks, slots, block_size=block_size)
        slots.attach(kv)
        return CachePools(kv, slots, space)
