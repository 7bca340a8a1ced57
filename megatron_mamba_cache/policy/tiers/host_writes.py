"""Writes of boundaries from the device to the host: a request's last ones, and those about to be evicted."""

from collections.abc import Callable, Sequence

from ...errors import CacheCapacityError
from ..boundary_journal import StateSaver
from ..identifiers import BlockId, BlockKey
from .arrivals import Arrival, cancel, expect, has_state, publish
from .copies import Lane, TierPair

MOST_AT_EVICTION = 4
"""Most states in offload that evictions spare; beyond it, states are lost."""

LIKELY = 0.05
"""Minimum likelihood of a hit at which ends of prompts are offloaded before they are evicted."""


class HostWrites(StateSaver):
    """Copies boundaries from the device to the host while they stay findable on the device.

    A write takes nothing from the device: if its state is evicted before it ends, it is cancelled.

    Args:
        on_written: Called with the blocks of each boundary that has come to the host, while they are held.
    """

    def __init__(self, pair: TierPair, on_written: Callable[[Sequence[BlockId]], None]) -> None:
        self._pair = pair
        self._device, self._host = pair.device, pair.host
        self._on_written = on_written
        self._under_way: dict[BlockId, int] = {}  # by the block that the boundary ends: the copy's number
        self._arrivals: dict[int, Arrival] = {}

    @property
    def arrivals(self) -> list[Arrival]:
        """Room on the host of the writes that have not ended, cancelled ones included."""
        return list(self._arrivals.values())

    def write_last(self, blocks: Sequence[BlockId], prompt_len: int) -> None:
        """Write the last boundary of a text that has a state on the device, and that of its prompt if hits are likely.

        Args:
            blocks: Of a request that has ended; those that are not findable any more are left out.
            prompt_len: Tokens.
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
            return False  # the host would evict a state of higher priority
        return self._write(self._path_to(block))

    def dropped(self, block: BlockId) -> None:
        number = self._under_way.pop(block, None)
        if number is not None:
            self._pair.ledger.cancel(number)

    def flushed(self) -> None:
        self._under_way.clear()

    def _write(self, path: Sequence[BlockId], prompt_len: int | None = None, then: Sequence[BlockKey] = ()) -> bool:
        """Begin to write the boundary at the end of a path of the device; return whether a copy was ordered.

        Args:
            prompt_len: Tokens of the newest prompt that the text began with; None if unknown.
            then: Keys of a longer text, whose last boundary is written next, without the part that both have in common.
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
