"""One memory for KV blocks and states: slabs that hold either, changing hands when they are empty."""

from collections.abc import Sequence
from heapq import heappop, heappush

from ..errors import CacheIntegrityError

_UNUSED = -1


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
        self.blocks = SlabPlaces(self._slabs, 0, blocks_per_slab)
        self.slots = SlabPlaces(self._slabs, 1, slots_per_slab)

    def fits(
        self, num_blocks: int, num_slots: int, beside_blocks: Sequence[int] = (), beside_slots: Sequence[int] = ()
    ) -> bool:
        """See `CacheSpace`."""
        num_slabs, newly_fixed = 0, 0
        for places, wanted, beside in ((self.blocks, num_blocks, beside_blocks), (self.slots, num_slots, beside_slots)):
            fixed_now = {place // places.per_slab for place in beside}
            fixed_now = {slab for slab in fixed_now if not self._slabs.num_fixed[slab]}
            newly_fixed += len(fixed_now)
            beside_fixed = places.num_in_fixed_slabs + len(fixed_now) * places.per_slab - len(beside)
            num_slabs += -(-max(wanted - beside_fixed, 0) // places.per_slab)
        return num_slabs <= self._slabs.num_open - newly_fixed

    def count_slabs(self) -> dict[str, int]:
        """Return how many slabs are unused, and how many hold KV blocks and states."""
        uses = self._slabs.uses
        return {"unused": uses.count(_UNUSED), "kv_blocks": uses.count(0), "states": uses.count(1)}

    def check_integrity(self) -> None:
        """See `CacheSpace`."""
        self._slabs.check_integrity()
        self.blocks.check_integrity()
        self.slots.check_integrity()


class _Slabs:
    """What each slab is used for, and how many of its places are fixed."""

    def __init__(self, num_slabs: int) -> None:
        self.uses = [_UNUSED] * num_slabs
        self.num_fixed = [0] * num_slabs
        self.unused = list(reversed(range(num_slabs)))  # a stack: lowest number on top
        self.num_open = num_slabs
        """Slabs without a fixed place: the most that can become unused."""

    def check_integrity(self) -> None:
        """Raise CacheIntegrityError unless counts and lists agree. O(n)."""
        unused = [slab for slab, use in enumerate(self.uses) if use == _UNUSED]
        if sorted(self.unused) != unused:
            raise CacheIntegrityError(
                f"slabs listed as unused {sorted(self.unused)} != slabs used for nothing {unused}"
            )
        if self.num_open != self.num_fixed.count(0):
            raise CacheIntegrityError(f"{self.num_open} open slabs counted, {self.num_fixed.count(0)} found")


class SlabPlaces:
    """The places of one use, in slabs that it shares with the other; see `Places`.

    Partly used slabs are filled first, that of the lowest number before others, so that some slabs fall empty.
    """

    is_shared = True

    def __init__(self, slabs: _Slabs, use: int, per_slab: int) -> None:
        self.per_slab = per_slab
        self.num_places = len(slabs.uses) * per_slab
        self._slabs = slabs
        self._use = use
        self._free_in: list[list[int]] = [[] for _ in slabs.uses]
        self._partly: list[int] = []  # a heap that holds each slab of this use with a free place, and stale ones
        self._is_listed = [False] * len(slabs.uses)
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
        return self.num_in_fixed_slabs + self._slabs.num_open * self.per_slab

    def take(self, num_places: int) -> list[int]:
        """See `Places`."""
        taken: list[int] = []
        while (missing := num_places - len(taken)) > 0:
            slab = self._slab_with_room()
            free = self._free_in[slab]
            count = min(missing, len(free))
            taken += free[: -count - 1 : -1]
            del free[-count:]
            self._num_free -= count
            self._fix(slab, count)
            if free and not self._is_listed[slab]:
                self._list(slab)
        return taken

    def fix(self, place: int) -> None:
        """See `Places`."""
        self._fix(place // self.per_slab, 1)

    def unfix(self, place: int) -> None:
        """See `Places`."""
        slab, num_fixed = place // self.per_slab, self._slabs.num_fixed
        num_fixed[slab] -= 1
        self._num_fixed -= 1
        if not num_fixed[slab]:
            self._num_fixed_slabs -= 1
            self._slabs.num_open += 1

    def give_back(self, place: int) -> None:
        """See `Places`."""
        slab = place // self.per_slab
        free = self._free_in[slab]
        if len(free) + 1 == self.per_slab:
            self._num_free -= self.per_slab - 1
            free.clear()
            self._slabs.uses[slab] = _UNUSED
            self._slabs.unused.append(slab)
            return
        free.append(place)
        self._num_free += 1
        if not self._is_listed[slab]:
            self._list(slab)

    def check_integrity(self) -> None:
        """Raise CacheIntegrityError unless counts and lists agree. O(n)."""
        mine = [slab for slab, use in enumerate(self._slabs.uses) if use == self._use]
        found = sum(len(self._free_in[slab]) for slab in mine)
        if found != self._num_free or found != sum(map(len, self._free_in)):
            raise CacheIntegrityError(f"{self._num_free} free places counted, {found} found in slabs of this use")
        fixed = [self._slabs.num_fixed[slab] for slab in mine]
        if sum(fixed) != self._num_fixed or len(mine) - fixed.count(0) != self._num_fixed_slabs:
            raise CacheIntegrityError(
                f"{self._num_fixed} fixed places in {self._num_fixed_slabs} slabs counted, {sum(fixed)} in "
                f"{len(mine) - fixed.count(0)} found"
            )
        listed = sorted(self._partly)
        if listed != [slab for slab, is_listed in enumerate(self._is_listed) if is_listed]:
            raise CacheIntegrityError(f"slabs {listed} listed as partly used, others noted as such")
        unlisted = [slab for slab in mine if self._free_in[slab] and not self._is_listed[slab]]
        if unlisted:
            raise CacheIntegrityError(f"slabs {unlisted} have free places that nothing would find")
        for slab in mine:
            free = self._free_in[slab]
            if len(set(free)) != len(free) or any(place // self.per_slab != slab for place in free):
                raise CacheIntegrityError(f"slab {slab} lists places {sorted(free)} as free")

    def _slab_with_room(self) -> int:
        while self._partly:
            slab = self._partly[0]
            if self._free_in[slab]:
                return slab
            heappop(self._partly)  # full, or in other use by now
            self._is_listed[slab] = False
        slab = self._slabs.unused.pop()
        self._slabs.uses[slab] = self._use
        first = slab * self.per_slab
        self._free_in[slab] = list(range(first + self.per_slab - 1, first - 1, -1))
        self._num_free += self.per_slab
        return slab

    def _list(self, slab: int) -> None:
        heappush(self._partly, slab)
        self._is_listed[slab] = True

    def _fix(self, slab: int, count: int) -> None:
        num_fixed = self._slabs.num_fixed
        if not num_fixed[slab]:
            self._num_fixed_slabs += 1
            self._slabs.num_open -= 1
        num_fixed[slab] += count
        self._num_fixed += count
