"""Copies between the device and the host that take the time that their bytes take, on a simulated clock."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ..policy.tiers.copies import CopyOrder, CopyStatus, Lane
from ..state.slab_shape import UnitBytes


@dataclass(slots=True)
class Clock:
    """Seconds since the start of a simulation."""

    now: float = 0.0


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Bytes a second: of one lane alone, and of two lanes together while both copy."""

    alone: float
    both: float


@dataclass(slots=True)
class _UnderWay:
    number: int
    bytes_left: float


class TimedCopies:
    """`Copies` in two lanes, each of which makes one copy after another.

    Attributes:
        num_bytes: Copied or ordered so far, by lane.
    """

    def __init__(self, clock: Clock, sizes: UnitBytes, rates: CopyRates) -> None:
        self.num_bytes: Counter[Lane] = Counter()
        self._clock = clock
        self._sizes = sizes
        self._rates = rates
        self._time = 0.0  # up to which copies have been made
        self._lanes: dict[Lane, deque[_UnderWay]] = {Lane.TO_HOST: deque(), Lane.TO_DEVICE: deque()}
        self._under_way: set[int] = set()

    def start(self, orders: Sequence[CopyOrder]) -> None:
        """See `Copies`."""
        self._copy_until(self._clock.now)
        for order in orders:
            num_bytes = len(order.blocks) * self._sizes.block + len(order.states) * self._sizes.state
            self._lanes[order.lane].append(_UnderWay(order.number, num_bytes))
            self._under_way.add(order.number)
            self.num_bytes[order.lane] += num_bytes

    def status(self, number: int) -> CopyStatus:
        """See `Copies`."""
        self._copy_until(self._clock.now)
        return CopyStatus.UNDER_WAY if number in self._under_way else CopyStatus.DONE

    def wait(self, numbers: Sequence[int]) -> None:
        """See `Copies`; the clock goes on meanwhile."""
        self._copy_until(self._clock.now)
        while not self._under_way.isdisjoint(numbers):
            self._clock.now = self.next_end()
            self._copy_until(self._clock.now)

    def forget(self, number: int) -> None:
        """See `Copies`."""

    def next_end(self) -> float:
        """Return when a copy will end next, if no other is started; infinite if none is under way."""
        heads = self._heads()
        return min((self._time + max(copy.bytes_left, 0.0) / self._rate(len(heads)) for copy in heads), default=inf)

    def _copy_until(self, now: float) -> None:
        while (end := self.next_end()) <= now:
            self._copy_for(end - self._time)
            self._end_first()
        self._copy_for(now - self._time)

    def _copy_for(self, seconds: float) -> None:
        heads = self._heads()
        for copy in heads:
            copy.bytes_left -= seconds * self._rate(len(heads))
        self._time += seconds

    def _end_first(self) -> None:
        lane = min(filter(None, self._lanes.values()), key=lambda lane: lane[0].bytes_left)
        self._under_way.discard(lane.popleft().number)

    def _heads(self) -> list[_UnderWay]:
        return [lane[0] for lane in self._lanes.values() if lane]

    def _rate(self, num_lanes: int) -> float:
        return self._rates.alone if num_lanes == 1 else self._rates.both / num_lanes
