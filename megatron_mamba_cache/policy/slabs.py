"""One memory for KV blocks and states: slabs that hold either, changing hands when they are empty."""

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush

from ..errors import CacheIntegrityError

_UNUSED, _KV, _STATES = -1, 0, 1


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
        self._slabs = _Slabs(num_slabs)
        self.blocks = SlabPlaces(self._slabs, _KV, blocks_per_slab)
        self.slots = SlabPlaces(self._slabs, _STATES, slots_per_slab)

    def fits(
        self, num_blocks: int, num_slots: int, beside_blocks: Sequence[int] = (), beside_slots: Sequence[int] = ()
    ) -> bool:
        """See `CacheSpace`."""
        slabs, num_slabs, newly_fixed = self._slabs.slabs, 0, 0
        for places, wanted, beside in ((self.blocks, num_blocks, beside_blocks), (self.slots, num_slots, beside_slots)):
            fixed_now = {place // places.per_slab for place in beside}
            fixed_now = {slab for slab in fixed_now if not slabs[slab].num_fixed}
            newly_fixed += len(fixed_now)
            beside_fixed = places.num_in_fixed_slabs + len(fixed_now) * places.per_slab - len(beside)
            num_slabs += -(-max(wanted - beside_fixed, 0) // places.per_slab)
        return num_slabs <= self._slabs.num_open - newly_fixed

    def count_slabs(self) -> dict[str, int]:
        """Return how many slabs are unused, and how many hold KV blocks and states."""
        uses = Counter(slab.use for slab in self._slabs.slabs)
        return {"unused": uses[_UNUSED], "kv_blocks": uses[self.blocks.use], "states": uses[self.slots.use]}

    def take_stale_blocks(self) -> list[range]:
        """Return the blocks of slabs that KV has taken over from states since the last call, to be cleared now.

        What states leave behind reads as any number, NaN too, and attention may multiply what it masks by zero.
        """
        stale = []
        for number in self._slabs.taken_over:
            slab = self._slabs.slabs[number]
            if slab.use == self.blocks.use and slab.held_states:
                slab.held_states = False
                first = number * self.blocks.per_slab
                stale.append(range(first, first + self.blocks.per_slab))
        self._slabs.taken_over.clear()
        return stale

    def check_integrity(self) -> None:
        """See `CacheSpace`."""
        self._slabs.check_integrity()
        self.blocks.check_integrity()
        self.slots.check_integrity()


class _Slab:
    """One slab.

    Attributes:
        use: Whose places it holds.
        num_fixed: How many of them cannot be evicted.
        free: Those that are not taken, the next one last.
        listed_by: Uses, as bits, that list it among slabs with a free place; they may not know that it no longer has.
        held_states: Whether it has held states since it was last cleared.
    """

    __slots__ = ("free", "held_states", "listed_by", "num_fixed", "use")

    def __init__(self) -> None:
        self.use = _UNUSED
        self.num_fixed = 0
        self.free: list[int] = []
        self.listed_by = 0
        self.held_states = False


class _Slabs:
    """All slabs, and which of them are unused."""

    def __init__(self, num_slabs: int) -> None:
        self.slabs = [_Slab() for _ in range(num_slabs)]
        self.unused = list(range(num_slabs))
        """In order: KV takes the first and states the last, so that they keep apart and few slabs change hands."""
        self.num_open = num_slabs
        """Slabs without a fixed place: the most that can become unused."""
        self.taken_over: list[int] = []
        """Slabs that KV blocks have taken over from states, perhaps more than once, perhaps given up again."""

    def check_integrity(self) -> None:
        """Raise CacheIntegrityError unless counts and lists agree. O(n)."""
        unused = [number for number, slab in enumerate(self.slabs) if slab.use == _UNUSED]
        if self.unused != unused:
            raise CacheIntegrityError(f"slabs listed as unused {self.unused} != slabs used for nothing {unused}")
        num_open = sum(not slab.num_fixed for slab in self.slabs)
        if self.num_open != num_open:
            raise CacheIntegrityError(f"{self.num_open} open slabs counted, {num_open} found")
        for number in unused:
            if self.slabs[number].free or self.slabs[number].num_fixed:
                raise CacheIntegrityError(f"unused slab {number} has places that are free or fixed")


class SlabPlaces:
    """The places of one use, in slabs that it shares with the other; see `Places`.

    Partly used slabs are filled first, that of the lowest number before others, so that some slabs fall empty; then an
    unused one, KV from the low end and states from the high one.
    """

    is_shared = True

    def __init__(self, slabs: _Slabs, use: int, per_slab: int) -> None:
        self.use = use
        self.per_slab = per_slab
        self.num_places = len(slabs.slabs) * per_slab
        self._slabs = slabs
        self._bit = 1 << use
        self._partly: list[int] = []  # a heap that holds each slab of this use with a free place, and stale ones
        self._num_free = 0  # in slabs of this use
        self._num_fixed = 0
        self._num_fixed_slabs = 0

    @property
    def num_free(self) -> int:
        """See `Places`."""
        return self._num_free + len(self._slabs.unused) * self.per_slab

    @property
    def num_in_fixed_slabs(self) -> int:
        """Places that are not fixed, in slabs with a fixed one."""
        return self._num_fixed_slabs * self.per_slab - self._num_fixed

    @property
    def num_available(self) -> int:
        """See `Places`."""
        return (self._num_fixed_slabs + self._slabs.num_open) * self.per_slab - self._num_fixed

    def take(self, num_places: int) -> list[int]:
        """See `Places`."""
        taken: list[int] = []
        while (missing := num_places - len(taken)) > 0:
            number = self._slab_with_room()
            slab = self._slabs.slabs[number]
            free = slab.free
            if missing == 1:  # most calls
                count = 1
                taken.append(free.pop())
            else:
                count = min(missing, len(free))
                taken += free[: -count - 1 : -1]
                del free[-count:]
            self._num_free -= count
            self._fix(slab, count)
            if free:
                self._list(number, slab)
        return taken

    def fix(self, place: int) -> None:
        """See `Places`."""
        self._fix(self._slabs.slabs[place // self.per_slab], 1)

    def unfix(self, place: int) -> None:
        """See `Places`."""
        slab = self._slabs.slabs[place // self.per_slab]
        slab.num_fixed -= 1
        self._num_fixed -= 1
        if not slab.num_fixed:
            self._num_fixed_slabs -= 1
            self._slabs.num_open += 1

    def give_back(self, place: int) -> None:
        """See `Places`."""
        number = place // self.per_slab
        slab = self._slabs.slabs[number]
        if len(slab.free) + 1 == self.per_slab:
            self._num_free -= len(slab.free)
            slab.free.clear()
            slab.use = _UNUSED
            insort(self._slabs.unused, number)
            return
        slab.free.append(place)
        self._num_free += 1
        self._list(number, slab)

    def check_integrity(self) -> None:
        """Raise CacheIntegrityError unless counts and lists agree. O(n)."""
        slabs = self._slabs.slabs
        mine = {number: slab for number, slab in enumerate(slabs) if slab.use == self.use}
        found = sum(len(slab.free) for slab in mine.values())
        if found != self._num_free:
            raise CacheIntegrityError(f"{self._num_free} free places counted, {found} found in slabs of this use")
        fixed = [slab.num_fixed for slab in mine.values()]
        if sum(fixed) != self._num_fixed or len(mine) - fixed.count(0) != self._num_fixed_slabs:
            raise CacheIntegrityError(
                f"{self._num_fixed} fixed places in {self._num_fixed_slabs} slabs counted, {sum(fixed)} in "
                f"{len(mine) - fixed.count(0)} found"
            )
        listed = sorted(self._partly)
        if listed != [number for number, slab in enumerate(slabs) if slab.listed_by & self._bit]:
            raise CacheIntegrityError(f"slabs {listed} listed as partly used, others noted as such")
        unlisted = [number for number, slab in mine.items() if slab.free and not slab.listed_by & self._bit]
        if unlisted:
            raise CacheIntegrityError(f"slabs {unlisted} have free places that nothing would find")
        for number, slab in mine.items():
            if len(set(slab.free)) != len(slab.free) or any(place // self.per_slab != number for place in slab.free):
                raise CacheIntegrityError(f"slab {number} lists places {sorted(slab.free)} as free")

    def _slab_with_room(self) -> int:
        slabs = self._slabs.slabs
        while self._partly:
            slab = slabs[self._partly[0]]
            if slab.free and slab.use == self.use:
                return self._partly[0]
            heappop(self._partly)  # full, or in other use by now
            slab.listed_by &= ~self._bit
        number = self._slabs.unused.pop(0 if self.use == _KV else -1)
        slab, first = slabs[number], number * self.per_slab
        slab.use = self.use
        if self.use == _STATES:
            slab.held_states = True
        elif slab.held_states:
            self._slabs.taken_over.append(number)
        slab.free = list(range(first + self.per_slab - 1, first - 1, -1))
        self._num_free += self.per_slab
        return number

    def _list(self, number: int, slab: _Slab) -> None:
        if not slab.listed_by & self._bit:
            heappush(self._partly, number)
            slab.listed_by |= self._bit

    def _fix(self, slab: _Slab, count: int) -> None:
        if not slab.num_fixed:
            self._num_fixed_slabs += 1
            self._slabs.num_open -= 1
        slab.num_fixed += count
        self._num_fixed += count
