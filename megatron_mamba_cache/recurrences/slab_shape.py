"""Split of the cache memory into slabs that hold KV blocks or states, and statistics of memory use in bytes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_ALIGNMENT = 256
_FEW = 16
_MOST_UNITS = 4096
_SMALL_LOSS = 0.03
_ANY_NUMBER = 2**40  # no limit on this rank; the other ranks limit the number


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """Sizes in bytes of a cached state and of a KV block on one rank; 0 if the rank has no such layers.

    Args:
        token_row: Size of one token's keys in one layer; block addresses are multiples of it.
        state_row: Size of a row of a head's state; state addresses are multiples of it.
    """

    state: int
    block: int
    token_row: int
    state_row: int = 1


@dataclass(frozen=True, slots=True)
class SlabShape:
    """Number of KV blocks, and number of states, that fit in a slab; equal on all ranks of a model."""

    blocks_per_slab: int
    slots_per_slab: int

    @staticmethod
    def fitting(units: Sequence[UnitBytes]) -> "SlabShape":
        """Return the smallest slab that wastes at most 3 % of its memory on any rank, or else the least wasteful slab.

        Args:
            units: Sizes on all ranks, in the same order on each rank.
        """
        with_both = [unit for unit in units if unit.state and unit.block]
        total = UnitBytes(sum(unit.state for unit in units) or 1, sum(unit.block for unit in units) or 1, 1)
        measured = with_both or [total]
        shapes = list(_candidates(min(unit.state / unit.block for unit in measured)))
        fitting = [shape for shape in shapes if shape.loss(measured) <= _SMALL_LOSS]
        return fitting[0] if fitting else min(shapes, key=lambda shape: shape.loss(measured))

    def slab_bytes(self, unit: UnitBytes) -> int:
        """Return the size of a slab in bytes on a rank, chosen so that blocks and states in it are aligned."""
        row = math.lcm(_ALIGNMENT, unit.token_row or 1, unit.state_row or 1)
        grain = row * math.lcm(self.blocks_per_slab, self.slots_per_slab)
        needed = max(self.blocks_per_slab * unit.block, self.slots_per_slab * unit.state)
        return -(-needed // grain) * grain

    def slabs_in(self, num_bytes: int, unit: UnitBytes) -> int:
        """Return the number of slabs that fit in a rank's memory together with the dummy block.

        If slabs have size 0 on this rank, return `_ANY_NUMBER`.
        """
        slab_bytes = self.slab_bytes(unit)
        return max(num_bytes - unit.block, 0) // slab_bytes if slab_bytes else _ANY_NUMBER

    def slabs_of_request(self, num_blocks: int, num_states: int) -> int:
        """Return the maximum number of slabs that one request can need for its KV blocks and states.

        One of the `num_states` states is cached; the others are live and draft states, which never move. Each of these
        may be the last state left in a slab, and the rest of that slab cannot hold KV blocks.
        """
        packed = -(-num_states // self.slots_per_slab)
        return -(-num_blocks // self.blocks_per_slab) + max(packed, num_states - 1)

    def blocks_of_request(self, num_slabs: int, num_states: int) -> int:
        """Return the maximum number of KV blocks for a request with `num_states` states in `num_slabs` slabs."""
        return max(num_slabs - self.slabs_of_request(0, num_states), 0) * self.blocks_per_slab

    def loss(self, units: Sequence[UnitBytes]) -> float:
        """Return the largest unused fraction of a slab, over both uses (KV blocks or states) and all ranks."""
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
    """Sizes in bytes of one rank's memory for KV blocks and states.

    Args:
        unit: Sizes of a cached state and of a block.
        total: Size of the memory that is split into slabs, without the dummy block.
        slab: Number of blocks or states per slab.
        rings: Size of the replay buffers, which are allocated separately but count towards the same budget.
        running: Size of live and draft states if they are allocated separately, else 0.
    """

    unit: UnitBytes
    total: int
    slab: SlabShape
    rings: int = 0
    running: int = 0

    def by_use(self, slots: Mapping[str, int], blocks: Mapping[str, int], slabs: Mapping[str, int]) -> dict[str, int]:
        """Return the memory in bytes for each use; `unusable` is the rest of each slab after its last block or state.

        Args:
            slots: Number of states by owner.
            blocks: Number of KV blocks by kind.
            slabs: Number of slabs by use.
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
    """Round a size in bytes up to the alignment of tensors."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _candidates(ratio: float) -> Iterator[SlabShape]:
    """Yield slab shapes, smallest first; `ratio` is the size of a state divided by that of a block."""
    for few in range(1, _FEW + 1):
        many = few * max(ratio, 1 / ratio)
        for number in sorted({math.floor(many), math.ceil(many)}):
            number = min(max(number, 1), _MOST_UNITS)
            yield SlabShape(number, few) if ratio >= 1 else SlabShape(few, number)
