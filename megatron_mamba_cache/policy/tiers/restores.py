"""Restore boundaries to the device for waiting requests, and hold them until the requests are admitted."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ...errors import CacheCapacityError
from ..identifiers import BlockId, BlockKey
from .arrivals import Arrival, cancel, expect, publish
from .copies import AgreedTimes, Lane, TierPair


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """Prompt of a waiting request, as far as prefetches from lower tiers need it.

    Args:
        keys: Keys of the complete blocks that the cache may provide; a block with the prompt's last token is excluded.
        num_blocks: Number of blocks for the whole prompt.
    """

    request_id: int
    keys: Sequence[BlockKey]
    num_blocks: int


@dataclass(slots=True)
class _Restore:
    """Restore of a prefix for one request. After the copy, `held` has its device blocks; the last state is pinned."""

    depth: int
    num_blocks_before: int  # number of blocks up to the deepest state on the device before the restore
    number: int
    host_blocks: list[BlockId]
    arrival: Arrival | None
    held: list[BlockId]
    is_pinned: bool = False
    is_there: bool = False


class Restores:
    """Restores boundaries from the host to the device, at most once per waiting request, even if a copy fails."""

    def __init__(self, pair: TierPair, times: AgreedTimes) -> None:
        self._pair = pair
        self._device, self._host = pair.device, pair.host
        self._times = times
        self._of_request: dict[int, _Restore] = {}
        self._unclaimed: list[_Restore] = []  # restores for requests that have left; released after the copy
        self._tried: set[int] = set()

    @property
    def arrivals(self) -> list[Arrival]:
        """Reservations of device memory for running restores."""
        return [restore.arrival for restore in self._all() if restore.arrival is not None]

    @property
    def held(self) -> list[list[BlockId]]:
        """Device blocks of completed restores, held until the requests are admitted."""
        return [restore.held for restore in self._all()]

    @property
    def sources(self) -> list[list[BlockId]]:
        """Host blocks that running restores read; the state of each restore's last block is pinned."""
        return [restore.host_blocks for restore in self._all() if restore.host_blocks]

    @property
    def takes_room(self) -> bool:
        """True if restores for waiting requests hold device memory."""
        return bool(self._of_request or self._unclaimed)

    def awaits(self, request_id: int) -> bool:
        """Return whether a copy for the request is queued or running."""
        restore = self._of_request.get(request_id)
        return restore is not None and restore.arrival is not None

    def begin(self, prompt: WaitingPrompt, here: Sequence[BlockId]) -> bool:
        """Start a restore for a waiting request if it is estimated to save time; return True if a copy was queued.

        Args:
            here: The prompt's leading blocks that are cached on the device.
        """
        if prompt.request_id in self._tried:
            return False
        below = self._host.kv.longest_match(prompt.keys)
        depth_here = self._device.slots.deepest(here)
        depth = self._best_depth(len(prompt.keys), below, len(here), depth_here)
        if depth <= depth_here:
            return False
        keys, host_blocks = prompt.keys[:depth], below[:depth]
        end = host_blocks[-1]
        slot = self._host.slots.slot_of(end)
        assert slot is not None
        with ExitStack() as undo:
            self._host.kv.acquire(host_blocks)
            undo.callback(self._host.kv.release, host_blocks)
            self._host.slots.pin(end)  # before `expect`: its evictions may copy states to the host, and so evict there
            undo.callback(self._host.slots.unpin, end)
            try:
                arrival = expect(self._device, keys)
            except CacheCapacityError:
                return False
            undo.pop_all()
        self._tried.add(prompt.request_id)
        restore = _Restore(depth, depth_here, -1, host_blocks, arrival, [])
        blocks = tuple(zip(host_blocks[len(arrival.known) :], arrival.new, strict=True))
        order = self._pair.ledger.begin(
            Lane.TO_DEVICE, blocks, ((slot, arrival.slot),), lambda ok: self._end(restore, ok)
        )
        restore.number = order.number
        self._of_request[prompt.request_id] = restore
        return True

    def claim(self, request_id: int) -> int:
        """Release the restore of an admitted request; return how many more blocks need no prefill because of it."""
        self._tried.discard(request_id)
        restore = self._of_request.get(request_id)
        self._give_up([request_id])
        return restore.depth - restore.num_blocks_before if restore is not None and restore.is_there else 0

    def forget(self, request_id: int) -> None:
        """Release the restore of a request that has left the queue."""
        self._tried.discard(request_id)
        self._give_up([request_id])

    def give_up(self, keep: Collection[int] = ()) -> bool:
        """Release completed restores of waiting requests, except those in `keep`; return True if any were released."""
        landed = [number for number, restore in self._of_request.items() if restore.held and number not in keep]
        self._give_up(landed)
        return bool(landed)

    def flushed(self) -> None:
        """Release all restores after a flush, because no key matches the restored blocks any more."""
        self._give_up(list(self._of_request))
        self._tried.clear()

    def numbers_under_way(self) -> list[int]:
        """Return the numbers of the copies that have not ended."""
        return [restore.number for restore in self._all() if restore.arrival is not None]

    def _best_depth(self, num_blocks: int, below: Sequence[BlockId], num_here: int, depth_here: int) -> int:
        """Return the end of the restored prefix, in blocks, that minimizes the time to copy it and prefill the rest.

        The result is `depth_here` if a restore saves no time.

        Args:
            num_blocks: Number of the prompt's blocks that the cache may provide.
            below: Leading blocks of the prompt on the host.
            num_here, depth_here: Number of leading blocks on the device, and number of those up to the deepest state.
        """
        slot_of = self._host.slots.slot_of
        deeper = [depth for depth in range(depth_here + 1, len(below) + 1) if slot_of(below[depth - 1]) is not None]
        if not deeper:
            return depth_here
        times, block_size = self._times.now(), self._pair.block_size

        def cost(depth: int) -> int:
            copied = 0 if depth == depth_here else max(depth - num_here, 0) * times.block + times.state
            return copied + (num_blocks - depth) * block_size * times.token

        return min((depth_here, *deeper), key=cost)

    def _end(self, restore: _Restore, is_there: bool) -> None:
        arrival, restore.arrival = restore.arrival, None
        assert arrival is not None
        self._host.slots.unpin(restore.host_blocks[-1])
        self._host.kv.release(restore.host_blocks)
        restore.host_blocks = []
        if is_there:
            restore.held = publish(arrival, self._device, self._pair.block_size)
            self._device.slots.pin(restore.held[-1], is_hit=False)
            restore.is_pinned = restore.is_there = True
            self._pair.counters.states_restored_from_host += 1
        else:
            cancel(arrival, self._device)
            self._pair.counters.host_restores_failed += 1
        self.release_unawaited()

    def release_unawaited(self) -> None:
        """Release completed restores whose requests have left. Safe to retry."""
        while landed := [restore for restore in self._unclaimed if restore.arrival is None]:
            restore = landed[0]
            if restore.is_pinned:
                self._device.slots.unpin(restore.held[-1])
                restore.is_pinned = False
            self._device.kv.release(restore.held)
            self._unclaimed.remove(restore)

    def _give_up(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            if request_id in self._of_request:
                self._unclaimed.append(self._of_request.pop(request_id))
        self.release_unawaited()

    def _all(self) -> list[_Restore]:
        return [*self._of_request.values(), *self._unclaimed]
