"""The pools of a cache: KV blocks and states over one space, which leave together."""

from collections.abc import Sequence
from dataclasses import dataclass

from .eviction_rules import EvictionRule
from .identifiers import BlockId, SlotId
from .kv_block_pool import KVBlockPool
from .places import CacheSpace, FixedPlaces
from .slot_pool import SlotPool


@dataclass(frozen=True, slots=True)
class CachePools:
    """KV blocks, state slots, and the space they share."""

    kv: KVBlockPool
    slots: SlotPool
    space: CacheSpace

    @staticmethod
    def over(
        space: CacheSpace, rule: EvictionRule, *, block_size: int, running: FixedPlaces | None = None
    ) -> "CachePools":
        """Return empty pools, connected: room for either is made by evicting the state of least worth.

        Args:
            running: Places of live and draft states, if they are not in the space; see `SlotPool`.
        """
        slots = SlotPool(space.slots, rule, running)
        kv = KVBlockPool(space.blocks, slots, block_size=block_size)
        slots.attach(kv)
        return CachePools(kv, slots, space)

    def fits(
        self,
        num_blocks: int,
        num_cached: int = 0,
        beside_blocks: Sequence[BlockId] = (),
        beside_slots: Sequence[SlotId] = (),
    ) -> bool:
        """Return whether a live state, blocks and cached states can be had together; see `CacheSpace.fits`."""
        slots = self.slots
        if slots.shares_slots:
            return self.space.fits(num_blocks, num_cached + 1, beside_blocks, beside_slots)
        return bool(slots.num_available_to_run) and self.space.fits(num_blocks, num_cached, beside_blocks, beside_slots)
