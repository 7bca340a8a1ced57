"""Ledger of copies between tiers. A copy completes when it has ended on all ranks of the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple, Protocol

from ...metrics import CacheCounters
from ..pools import CachePools


class Lane(Enum):
    """Direction of a copy. Copies in one lane run one after another; different lanes run concurrently."""

    TO_HOST = "device to host"
    TO_DEVICE = "host to device"
    TO_DISK = "host to disk"
    FROM_DISK = "disk to host"


class CopyStatus(IntEnum):
    """Progress of a copy; over several ranks, the minimum applies."""

    UNDER_WAY = 0
    FAILED = 1
    DONE = 2


IndexPairs = tuple[tuple[int, int], ...]
"""Pairs of a source index and a destination index."""


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """KV blocks and states to copy, as pairs of source and destination indices.

    Args:
        blocks: Pairs of block indices. In a copy to or from files, the index on the file's side is the block's index in
            the text.
        files: Entries whose files are written or read, in text order. A write has one file, for all blocks and the
            state. In a read, the last file has the state, and each file has some of the blocks. An order without blocks
            and states removes the files.
    """

    number: int
    lane: Lane
    blocks: IndexPairs
    states: IndexPairs
    files: tuple["EntryName", ...] = ()


@dataclass(frozen=True, slots=True)
class EntryName:
    """Identity of a resumable boundary on disk, which consists of a state and the KV since the previous boundary.

    Args:
        key: Key of the block that ends at the boundary.
        anchor: Key of the block that ends at the previous boundary; 0 if there is none.
        depth: Number of blocks from the start of the text to the boundary.
        num_blocks: Number of blocks since the previous boundary.
    """

    key: int
    anchor: int
    depth: int
    num_blocks: int


class Copies(Protocol):
    """Interface of one rank's copy engine. Copies are started in order and run asynchronously."""

    def start(self, orders: Sequence[CopyOrder]) -> None:
        """Start copies, which wait for all work launched on the device so far.

        The caller must not write to a source or use a destination until the copy has ended. A copy that cannot be
        started counts as failed.
        """

    def status(self, number: int) -> CopyStatus:
        """Return the status of a copy."""

    def wait(self, numbers: Sequence[int]) -> None:
        """Wait until the copies with these numbers have ended."""

    def forget(self, number: int) -> None:
        """Forget a copy that has ended."""


Agree = Callable[[Sequence[int]], list[int]]
"""Function that returns the minimum of each number over the ranks of the model; a collective operation."""

End = Callable[[bool], None]
"""Function called when a copy has ended, with True if it succeeded on every rank."""


class CopyLedger:
    """The queued and running copies, identical on every rank.

    A cancelled copy still runs to its end, because its memory is in use until then, but counts as failed.
    """

    def __init__(self) -> None:
        self._next = 0
        self._new: list[CopyOrder] = []
        self.orders: dict[int, CopyOrder] = {}
        """Copies that have not ended, by number, oldest first; changed only by this class."""
        self._ends: dict[int, End] = {}
        self._cancelled: set[int] = set()

    def __len__(self) -> int:
        return len(self.orders)

    def count(self, lane: Lane) -> int:
        """Return how many copies in a lane have not ended."""
        return sum(order.lane is lane for order in self.orders.values())

    def begin(
        self, lane: Lane, blocks: IndexPairs, states: IndexPairs, end: End, files: tuple[EntryName, ...] = ()
    ) -> CopyOrder:
        """Queue a copy; `end` is called once, when the copy has ended on all ranks."""
        order = CopyOrder(self._next, lane, blocks, states, files)
        self._next += 1
        self._new.append(order)
        self.orders[order.number], self._ends[order.number] = order, end
        return order

    def take_new(self) -> list[CopyOrder]:
        """Return the copies queued since the last call; the caller starts them."""
        new, self._new = self._new, []
        return new

    def cancel(self, number: int) -> None:
        """Cancel a copy, so that it counts as failed when it ends."""
        if number in self.orders:
            self._cancelled.add(number)

    def cancel_all(self) -> None:
        """Cancel all copies, so that they count as failed when they end."""
        self._cancelled |= self.orders.keys()

    def land(self, copies: Copies, agree: Agree) -> int:
        """Complete the copies that have ended on every rank, oldest first; return their number.

        The ranks communicate only if copies are running.
        """
        unstarted = {order.number for order in self._new}
        started = [number for number in self.orders if number not in unstarted]
        if not started:
            return 0
        statuses = agree([copies.status(number) for number in started])
        ended = [(number, status) for number, status in zip(started, statuses, strict=True) if status]
        for number, status in ended:
            copies.forget(number)
            del self.orders[number]
            is_cancelled = number in self._cancelled
            self._cancelled.discard(number)
            self._ends.pop(number)(status == CopyStatus.DONE and not is_cancelled)
        return len(ended)


@dataclass(frozen=True, slots=True)
class TierPair:
    """Pools of device and host memory, and the ledger of copies between them.

    Args:
        block_size: Number of tokens in a KV block.
    """

    device: CachePools
    host: CachePools
    ledger: CopyLedger
    counters: CacheCounters
    block_size: int


class CopyTimes(NamedTuple):
    """Measured times of copies and prefill, in nanoseconds.

    Args:
        block, state: Time to copy one block or state from the host to the device.
        token: Time to prefill one token.
        disk_block, disk_state: Time to read one block or state from disk.
    """

    block: int
    state: int
    token: int
    disk_block: int = 0
    disk_state: int = 0


COPIES_TAKE_NOTHING = CopyTimes(block=0, state=0, token=1)
"""Times assumed until all ranks have measured theirs; a copy then always seems faster than prefill."""


class AgreedTimes:
    """Times on which all ranks agree after measuring: the slowest copies and the fastest prefill of any rank.

    Args:
        measure: Function that returns the times measured by this rank; None until all of them have been measured.
    """

    def __init__(self, measure: Callable[[], CopyTimes | None], agree: Agree) -> None:
        self._measure = measure
        self._agree = agree
        self._agreed: CopyTimes | None = None

    def now(self) -> CopyTimes:
        """Return the agreed times, or `COPIES_TAKE_NOTHING` until all ranks have measured.

        All ranks must call this together until the times are agreed on, because it communicates.
        """
        if self._agreed is not None:
            return self._agreed
        found = self._measure() or CopyTimes(0, 0, 0)
        copies = found.block, found.state, found.disk_block, found.disk_state
        token, *others = self._agree([found.token, *(-time for time in copies)])
        if not token:
            return COPIES_TAKE_NOTHING
        block, state, disk_block, disk_state = (-time for time in others)
        self._agreed = CopyTimes(block, state, token, disk_block, disk_state)
        return self._agreed
