"""The tiers below the device (host memory and disk), and their interface to the prefix cache and the step."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ...errors import CacheIntegrityError
from ...metrics import CacheCounters
from ..identifiers import BlockId, SlotId
from ..pools import CachePools
from ..slot_owners import SlotOwner
from .copies import Agree, AgreedTimes, Copies, CopyLedger, CopyTimes, Lane, TierPair
from .disk_index import DiskIndex
from .disk_moves import DiskMoves
from .host_writes import HostWrites
from .restores import Restores, WaitingPrompt

PREFETCH_WINDOW = 16
"""Maximum number of queued requests whose prefixes are prefetched."""


class RestoredBlocks(NamedTuple):
    """Number of blocks restored to the device for a request, for each source tier."""

    host: int = 0
    disk: int = 0


class Tiers:
    """Interface of the lower tiers. This base class has no tier."""

    @property
    def takes_room(self) -> bool:
        """True if restores for waiting requests hold device memory."""
        return False

    def write_last(self, blocks: Sequence[BlockId], prompt_len: int) -> None:
        """Start to copy a request's last boundaries to the host; called when the request has ended."""

    def prefetch(self, waiting: Iterable[WaitingPrompt]) -> None:
        """Start to restore the prefixes of the next queued requests while there is free memory."""

    def awaits(self, request_id: int) -> bool:
        """Return whether the request must wait for a copy before its prefill."""
        return False

    def claim(self, request_id: int) -> RestoredBlocks:
        """Record that a request was admitted; return how many of its blocks were restored and need no prefill."""
        return RestoredBlocks()

    def forget(self, request_id: int) -> None:
        """Record that a request has left the queue."""

    def make_room(self, request_id: int | None = None) -> bool:
        """Release blocks restored for waiting requests, those for `request_id` last; return True if any were held."""
        return False

    def flushed(self) -> None:
        """Record that the cache has been flushed."""

    def blocks_held(self) -> Counter[BlockId]:
        """Return the number of references that the tiers hold on each device block."""
        return Counter()

    def slots_reserved(self) -> list[SlotId]:
        """Return the device slots that are reserved for running copies."""
        return []

    def check_integrity(self) -> None:
        """Raise `CacheIntegrityError` unless the blocks and slots that the tiers hold agree with the running copies."""


class HostTier(Tiers):
    """Host memory as a tier below the device, optionally a disk below it, and the copies between them.

    Args:
        host: Pools over host memory, which may already contain boundaries.
        disk: Index of the entries on disk; None without a disk tier.
        agree: Function that returns the minimum of each number over the model's ranks.
        measure: Function that returns this rank's measured times; see `AgreedTimes`.
        prepare: Function that clears the device memory to which copies write; called before they start.
    """

    def __init__(
        self,
        device: CachePools,
        host: CachePools,
        copies: Copies,
        agree: Agree,
        counters: CacheCounters,
        *,
        block_size: int,
        measure: Callable[[], CopyTimes | None],
        prepare: Callable[[], None] = lambda: None,
        disk: DiskIndex | None = None,
    ) -> None:
        self.host = host
        self._device = device
        self._copies = copies
        self._agree = agree
        self._prepare = prepare
        self._ledger = CopyLedger()
        times = AgreedTimes(measure, agree)
        self._disk: DiskMoves | None = None
        pair = TierPair(device, host, self._ledger, counters, block_size)
        if disk is not None:
            self._disk = DiskMoves(pair, disk, times)
        self._writes = HostWrites(pair, (lambda held: None) if self._disk is None else self._disk.store)
        self._restores = Restores(pair, times)
        device.slots.save_with(self._writes)

    @property
    def has_copies(self) -> bool:
        """True if copies are running or queued."""
        return bool(len(self._ledger))

    @property
    def num_disk_writes(self) -> int:
        """Number of boundaries whose copy to disk is queued or running."""
        return sum(order.lane is Lane.TO_DISK and bool(order.states) for order in self._ledger.orders.values())

    # Between steps.

    def start(self) -> None:
        """Start the queued copies."""
        if new := self._ledger.take_new():
            self._prepare()
            self._copies.start(new)

    def land(self, *, wait: bool = False) -> int:
        """Complete the copies that have ended on every rank; return their number.

        Args:
            wait: True to wait first for the oldest copy that a waiting request needs.
        """
        self._restores.release_unawaited()
        if not len(self._ledger):
            return 0
        self.start()
        awaited = [*self._restores.numbers_under_way(), *([] if self._disk is None else self._disk.numbers_under_way())]
        if wait and awaited:
            self._copies.wait([min(awaited)])
        return self._ledger.land(self._copies, self._agree)

    def close(self) -> None:
        """Release all device blocks and slots, so that device memory can be freed; drop queued disk writes."""
        self._restores.flushed()
        if self._disk is not None:
            self._disk.drop_waiting()
        self.drain()

    def drain(self) -> None:
        """Start the queued copies, and wait until these and the copies that they trigger have ended."""
        while len(self._ledger):
            self.start()
            self._copies.wait(list(self._ledger.orders))
            self._ledger.land(self._copies, self._agree)

    # See `Tiers`.

    @property
    def takes_room(self) -> bool:
        return self._restores.takes_room

    def write_last(self, blocks: Sequence[BlockId], prompt_len: int) -> None:
        self._writes.write_last(blocks, prompt_len)

    def prefetch(self, waiting: Iterable[WaitingPrompt]) -> None:
        num_blocks = 0
        for prompt in waiting:
            here = self._device.kv.longest_match(prompt.keys)
            num_blocks += prompt.num_blocks - len(here)
            if not self._device.fits(num_blocks, num_cached=1):
                return
            if self._disk is None or not (self._disk.awaits(prompt.request_id) or self._disk.load(prompt, here)):
                self._restores.begin(prompt, here)

    def awaits(self, request_id: int) -> bool:
        return self._restores.awaits(request_id) or (self._disk is not None and self._disk.awaits(request_id))

    def claim(self, request_id: int) -> RestoredBlocks:
        num_read = 0 if self._disk is None else self._disk.forget(request_id)
        num_restored = self._restores.claim(request_id)
        from_disk = min(num_read, num_restored)
        return RestoredBlocks(num_restored - from_disk, from_disk)

    def forget(self, request_id: int) -> None:
        self._restores.forget(request_id)
        if self._disk is not None:
            self._disk.forget(request_id)

    def make_room(self, request_id: int | None = None) -> bool:
        if not self._restores.takes_room:
            return False
        self.start()  # the wait below never ends for a copy that has not been started
        if self._restores.give_up(() if request_id is None else (request_id,)):
            return True
        if self._restores.numbers_under_way():
            self._copies.wait(self._restores.numbers_under_way())
            self._ledger.land(self._copies, self._agree)
        return self._restores.give_up()

    def flushed(self) -> None:
        self._ledger.cancel_all()
        self._restores.flushed()
        if self._disk is not None:
            self._disk.flushed()
        self.host.slots.flush()
        self.host.kv.flush()

    def blocks_held(self) -> Counter[BlockId]:
        held = Counter(block for blocks in self._restores.held for block in blocks)
        for arrival in self._restores.arrivals:
            held.update((*arrival.known, *arrival.new))
        return held

    def slots_reserved(self) -> list[SlotId]:
        return [arrival.slot for arrival in self._restores.arrivals]

    def check_integrity(self) -> None:
        kv, slots = self.host.kv, self.host.slots
        self.host.space.check_integrity()
        kv.check_integrity()
        slots.check_integrity()
        disk = self._disk
        sources = [*self._restores.sources, *(disk.sources if disk else ())]
        arrivals = [*self._writes.arrivals, *(disk.arrivals if disk else ())]
        held = Counter(block for blocks in sources for block in blocks)
        for arrival in arrivals:
            held.update((*arrival.known, *arrival.new))
        counted = {block: kv.num_refs(block) for block in held}
        if counted != held or kv.num_referenced != len(held):
            raise CacheIntegrityError(
                f"copies hold the references {held} on host blocks, but the pool counts {counted} on these blocks and "
                f"{kv.num_referenced} referenced blocks"
            )
        reserved = [arrival.slot for arrival in arrivals]
        strange = [slot for slot in reserved if slots.owner_of(slot) is not SlotOwner.RESERVED]
        if strange or slots.num_reserved != len(reserved):
            raise CacheIntegrityError(
                f"copies have reserved the host slots {reserved}, but {slots.num_reserved} slots are reserved"
            )
        for lane, found in ((Lane.TO_HOST, self._writes.arrivals), (Lane.TO_DEVICE, self._restores.arrivals)):
            if self._ledger.count(lane) != len(found):
                raise CacheIntegrityError(
                    f"{self._ledger.count(lane)} copies from {lane.value} are in progress, but {len(found)} arrivals "
                    "are expected"
                )
        if disk is not None:
            disk.index.check_integrity()
