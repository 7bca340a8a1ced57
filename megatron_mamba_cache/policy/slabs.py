"""One memory for KV blocks and states: slabs that hold either, changing hands when they are empty."""

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from heapq import heappop, heappush

from ..errors import CacheIntegrityError


class SlabUse(IntEnum):
    """Contents of a slab; values index `Slabs.indices`."""

    UNUSED = -1
    KV = 0
    STATES = 1


class Slabs:
    """State of the slabs that both uses share.

    Attributes:
        use: The use of each slab.
        num_fixed: How many of them cannot be evicted.
        num_open: Slabs without a fixed index: the most that can become unused.
        unused: In order: KV takes the first and states the last, so that they keep apart and few slabs change hands.
        held_states: For each slab, True if it has held states since it was last cleared.
        taken_over: Slabs that KV blocks have taken over from states; may hold one twice, or one that is unused again.
        indices: The pool of each use. Both count the indices of an unused slab as free, and of an open one as
            available.
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
        """Raise CacheIntegrityError unless counts and lists agree. O(n)."""
        unused = [slab for slab, use in enumerate(self.use) if use == SlabUse.UNUSED]
        if self.unused != unused:
            raise CacheIntegrityError(f"slabs listed as unused {self.unused} != slabs used for nothing {unused}")
        num_open = self.num_fixed.count(0)
        if self.num_open != num_open:
            raise CacheIntegrityError(f"{self.num_open} open slabs counted, {num_open} found")
        fixed = [slab for slab in unused if self.num_fixed[slab]]
        if fixed:
            raise CacheIntegrityError(f"unused slabs {fixed} have fixed indices")


class SlabIndexPool:
    """The indices of one use. KV takes unused slabs from the low end, states from the high end.

    Partly used slabs are filled first, the lowest number before others, so that some slabs become empty.

    Attributes:
        num_next_to_fixed: Indices that are not fixed, in slabs with a fixed index of this use.
    """

    is_shared = True

    def __init__(self, slabs: Slabs, use: SlabUse, per_slab: int) -> None:
        self.per_slab = per_slab
        self.num_indices = self.num_free = len(slabs.use) * per_slab
        self.num_next_to_fixed = 0
        self._slabs = slabs
        self._use = int(use)
        self._other_use = 1 - self._use
        self._free: list[list[int]] = [[] for _ in slabs.use]  # by slab of this use, the next one last
        self._partly: list[int] = []  # a heap that holds each slab with an index in `_free`, and released ones
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
            if not free:  # full now, or given up long ago
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
        """Raise CacheIntegrityError unless counts and lists agree. O(n)."""
        mine = [slab for slab, use in enumerate(self._slabs.use) if use == self._use]
        self._check_lists(mine)
        slabs, per_slab = self._slabs, self.per_slab
        num_fixed = [slabs.num_fixed[slab] for slab in mine]
        for slab, count in zip(mine, num_fixed, strict=True):
            if len(self._free[slab]) + count > per_slab:
                raise CacheIntegrityError(f"slab {slab} of {per_slab} indices has {count} fixed ones next to free ones")
        num_free = sum(len(self._free[slab]) for slab in mine) + len(slabs.unused) * per_slab
        num_next_to_fixed = (len(mine) - num_fixed.count(0)) * per_slab - sum(num_fixed)
        if (self.num_free, self.num_next_to_fixed) != (num_free, num_next_to_fixed):
            raise CacheIntegrityError(
                f"{self.num_free} free indices and {self.num_next_to_fixed} next to fixed ones counted, {num_free} and "
                f"{num_next_to_fixed} found"
            )

    def _check_lists(self, mine: Sequence[int]) -> None:
        for slab in mine:
            free = self._free[slab]
            if len(set(free)) != len(free) or any(index // self.per_slab != slab for index in free):
                raise CacheIntegrityError(f"slab {slab} lists indices {sorted(free)} as free")
        partly = [slab for slab, free in enumerate(self._free) if free]
        if not set(partly) <= set(mine):
            raise CacheIntegrityError(f"slabs {partly} have free indices of a use that has slabs {mine}")
        listed = Counter(self._partly)
        if not set(partly) <= listed.keys() or any(count > 1 for count in listed.values()):
            raise CacheIntegrityError(f"slabs {sorted(self._partly)} listed as partly used, {partly} found")

    def _open_slab(self) -> int:
        """Take over a slab, which then is the only one in the heap."""
        slab = self._take_over()
        first = slab * self.per_slab
        self._free[slab].extend(range(first + self.per_slab - 1, first - 1, -1))
        self._partly.append(slab)
        return slab

    def _take_over(self) -> int:
        """Give this use an unused slab."""
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
        """Mark a slab without a taken index as unused."""
        slabs = self._slabs
        slabs.use[slab] = SlabUse.UNUSED
        insort(slabs.unused, slab)
        other = slabs.indices[self._other_use]
        other.num_free += other.per_slab


class SlabSpace:
    """Slabs with room for KV blocks or for states, one use at a time until the last index of a slab is free.

    Block b is in slab b // blocks_per_slab, slot s in slab s // slots_per_slab.
    """

    def __init__(self, num_slabs: int, blocks_per_slab: int, slots_per_slab: int) -> None:
        """Start with every slab unused; raise ValueError if a number is out of range."""
        if num_slabs < 0 or blocks_per_slab < 1 or slots_per_slab < 1:
            raise ValueError(
                f"need num_slabs >= 0 and a block and a slot a slab, found {num_slabs}, {blocks_per_slab} and "
                f"{slots_per_slab}"
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
        """Return how many slabs are unused, and how many hold KV blocks and states."""
        uses = Counter(self._slabs.use)
        return {"unused": uses[SlabUse.UNUSED], "kv_blocks": uses[SlabUse.KV], "states": uses[SlabUse.STATES]}

    def take_stale_blocks(self) -> list[range]:
        """Return the blocks of slabs that KV has taken over from states since the last call, to be cleared now.

        Former states may read as NaN, and attention may multiply what it masks by zero.
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
