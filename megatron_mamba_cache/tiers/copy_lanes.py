"""Copy cached states and KV blocks between a rank's tiers, in one background thread per direction."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from ..policy.tiers.copies import CopyOrder, CopyStatus, CopyTimes, IndexPairs, Lane

_LEAST_BYTES = 2**22
_LEAST_TOKENS = 256


class MeasuredTimes:
    """Shortest measured time per copied byte for each lane, and per prompt token for prefill.

    The cache compares them to decide if a prefix is restored or computed again. Small copies and small steps are
    ignored. If only one direction was measured, the opposite direction is assumed to be equally fast.
    """

    def __init__(self) -> None:
        self._byte_s: dict[Lane, float] = {}
        self._token_s: float | None = None

    def note_copy(self, lane: Lane, num_bytes: int, seconds: float) -> None:
        """Record the time of a finished copy."""
        if num_bytes >= _LEAST_BYTES:
            self._byte_s[lane] = min(seconds / num_bytes, self._byte_s.get(lane, float("inf")))

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a step that processed prompt tokens and no decode requests."""
        if num_tokens >= _LEAST_TOKENS:
            self._token_s = min(seconds / num_tokens, self._token_s or float("inf"))

    def times(self, block_bytes: int, state_bytes: int) -> CopyTimes | None:
        """Return the times to copy a block and a state of these sizes and to prefill a token.

        The result is None until a copy between device and host and a prefill have been measured.
        """
        copy, read = self._of_either(Lane.TO_DEVICE, Lane.TO_HOST), self._of_either(Lane.FROM_DISK, Lane.TO_DISK)
        if copy is None or self._token_s is None:
            return None
        read = read or 0.0
        return CopyTimes(
            block=round(copy * block_bytes * 1e9),
            state=round(copy * state_bytes * 1e9),
            token=max(round(self._token_s * 1e9), 1),
            disk_block=round(read * block_bytes * 1e9),
            disk_state=round(read * state_bytes * 1e9),
        )

    def _of_either(self, lane: Lane, other: Lane) -> float | None:
        return self._byte_s.get(lane, self._byte_s.get(other))


_LOG = logging.getLogger(__name__)
PART_BYTES = 2**22
"""Maximum number of bytes in one part of a copy; a part takes about 80 µs over PCIe 5."""
_MOST_IN_FLIGHT = 2
"""Maximum number of parts of a restore that are in flight at a time; with two, the copy engine never idles."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Contiguous range of bytes to copy, with its offsets in the source and in the target memory."""

    source: int
    target: int
    num_bytes: int

    def cut(self, first: int, most: int) -> "Iterator[Piece]":
        """Yield the range in parts: one of at most `first` bytes, then parts of at most `most` bytes."""
        begin, end = 0, min(first, self.num_bytes)
        while begin < self.num_bytes:
            yield Piece(self.source + begin, self.target + begin, end - begin)
            begin, end = end, min(end + most, self.num_bytes)


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Sizes of a block and a state in bytes; in each memory, block or state n starts at n times its size."""

    block: int
    state: int

    def bytes_of(self, order: CopyOrder) -> int:
        """Return the number of bytes that an order copies."""
        return len(order.blocks) * self.block + len(order.states) * self.state

    def pieces(self, order: CopyOrder) -> Iterator[Piece]:
        """Yield the byte ranges that an order copies; consecutive blocks or states are merged into one range."""
        yield from _merged(order.blocks, self.block)
        yield from _merged(order.states, self.state)


Work = Callable[[CopyOrder], float | None]
"""Function that makes one copy, or raises; it returns the seconds that it paused, or None if it did not pause."""


class CopyLanes:
    """`Copies` with one thread per lane. If a copy raises, the error is logged and the copy counts as failed.

    Args:
        works: Function that makes the copies of each lane, called in the lane's thread.
        before: Functions called with each order in the caller's thread, before the order is queued.
        sizes: Sizes of blocks and states, from which the time per byte is computed.
        times: Object that records the copy times; None if they are not needed.
    """

    def __init__(
        self,
        works: Mapping[Lane, Work],
        before: Sequence[Callable[[CopyOrder], None]] = (),
        sizes: UnitSizes | None = None,
        times: MeasuredTimes | None = None,
    ) -> None:
        self._sizes = sizes or UnitSizes(0, 0)
        self._times = times or MeasuredTimes()
        self._before = before
        self._statuses: dict[int, CopyStatus] = {}
        self._changed = threading.Condition()
        self._queues: dict[Lane, SimpleQueue[CopyOrder | None]] = {}
        self._threads = []
        for lane, work in works.items():
            queue: SimpleQueue[CopyOrder | None] = SimpleQueue()
            self._queues[lane] = queue
            thread = threading.Thread(target=self._work_off, args=(queue, work), name=lane.value, daemon=True)
            self._threads.append(thread)
            thread.start()

    def start(self, orders: Sequence[CopyOrder]) -> None:
        for order in orders:
            self._statuses[order.number] = CopyStatus.UNDER_WAY
            for note in self._before:
                note(order)
            self._queues[order.lane].put(order)

    def status(self, number: int) -> CopyStatus:
        return self._statuses[number]

    def wait(self, numbers: Sequence[int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: all(self._statuses[number] for number in numbers))

    def forget(self, number: int) -> None:
        del self._statuses[number]

    def close(self) -> None:
        """Wait until all started copies have ended, then end the threads."""
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work_off(self, queue: "SimpleQueue[CopyOrder | None]", work: Work) -> None:
        while (order := queue.get()) is not None:
            try:
                began = time.perf_counter()
                paused = work(order) or 0.0
                seconds = time.perf_counter() - began - paused
                self._times.note_copy(order.lane, self._sizes.bytes_of(order), seconds)
                status = CopyStatus.DONE
            except Exception:
                _LOG.warning("a copy %s has failed", order.lane.value, exc_info=True)
                status = CopyStatus.FAILED
            with self._changed:
                self._statuses[order.number] = status
                self._changed.notify_all()


class DeviceCopies:
    """Copies between device and host memory on two CUDA streams, one for each direction.

    Args:
        device, host: [bytes] uint8. For a CUDA device, the host memory must be pinned in ranges whose sizes are
            multiples of `PART_BYTES`.

    The small copies of a step use the same copy engine, and wait for all copies that were submitted earlier. Therefore,
    only a few parts are submitted at a time. Requests wait for restores, but not for writes to the host. A write
    therefore pauses after each part for as long as its copy took, which leaves half of the copy engine's time to the
    steps. Parts end at multiples of `PART_BYTES` in host memory, because CUDA rejects a copy across the end of a pinned
    range.
    """

    def __init__(self, device: Tensor, host: Tensor, sizes: UnitSizes) -> None:
        self._device = device
        self._host = host
        self._sizes = sizes
        self._launched: dict[int, torch.cuda.Event] = {}
        lanes = (Lane.TO_HOST, Lane.TO_DEVICE)
        self._streams = {lane: torch.cuda.Stream(device.device) for lane in lanes} if device.is_cuda else {}

    def works(self) -> dict[Lane, Work]:
        """Return the functions that copy to the host and to the device, keyed by lane."""
        return {
            Lane.TO_HOST: lambda order: self._copy(order, self._device, self._host),
            Lane.TO_DEVICE: lambda order: self._copy(order, self._host, self._device),
        }

    def note_launched(self, order: CopyOrder) -> None:
        """Record an event, so that the copy waits for all work launched on the current stream so far."""
        if order.lane in self._streams:
            event = self._launched[order.number] = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device.device))

    @torch.inference_mode()  # the memory may have been allocated in inference mode
    def _copy(self, order: CopyOrder, source: Tensor, target: Tensor) -> float:
        stream, paused = self._streams.get(order.lane), 0.0
        if stream is None:
            deque(self._copy_parts(order, source, target), maxlen=0)
            return paused
        with torch.cuda.device(self._device.device), torch.cuda.stream(stream):
            self._launched.pop(order.number).synchronize()
            parts = self._copy_parts(order, source, target)
            if order.lane is Lane.TO_HOST:
                paused = _pause_between(parts, stream)
            else:
                _submit(parts)
            stream.synchronize()
        return paused

    def _copy_parts(self, order: CopyOrder, source: Tensor, target: Tensor) -> Iterator[None]:
        """Submit a copy in parts to the current stream; yield after each part."""
        for piece in self._sizes.pieces(order):
            on_host = piece.target if target is self._host else piece.source
            for part in piece.cut(PART_BYTES - on_host % PART_BYTES, PART_BYTES):
                read = source[part.source : part.source + part.num_bytes]
                target[part.target : part.target + part.num_bytes].copy_(read, non_blocking=True)
                yield


def _submit(parts: Iterator[None]) -> None:
    """Submit all parts to the current stream, with at most `_MOST_IN_FLIGHT` in flight."""
    submitted = deque([torch.cuda.Event() for _ in range(_MOST_IN_FLIGHT)])
    for _ in parts:
        submitted.rotate(-1)
        submitted[-1].record()
        submitted[0].synchronize()  # returns immediately for an event that was never recorded


def _pause_between(parts: Iterator[None], stream: torch.cuda.Stream) -> float:
    """Submit parts one by one, and pause after each for as long as its copy took; return the total pause in s."""
    began, paused = time.perf_counter(), 0.0
    for _ in parts:
        stream.synchronize()
        copied = time.perf_counter()
        time.sleep(copied - began)
        began = time.perf_counter()
        paused += began - copied
    return paused


def _merged(pairs: IndexPairs, num_bytes: int) -> Iterator[Piece]:
    """Yield one byte range for each run of index pairs in which both indices increase by one.

    Yield nothing if `num_bytes`, the size of one block or state, is 0.
    """
    if not num_bytes:
        return
    run: list[tuple[int, int]] = []
    for pair in pairs:
        if run and pair != (run[-1][0] + 1, run[-1][1] + 1):
            yield Piece(run[0][0] * num_bytes, run[0][1] * num_bytes, len(run) * num_bytes)
            run = []
        run.append(pair)
    if run:
        yield Piece(run[0][0] * num_bytes, run[0][1] * num_bytes, len(run) * num_bytes)
