"""What the bytes of one rank's cache memory are used for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .slab_shape import SlabShape, UnitBytes


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """The sizes of one rank's memory for KV blocks and states.

    Args:
        unit: Bytes of a cached state and of a block.
        total: Bytes of the memory, beside the block that takes writes which are never read.
        slab: How it is cut, if both uses share it.
        rings: Bytes beside it, in the same budget, from which live states are replayed.
        running: Likewise, of the live and draft states of all requests, where these do not share it.
    """

    unit: UnitBytes
    total: int
    slab: SlabShape | None
    rings: int = 0
    running: int = 0

    @staticmethod
    def of(num_slots: int, num_blocks: int, num_slabs: int, slab: SlabShape | None, unit: UnitBytes) -> "MemorySizes":
        """Return the sizes of pools of so many places."""
        if slab is None:
            return MemorySizes(unit, num_slots * unit.state + num_blocks * unit.block, None)
        return MemorySizes(unit, num_slabs * slab.slab_bytes(unit), slab)

    def beside(self, rings: int, running: int) -> "MemorySizes":
        """Return the sizes of this memory with rings, and with live and draft states, beside it."""
        return replace(self, rings=rings, running=running)

    def by_use(self, slots: Mapping[str, int], blocks: Mapping[str, int], slabs: Mapping[str, int]) -> dict[str, int]:
        """Return bytes by use; `unusable` ones are those of slabs in use that neither use can take.

        Args:
            slots: States by owner.
            blocks: KV blocks by kind.
            slabs: Slabs by use, if both uses share the memory.
        """
        owners = ("reserved",) if self.running else ("live", "reserved", "draft")
        running = sum(slots[owner] for owner in owners)
        found = {
            "kv_in_use": blocks["in_use"] * self.unit.block,
            "kv_cached": blocks["cached"] * self.unit.block,
            "states_running": running * self.unit.state,
            "states_cached": slots["cached"] * self.unit.state,
            "unusable": 0 if self.slab is None else self._unusable(self.slab, slabs),
        }
        free = max(self.total - sum(found.values()), 0)
        found["states_running"] += self.running
        return found | {"rings": self.rings, "free": free}

    def _unusable(self, slab: SlabShape, slabs: Mapping[str, int]) -> int:
        slab_bytes = slab.slab_bytes(self.unit)
        beside_blocks = slab_bytes - slab.blocks_per_slab * self.unit.block
        return slabs["kv_blocks"] * beside_blocks + slabs["states"] * (
            slab_bytes - slab.slots_per_slab * self.unit.state
        )
