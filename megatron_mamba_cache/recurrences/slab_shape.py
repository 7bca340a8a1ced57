"""How one memory is cut into slabs that hold KV blocks or states, and its bytes by use."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_ALIGNMENT = 256
_FEW = 16
_MOST_UNITS = 4096
_SMALL_LOSS = 0.03
_ANY_NUMBER = 2**40  # other ranks set the limit


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Bytes that one rank stores of a cached state and of a KV block; 0 without such layers.

    Args:
        token_row: Bytes of one token's keys of one layer; aligns the addresses of a block.
        state_row: Bytes of a row of a head's state; aligns the addresses of states.
    """

    state: int
    block: int
    token_row: int
    state_row: int = 1


@dataclass(frozen=True, slots=True)
class SlabShape:
    """How many KV blocks or states a slab holds; the same on all ranks of a model."""

    blocks_per_slab: int
    slots_per_slab: int

    @staticmethod
    def fitting(units: Sequence[UnitBytes]) -> "SlabShape":
        """Return the smallest slab that wastes little on any rank, else the one that wastes least.

        Args:
            units: Of all ranks, in the same order on each.
        """
        with_both = [unit for unit in units if unit.state and unit.block]
        total = UnitBytes(sum(unit.state for unit in units) or 1, sum(unit.block for unit in units) or 1, 1)
        measured = with_both or [total]
        shapes = list(_candidates(min(unit.state / unit.block for unit in measured)))
        fitting = [shape for shape in shapes if shape.loss(measured) <= _SMALL_LOSS]
        return fitting[0] if fitting else min(shapes, key=lambda shape: shape.loss(measured))

    def slab_bytes(self, unit: UnitBytes) -> int:
        """Return the bytes of a slab on a rank; its units are of equal size and aligned."""
        row = math.lcm(_ALIGNMENT, unit.token_row or 1, unit.state_row or 1)
        grain = row * math.lcm(self.blocks_per_slab, self.slots_per_slab)
        needed = max(self.blocks_per_slab * unit.block, self.slots_per_slab * unit.state)
        return -(-needed // grain) * grain

    def slabs_in(self, num_bytes: int, unit: UnitBytes) -> int:
        """Return how many slabs a rank's memory holds next to the dummy block; a huge number if slabs take no bytes."""
        slab_bytes = self.slab_bytes(unit)
        return max(num_bytes - unit.block, 0) // slab_bytes if slab_bytes else _ANY_NUMBER

    def slabs_of_request(self, num_blocks: int, num_states: int) -> int:
        """Return the slabs that one request needs for its KV and its states; the last state is the one to cache.

        The others, live and draft states, never move. Each may be alone in a slab that other requests' states filled
        when it was taken, and then no KV block can use the rest of that slab.
        """
        packed = -(-num_states // self.slots_per_slab)
        return -(-num_blocks // self.blocks_per_slab) + max(packed, num_states - 1)

    def blocks_of_request(self, num_slabs: int, num_states: int) -> int:
        """Return the most KV blocks that fit in `num_slabs` with these states; 0 if none does."""
        return max(num_slabs - self.slabs_of_request(0, num_states), 0) * self.blocks_per_slab

    def loss(self, units: Sequence[UnitBytes]) -> float:
        """Return the largest share of a slab that either use leaves empty on any rank."""
        return max(
            (
                1 - min(self.blocks_per_slab * unit.block, self.slots_per_slab * unit.state) / self.slab_bytes(unit)
                for unit in units
                if self.slab_bytes(unit)
            ),
            default=0.0,
        )


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """The sizes of one rank's memory for KV blocks and states.

    Args:
        unit: Bytes of a cached state and of a block.
        total: Bytes of the memory, without the dummy block.
        slab: How it is cut.
        rings: Bytes of replay buffers, in the same budget but separate memory.
        running: Likewise, of all requests' live and draft states, if they have separate memory.
    """

    unit: UnitBytes
    total: int
    slab: SlabShape
    rings: int = 0
    running: int = 0

    def by_use(self, slots: Mapping[str, int], blocks: Mapping[str, int], slabs: Mapping[str, int]) -> dict[str, int]:
        """Return bytes by use; `unusable` bytes are in slabs of the other use.

        Args:
            slots, blocks, slabs: States by owner, KV blocks by kind, slabs by use.
        """
        owners = ("reserved",) if self.running else ("live", "reserved", "draft")
        running = sum(slots[owner] for owner in owners)
        found = {
            "kv_in_use": blocks["in_use"] * self.unit.block,
            "kv_cached": blocks["cached"] * self.unit.block,
            "states_running": running * self.unit.state,
            "states_cached": slots["cached"] * self.unit.state,
            "unusable": self._unusable(slabs),
        }
        free = max(self.total - sum(found.values()), 0)
        found["states_running"] += self.running
        return found | {"rings": self.rings, "free": free}

    def _unusable(self, slabs: Mapping[str, int]) -> int:
        slab, slab_bytes = self.slab, self.slab.slab_bytes(self.unit)
        stacked_blocks = slab_bytes - slab.blocks_per_slab * self.unit.block
        return slabs["kv_blocks"] * stacked_blocks + slabs["states"] * (
            slab_bytes - slab.slots_per_slab * self.unit.state
        )


def aligned(num_bytes: int) -> int:
    """Round bytes up to the alignment of tensors."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _candidates(ratio: float) -> Iterator[SlabShape]:
    """Yield shapes with few of the larger unit, fewest first; a state has `ratio` times the bytes of a block."""
    for few in range(1, _FEW + 1):
        many = few * max(ratio, 1 / ratio)
        for number in sorted({math.floor(many), math.ceil(many)}):
            number = min(max(number, 1), _MOST_UNITS)
            yield SlabShape(number, few) if ratio >= 1 else SlabShape(few, number)
