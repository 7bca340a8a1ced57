"""Copy boundaries from the device to the host when a request ends or before a state is evicted."""

from collections.abc import Callable, Sequence

from ...errors import CacheCapacityError
from ..boundary_journal import StateSaver
from ..identifiers import BlockId, BlockKey
from .arrivals import Arrival, cancel, expect, has_state, publish
from .copies import Lane, TierPair

MOST_AT_EVICTION = 4
"""Number of copies to the host in progress from which on states are evicted without a copy."""

LIKELY = 0.05
"""Minimum likelihood of a hit at which the last boundary of a prompt is written when its request ends."""


class HostWrites(StateSaver):
    """Copies boundaries from the device to the host; they stay cached on the device.

    A write does not pin its source: if the state is evicted before the write ends, the write is cancelled.

    Args:
        on_written: Function called after each write with the boundary's host blocks, on which references are held.
    """

    def __init__(self, pair: TierPair, on_written: Callable[[Sequence[BlockId]], None]) -> None:
        self._pair = pair
        self._device, self._host = pair.device, pair.host
        self._on_written = on_written
        self._under_way: dict[BlockId, int] = {}  # copy number by the last block of the boundary
        self._arrivals: dict[int, Arrival] = {}

    @property
    def arrivals(self) -> list[Arrival]:
        """Reservations of host memory for writes that have not ended, including cancelled writes."""
        return list(self._arrivals.values())

    def write_last(self, blocks: Sequence[BlockId], prompt_len: int) -> None:
        """Start to write the last boundary of an ended request, and the last boundary of its prompt if a hit is likely.

        Args:
            blocks: Blocks of the request, from the start of the text; blocks that are no longer cached are ignored.
            prompt_len: Number of tokens in the request's prompt.
        """
        slots = self._device.slots
        if not (depth := slots.deepest(blocks)):
            return
        prompt = blocks[: slots.deepest(blocks[: prompt_len // self._pair.block_size])]
        is_likely = 0 < len(prompt) < depth and slots.likelihood(prompt[-1]) >= LIKELY
        if not (is_likely and self._write(prompt, prompt_len, then=self._keys_of(blocks[:depth]))):
            self._write(blocks[:depth], prompt_len)

    def saves(self, block: BlockId) -> bool:
        if block in self._under_way:
            return True
        if self._pair.ledger.count(Lane.TO_HOST) >= MOST_AT_EVICTION:
            return False
        if has_state(self._host, self._device.kv.key_of(block)):
            return False
        host = self._host.slots
        if not host.num_free and self._device.slots.priority_of(block) <= host.min_priority():
            return False  # the host would have to evict a state of higher priority
        return self._write(self._path_to(block))

    def dropped(self, block: BlockId) -> None:
        number = self._under_way.pop(block, None)
        if number is not None:
            self._pair.ledger.cancel(number)

    def flushed(self) -> None:
        self._under_way.clear()

    def _write(self, path: Sequence[BlockId], prompt_len: int | None = None, then: Sequence[BlockKey] = ()) -> bool:
        """Start to write the boundary at the end of a path of device blocks; return True if a copy was queued.

        Args:
            prompt_len: Number of tokens of the newest prompt at the start of the text; None if unknown.
            then: Keys of a longer text that starts with these blocks. Its last boundary is written after this one.
        """
        end, keys = path[-1], self._keys_of(path)
        slot = self._device.slots.slot_of(end)
        if end in self._under_way or slot is None:
            return False
        if has_state(self._host, keys[-1]):
            self._host.slots.touch_path(self._host.kv.longest_match(keys), prompt_len)
            return False
        try:
            arrival = expect(self._host, keys)
        except CacheCapacityError:
            self._pair.counters.states_not_written_no_room += 1
            return False
        blocks = tuple(zip(path[len(arrival.known) :], arrival.new, strict=True))
        order = self._pair.ledger.begin(
            Lane.TO_HOST, blocks, ((slot, arrival.slot),), lambda ok: self._end(number, end, ok, prompt_len, then)
        )
        number = order.number
        self._under_way[end] = number
        self._arrivals[number] = arrival
        return True

    def _end(self, number: int, end: BlockId, is_there: bool, prompt_len: int | None, then: Sequence[BlockKey]) -> None:
        self._land(number, end, is_there, prompt_len)
        path = self._device.kv.longest_match(then)
        if path and len(path) == len(then):
            self._write(path, prompt_len)

    def _land(self, number: int, end: BlockId, is_there: bool, prompt_len: int | None) -> None:
        arrival = self._arrivals.pop(number)
        if self._under_way.get(end) == number:
            del self._under_way[end]
            self._device.slots.stop_saving(end)
        if not is_there:
            cancel(arrival, self._host)
            self._pair.counters.host_writes_failed += 1
            return
        held = publish(arrival, self._host, self._pair.block_size)
        try:
            self._host.slots.touch_path(held, prompt_len)
            self._on_written(held)
        finally:
            self._host.kv.release(held)
        self._pair.counters.states_written_to_host += 1

    def _path_to(self, block: BlockId) -> list[BlockId]:
        path, parent = [block], self._device.kv.parent_of(block)
        while parent is not None:
            path.append(parent)
            parent = self._device.kv.parent_of(parent)
        return path[::-1]

    def _keys_of(self, path: Sequence[BlockId]) -> list[BlockKey]:
        keys = [self._device.kv.key_of(block) for block in path]
        return [key for key in keys if key is not None]
