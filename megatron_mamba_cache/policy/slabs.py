"""One memory for KV blocks and states: slabs that hold either, changing hands when they are empty."""

from collections import Counter
from collections.abc import Sequence

from .slab_places import PartsOfSlabs, SlabPlaces, Slabs, SlabUse, WholeSlabs


class SlabSpace:
    """`num_slabs` slabs, each with room for `blocks_per_slab` KV blocks or for `slots_per_slab` states.

    Block b lies in slab b // blocks_per_slab, slot s in slab s // slots_per_slab, so that every place has a fixed
    address whatever its slab is used for at the time. A slab belongs to one use from its first place taken to its last
    given back.
    """

    def __init__(self, num_slabs: int, blocks_per_slab: int, slots_per_slab: int) -> None:
        """Start with every slab unused.

        Raises:
            ValueError: If a number is out of range.
        """
        if num_slabs < 0 or blocks_per_slab < 1 or slots_per_slab < 1:
            raise ValueError(
                f"need num_slabs >= 0 and a block and a slot a slab, found {num_slabs}, {blocks_per_slab} and "
                f"{slots_per_slab}"
            )
        self.num_slabs = num_slabs
        self._slabs = Slabs(num_slabs)
        self.blocks = _places(self._slabs, SlabUse.KV, blocks_per_slab)
        self.slots = _places(self._slabs, SlabUse.STATES, slots_per_slab)

    def fits(
        self, num_blocks: int, num_slots: int, beside_blocks: Sequence[int] = (), beside_slots: Sequence[int] = ()
    ) -> bool:
        slabs, num_slabs, newly_fixed = self._slabs, 0, 0
        for places, wanted, beside in ((self.blocks, num_blocks, beside_blocks), (self.slots, num_slots, beside_slots)):
            fixed_now = {place // places.per_slab for place in beside}
            fixed_now = {slab for slab in fixed_now if not slabs.num_fixed[slab]}
            newly_fixed += len(fixed_now)
            beside_fixed = places.num_beside_fixed + len(fixed_now) * places.per_slab - len(beside)
            num_slabs += -(-max(wanted - beside_fixed, 0) // places.per_slab)
        return num_slabs <= slabs.num_open - newly_fixed

    def count_slabs(self) -> dict[str, int]:
        """Return how many slabs are unused, and how many hold KV blocks and states."""
        uses = Counter(self._slabs.use)
        return {"unused": uses[SlabUse.UNUSED], "kv_blocks": uses[SlabUse.KV], "states": uses[SlabUse.STATES]}

    def take_stale_blocks(self) -> list[range]:
        """Return the blocks of slabs that KV has taken over from states since the last call, to be cleared now.

        What states leave behind reads as any number, NaN too, and attention may multiply what it masks by zero.
        """
        slabs, stale = self._slabs, []
        for slab in slabs.taken_over:
            if slabs.use[slab] == SlabUse.KV and slabs.held_states[slab]:
                slabs.held_states[slab] = False
                first = slab * self.blocks.per_slab
                stale.append(range(first, first + self.blocks.per_slab))
        slabs.taken_over.clear()
        return stale

    def check_integrity(self) -> None:
        self._slabs.check_integrity()
        self.blocks.check_integrity()
        self.slots.check_integrity()


def _places(slabs: Slabs, use: SlabUse, per_slab: int) -> SlabPlaces:
    return WholeSlabs(slabs, use, per_slab) if per_slab == 1 else PartsOfSlabs(slabs, use, per_slab)
