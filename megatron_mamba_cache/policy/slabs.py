"""Memory shared by KV blocks and states. Each slab holds only one of them, and can be reassigned when it is empty."""

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from heapq import heappop, heappush

from ..errors import CacheIntegrityError


class SlabUse(IntEnum):
    """Contents of a slab; the values of KV and STATES are indices into `Slabs.indices`."""

    UNUSED = -1
    KV = 0
    STATES = 1


class Slabs:
    """Bookkeeping of the slabs that KV blocks and states share.

    Attributes:
        use: Contents of each slab, a `SlabUse`.
        num_fixed: For each slab, the number of indices that cannot be evicted.
        num_open: Number of slabs without a fixed index, which evictions could empty.
        unused: Unused slabs in ascending order. KV takes the first and states take the last, so few slabs are
            reassigned.
        held_states: For each slab, True if it has held states since its memory was last cleared.
        taken_over: Slabs reassigned from states to KV. May list a slab twice, or a slab that is now unused.
        indices: Index pool for each use. Both pools count the indices in an unused slab as free, and the indices in an
            open slab as available.
    """

    def __init__(self, num_slabs: int) -> None:
        self.use: list[int] = [SlabUse.UNUSED] * num_slabs
        self.num_fixed = [0] * num_slabs
        self.num_open = num_slabs
        self.unused = list(range(num_slabs))
        self.held_states = [False] * num_slabs
        self.taken_over: list[int] = []
        self.indices: list[SlabIndexPool] = []

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless the counts agree with the lists. O(n)."""
        unused = [slab for slab, use in enumerate(self.use) if use == SlabUse.UNUSED]
        if self.unused != unused:
            raise CacheIntegrityError(f"slabs {self.unused} are listed as unused, but slabs {unused} are")
        num_open = self.num_fixed.count(0)
        if self.num_open != num_open:
            raise CacheIntegrityError(f"num_open is {self.num_open}, but {num_open} slabs have no fixed index")
        fixed = [slab for slab in unused if self.num_fixed[slab]]
        if fixed:
            raise CacheIntegrityError(f"unused slabs must not have fixed indices, but slabs {fixed} do")


class SlabIndexPool:
    """`IndexPool` of KV blocks or states over shared slabs. KV takes the lowest unused slabs, states the highest.

    Partly used slabs are filled first, lowest number first, so that other slabs become empty.

    Attributes:
        num_next_to_fixed: Number of indices that are not fixed, in slabs that also have fixed indices.
    """

    is_shared = True

    def __init__(self, slabs: Slabs, use: SlabUse, per_slab: int) -> None:
        self.per_slab = per_slab
        self.num_indices = self.num_free = len(slabs.use) * per_slab
        self.num_next_to_fixed = 0
        self._slabs = slabs
        self._use = int(use)
        self._other_use = 1 - self._use
        self._free: list[list[int]] = [[] for _ in slabs.use]  # free indices of each slab; a stack
        self._partly: list[int] = []  # heap of the slabs with free indices; may also hold slabs that were released
        slabs.indices.append(self)

    @property
    def num_available(self) -> int:
        return self._slabs.num_open * self.per_slab + self.num_next_to_fixed

    def take(self, num_indices: int) -> list[int]:
        slabs, partly, num_fixed = self._slabs, self._partly, self._slabs.num_fixed
        taken: list[int] = []
        missing = num_indices
        while missing:
            slab = partly[0] if partly else self._open_slab()
            free = self._free[slab]
            if free and not num_fixed[slab]:
                slabs.num_open -= 1
                self.num_next_to_fixed += self.per_slab
            while free and missing:
                taken.append(free.pop())
                num_fixed[slab] += 1
                missing -= 1
            if not free:  # the slab is full or was released
                heappop(partly)
        self.num_free -= num_indices
        self.num_next_to_fixed -= num_indices
        return taken

    def release(self, index: int) -> None:
        slab = index // self.per_slab
        free = self._free[slab]
        self.num_free += 1
        if len(free) + 1 == self.per_slab:
            free.clear()
            self._give_up(slab)
            return
        if not free:
            heappush(self._partly, slab)
        free.append(index)

    def fix(self, *indices: int) -> None:
        slabs, num_fixed, per_slab = self._slabs, self._slabs.num_fixed, self.per_slab
        for index in indices:
            slab = index // per_slab
            if not num_fixed[slab]:
                slabs.num_open -= 1
                self.num_next_to_fixed += per_slab
            num_fixed[slab] += 1
        self.num_next_to_fixed -= len(indices)

    def unfix(self, *indices: int) -> None:
        slabs, num_fixed, per_slab = self._slabs, self._slabs.num_fixed, self.per_slab
        for index in indices:
            slab = index // per_slab
            num_fixed[slab] -= 1
            if not num_fixed[slab]:
                slabs.num_open += 1
                self.num_next_to_fixed -= per_slab
        self.num_next_to_fixed += len(indices)

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless the counts agree with the lists. O(n)."""
        mine = [slab for slab, use in enumerate(self._slabs.use) if use == self._use]
        self._check_lists(mine)
        slabs, per_slab = self._slabs, self.per_slab
        num_fixed = [slabs.num_fixed[slab] for slab in mine]
        for slab, count in zip(mine, num_fixed, strict=True):
            if len(self._free[slab]) + count > per_slab:
                raise CacheIntegrityError(
                    f"slab {slab} has {count} fixed and {len(self._free[slab])} free indices; only {per_slab} fit"
                )
        num_free = sum(len(self._free[slab]) for slab in mine) + len(slabs.unused) * per_slab
        num_next_to_fixed = (len(mine) - num_fixed.count(0)) * per_slab - sum(num_fixed)
        if (self.num_free, self.num_next_to_fixed) != (num_free, num_next_to_fixed):
            raise CacheIntegrityError(
                f"num_free is {self.num_free} and num_next_to_fixed {self.num_next_to_fixed}, but must be {num_free} "
                f"and {num_next_to_fixed}"
            )

    def _check_lists(self, mine: Sequence[int]) -> None:
        for slab in mine:
            free = self._free[slab]
            if len(set(free)) != len(free) or any(index // self.per_slab != slab for index in free):
                raise CacheIntegrityError(
                    f"the free indices of slab {slab} must be distinct and inside it, found {sorted(free)}"
                )
        partly = [slab for slab, free in enumerate(self._free) if free]
        if not set(partly) <= set(mine):
            raise CacheIntegrityError(f"slabs {partly} have free indices, but this pool has only slabs {mine}")
        listed = Counter(self._partly)
        if not set(partly) <= listed.keys() or any(count > 1 for count in listed.values()):
            raise CacheIntegrityError(
                f"the heap has slabs {sorted(self._partly)}, but slabs {partly} have free indices"
            )

    def _open_slab(self) -> int:
        """Take an unused slab, add it to the heap, which must be empty, and return its number."""
        slab = self._take_over()
        first = slab * self.per_slab
        self._free[slab].extend(range(first + self.per_slab - 1, first - 1, -1))
        self._partly.append(slab)
        return slab

    def _take_over(self) -> int:
        """Assign an unused slab to this pool and return its number."""
        slabs = self._slabs
        slab = slabs.unused.pop(-self._use)
        slabs.use[slab] = self._use
        if self._use:
            slabs.held_states[slab] = True
        elif slabs.held_states[slab]:
            slabs.taken_over.append(slab)
        other = slabs.indices[self._other_use]
        other.num_free -= other.per_slab
        return slab

    def _give_up(self, slab: int) -> None:
        """Mark a slab as unused after its last index has been released."""
        slabs = self._slabs
        slabs.use[slab] = SlabUse.UNUSED
        insort(slabs.unused, slab)
        other = slabs.indices[self._other_use]
        other.num_free += other.per_slab


class SlabSpace:
    """Memory in slabs that each hold KV blocks or states; a slab keeps its use until all its indices are free.

    Block b is in slab b // blocks_per_slab, slot s in slab s // slots_per_slab.
    """

    def __init__(self, num_slabs: int, blocks_per_slab: int, slots_per_slab: int) -> None:
        """Create unused slabs; raise ValueError if an argument is out of range."""
        if num_slabs < 0 or blocks_per_slab < 1 or slots_per_slab < 1:
            raise ValueError(
                "num_slabs must be at least 0, and a slab must hold at least one block and one slot, found "
                f"{num_slabs}, {blocks_per_slab} and {slots_per_slab}"
            )
        self.num_slabs = num_slabs
        self._slabs = Slabs(num_slabs)
        self.blocks = SlabIndexPool(self._slabs, SlabUse.KV, blocks_per_slab)
        self.slots = SlabIndexPool(self._slabs, SlabUse.STATES, slots_per_slab)

    def fits(
        self, num_blocks: int, num_slots: int, kept_blocks: Sequence[int] = (), kept_slots: Sequence[int] = ()
    ) -> bool:
        slabs, num_slabs, newly_fixed = self._slabs, 0, 0
        for indices, wanted, kept in ((self.blocks, num_blocks, kept_blocks), (self.slots, num_slots, kept_slots)):
            fixed_now = {index // indices.per_slab for index in kept}
            fixed_now = {slab for slab in fixed_now if not slabs.num_fixed[slab]}
            newly_fixed += len(fixed_now)
            next_to_fixed = indices.num_next_to_fixed + len(fixed_now) * indices.per_slab - len(kept)
            num_slabs += -(-max(wanted - next_to_fixed, 0) // indices.per_slab)
        return num_slabs <= slabs.num_open - newly_fixed

    def count_slabs(self) -> dict[str, int]:
        """Return how many slabs are unused, hold KV blocks, and hold states."""
        uses = Counter(self._slabs.use)
        return {"unused": uses[SlabUse.UNUSED], "kv_blocks": uses[SlabUse.KV], "states": uses[SlabUse.STATES]}

    def take_stale_blocks(self) -> list[range]:
        """Return the blocks of slabs reassigned from states to KV since the last call; the caller clears their memory.

        A state's bytes may be NaN when read as KV. Attention multiplies masked values by zero, and 0 x NaN is NaN.
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
