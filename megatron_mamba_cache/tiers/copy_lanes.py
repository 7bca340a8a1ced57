"""Copies between a rank's device and host memory, by threads with CUDA streams of their own."""

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
    """Keeps the shortest time per byte of each lane and per prompt token; ignores small copies and steps.

    An unmeasured direction counts as being as fast as the opposite one.
    """

    def __init__(self) -> None:
        self._byte_s: dict[Lane, float] = {}
        self._token_s: float | None = None

    def note_copy(self, lane: Lane, num_bytes: int, seconds: float) -> None:
        """Record a finished copy."""
        if num_bytes >= _LEAST_BYTES:
            self._byte_s[lane] = min(seconds / num_bytes, self._byte_s.get(lane, float("inf")))

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record a step that computed only prompt tokens."""
        if num_tokens >= _LEAST_TOKENS:
            self._token_s = min(seconds / num_tokens, self._token_s or float("inf"))

    def times(self, block_bytes: int, state_bytes: int) -> CopyTimes | None:
        """Return the copy times of a block and a state of these sizes; None before the first copy and prefill."""
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
"""Copies are submitted to the GPU in parts of this size: about 80 µs over PCIe 5."""
_MOST_IN_FLIGHT = 2
"""Parts of a restore in flight at a time, so that the copy engine never idles."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Contiguous bytes to copy, with their offsets on both sides."""

    source: int
    target: int
    num_bytes: int

    def cut(self, first: int, most: int) -> "Iterator[Piece]":
        """Yield parts: the first of up to `first` bytes, the others of up to `most`."""
        begin, end = 0, min(first, self.num_bytes)
        while begin < self.num_bytes:
            yield Piece(self.source + begin, self.target + begin, end - begin)
            begin, end = end, min(end + most, self.num_bytes)


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Bytes of a block and of a state; on both sides unit n begins at n times its size."""

    block: int
    state: int

    def bytes_of(self, order: CopyOrder) -> int:
        """Return the bytes of a copy."""
        return len(order.blocks) * self.block + len(order.states) * self.state

    def pieces(self, order: CopyOrder) -> Iterator[Piece]:
        """Yield the pieces of a copy, consecutive units merged."""
        yield from _merged(order.blocks, self.block)
        yield from _merged(order.states, self.state)


Work = Callable[[CopyOrder], float | None]
"""Makes one whole copy, or raises; returns the seconds that it paused, None for none."""


class CopyLanes:
    """A thread for each lane; implements `Copies`. A copy that raises has failed, and is logged.

    Args:
        works: Makes the copies of each lane, in the lane's thread.
        before: Called in the caller's thread for each order, right before it starts.
        sizes: Sizes of the copied units.
        times: Records how long copies take.
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
        """End the threads after all started copies."""
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
    """Copies between device and host on two CUDA streams, one for each direction.

    Args:
        device, host: [bytes] uint8; for a CUDA device the host's is pinned, by calls that each cover whole parts of
            `PART_BYTES`.

    A step's own small copies share a copy engine with these and wait for submitted ones, so few bytes are submitted at
    a time. A request waits for a restore, but for no write: a write pauses as long as it copies, which leaves half of
    the bus and of the engine to the steps. Parts end at multiples of their size in the host's memory: CUDA refuses a
    copy across the end of one pinned range.
    """

    def __init__(self, device: Tensor, host: Tensor, sizes: UnitSizes) -> None:
        self._device = device
        self._host = host
        self._sizes = sizes
        self._launched: dict[int, torch.cuda.Event] = {}
        lanes = (Lane.TO_HOST, Lane.TO_DEVICE)
        self._streams = {lane: torch.cuda.Stream(device.device) for lane in lanes} if device.is_cuda else {}

    def works(self) -> dict[Lane, Work]:
        """Return the copy functions of the two lanes."""
        return {
            Lane.TO_HOST: lambda order: self._copy(order, self._device, self._host),
            Lane.TO_DEVICE: lambda order: self._copy(order, self._host, self._device),
        }

    def note_launched(self, order: CopyOrder) -> None:
        """Make a copy wait for the work launched on the device so far."""
        if order.lane in self._streams:
            event = self._launched[order.number] = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device.device))

    @torch.inference_mode()  # the memory may have been allocated in it
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
        """Copy part by part; yield after each."""
        for piece in self._sizes.pieces(order):
            on_host = piece.target if target is self._host else piece.source
            for part in piece.cut(PART_BYTES - on_host % PART_BYTES, PART_BYTES):
                read = source[part.source : part.source + part.num_bytes]
                target[part.target : part.target + part.num_bytes].copy_(read, non_blocking=True)
                yield


def _submit(parts: Iterator[None]) -> None:
    """Submit parts to the current stream while few are in flight."""
    submitted = deque([torch.cuda.Event() for _ in range(_MOST_IN_FLIGHT)])
    for _ in parts:
        submitted.rotate(-1)
        submitted[-1].record()
        submitted[0].synchronize()  # the part before; an event never recorded counts as reached


def _pause_between(parts: Iterator[None], stream: torch.cuda.Stream) -> float:
    """Submit parts one by one, each after a pause as long as the part before took; return the seconds paused."""
    began, paused = time.perf_counter(), 0.0
    for _ in parts:
        stream.synchronize()
        copied = time.perf_counter()
        time.sleep(copied - began)
        began = time.perf_counter()
        paused += began - copied
    return paused


def _merged(pairs: IndexPairs, num_bytes: int) -> Iterator[Piece]:
    """Yield one piece for each run of pairs that are consecutive on both sides; none for units without bytes."""
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
