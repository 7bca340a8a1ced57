"""Copies of boundaries between host memory and disk."""

from collections import deque
from collections.abc import Sequence

from ...errors import CacheCapacityError
from ..identifiers import BlockId, BlockKey
from .arrivals import Arrival, cancel, expect, publish
from .copies import AgreedTimes, EntryName, Lane, TierPair
from .disk_index import DiskIndex
from .restores import WaitingPrompt

MOST_STORES = 64
"""Maximum number of boundaries being written to disk at a time; further writes are queued."""
_MOST_WAITING = 4096
"""Maximum number of queued writes; beyond it, the oldest write is dropped."""


class DiskMoves:
    """Writes boundaries from the host to disk, and reads boundaries that waiting requests need from disk."""

    def __init__(self, pair: TierPair, index: DiskIndex, times: AgreedTimes) -> None:
        self.index = index
        self._pair = pair
        self._host = pair.host
        self._times = times
        self._stores: dict[int, tuple[EntryName, list[BlockId]]] = {}
        self._waiting: deque[list[BlockKey]] = deque(maxlen=_MOST_WAITING)  # block keys of each queued write
        self._loads: dict[int, tuple[tuple[EntryName, ...], Arrival]] = {}
        self._of_request: dict[int, int] = {}  # by waiting request: number of the copy that it waits for
        self._tried: set[int] = set()
        self._read: dict[int, int] = {}  # by waiting request: number of blocks read from disk

    @property
    def arrivals(self) -> list[Arrival]:
        """Reservations of host memory for boundaries that are being read."""
        return [arrival for _, arrival in self._loads.values()]

    @property
    def sources(self) -> list[list[BlockId]]:
        """Host blocks that are being written to disk; the state of each boundary's last block is pinned."""
        return [blocks for _, blocks in self._stores.values()]

    def awaits(self, request_id: int) -> bool:
        """Return whether the request's prefix is being read from disk."""
        return request_id in self._of_request

    def store(self, held: Sequence[BlockId]) -> None:
        """Start or queue the write of a boundary that has been copied to the host.

        Args:
            held: Blocks from the start of the text; the last block has a state.
        """
        found = [self._host.kv.key_of(block) for block in held]
        keys = [key for key in found if key is not None]
        if len(keys) < len(held) or keys[-1] in self.index:
            self.index.use(self.index.chain(keys, 0))
            return
        if len(self._stores) >= MOST_STORES:
            self._waiting.append(keys)
            return
        if any(name.key == keys[-1] for name, _ in self._stores.values()):
            return
        start = self.index.anchor_of(keys)
        name = EntryName(keys[-1], keys[start - 1] if start else 0, len(keys), len(keys) - start)
        under_way = (entry.anchor for entry, _ in self._stores.values())
        read = (entry.key for names, _ in self._loads.values() for entry in names)
        leaving = self.index.make_room(name, (name.anchor, *under_way, *read))
        if leaving is None:
            return
        self._remove(leaving)
        slot = self._host.slots.slot_of(held[-1])
        assert slot is not None
        self._host.kv.acquire(held)
        self._host.slots.pin(held[-1], is_hit=False)
        indices = tuple((start + index, block) for index, block in enumerate(held[start:]))
        order = self._pair.ledger.begin(
            Lane.TO_DISK, indices, ((slot, slot),), lambda ok: self._end_store(number, ok), files=(name,)
        )
        number = order.number
        self._stores[number] = name, list(held)

    def load(self, prompt: WaitingPrompt, here: Sequence[BlockId]) -> bool:
        """Start to read the part of a waiting request's prefix that is only on disk; return True if a read was queued.

        Args:
            here: Leading blocks of the prompt that are on the device.
        """
        if prompt.request_id in self._tried:
            return False
        below = self._host.kv.longest_match(prompt.keys)
        num_known = len(below)
        names = self.index.chain(prompt.keys, num_known)
        depth_above = max(self._pair.device.slots.deepest(here), self._host.slots.deepest(below))
        if not names or names[-1].depth <= depth_above or not self._pays(names, num_known, depth_above):
            return False
        try:
            arrival = expect(self._host, prompt.keys[: names[-1].depth])
        except CacheCapacityError:
            return False
        self._tried.add(prompt.request_id)
        self.index.use(names)
        first = len(arrival.known)
        indices = tuple((first + index, block) for index, block in enumerate(arrival.new))
        order = self._pair.ledger.begin(
            Lane.FROM_DISK,
            indices,
            ((arrival.slot, arrival.slot),),
            lambda ok: self._end_load(number, prompt.request_id, names[-1].depth - depth_above, ok),
            files=tuple(names),
        )
        number = order.number
        self._loads[number] = tuple(names), arrival
        self._of_request[prompt.request_id] = number
        return True

    def forget(self, request_id: int) -> int:
        """Record that a request has left the queue; return how many blocks were read for it.

        A read that is in progress continues.
        """
        self._tried.discard(request_id)
        self._of_request.pop(request_id, None)
        return self._read.pop(request_id, 0)

    def numbers_under_way(self) -> list[int]:
        """Return the copy numbers of the reads that requests wait for."""
        return list(self._of_request.values())

    def drop_waiting(self) -> None:
        """Drop the queued writes; running writes continue."""
        self._waiting.clear()

    def flushed(self) -> None:
        """Forget all entries after a flush, because no key matches them any more."""
        self.index.clear()
        self._waiting.clear()
        self._tried.clear()
        self._of_request.clear()
        self._read.clear()

    def _end_store(self, number: int, is_there: bool) -> None:
        name, held = self._stores.pop(number)
        self._host.slots.unpin(held[-1])
        self._host.kv.release(held)
        if is_there:
            self.index.add(name)
            self._pair.counters.states_written_to_disk += 1
        else:
            self._pair.counters.disk_writes_failed += 1
        while self._waiting and len(self._stores) < MOST_STORES:
            keys = self._waiting.popleft()
            held = self._host.kv.longest_match(keys)
            if len(held) == len(keys) and self._host.slots.slot_of(held[-1]) is not None:
                self.store(held)

    def _end_load(self, number: int, request_id: int, num_blocks: int, is_there: bool) -> None:
        names, arrival = self._loads.pop(number)
        is_awaited = self._of_request.get(request_id) == number
        if is_awaited:
            del self._of_request[request_id]
        if not is_there:
            cancel(arrival, self._host)
            # Remove all entries of the read: entries after a missing one can never be read, and more would be written
            # after them.
            self._remove([name for name in names if name.key in self.index])
            for name in names:
                self.index.remove(name)
            self._pair.counters.disk_reads_failed += 1
            return
        held = publish(arrival, self._host, self._pair.block_size)
        self._host.kv.release(held)
        self._pair.counters.states_read_from_disk += 1
        if is_awaited:
            self._read[request_id] = num_blocks

    def _remove(self, names: Sequence[EntryName]) -> None:
        if names:
            self._pair.ledger.begin(Lane.TO_DISK, (), (), lambda ok: None, files=tuple(names))

    def _pays(self, names: Sequence[EntryName], num_known: int, depth_above: int) -> bool:
        """Return whether reading the entries is estimated to take less time than computing their tokens."""
        times, depth = self._times.now(), names[-1].depth
        read = (depth - min(num_known, depth)) * times.disk_block + times.disk_state
        return read < (depth - depth_above) * self._pair.block_size * times.token
