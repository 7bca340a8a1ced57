"""Simulated copies between GPU and host, whose duration depends on their bytes."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter

from megatron_mamba_cache.policy.tiers.copies import CopyOrder, CopyStatus, Lane
from megatron_mamba_cache.recurrences.slab_shape import UnitBytes


@dataclass(slots=True)
class Clock:
    """Simulated time in seconds since the start."""

    now: float = 0.0


@dataclass(frozen=True, slots=True)
class CopyRates:
    """Bytes per second if one direction copies alone, and in total if both directions copy.

    Args:
        writing: Fraction of the time in which a copy to the host is active; it pauses in between.
    """

    alone: float
    both: float
    writing: float = 1.0

    def of(self, lane: Lane, num_lanes: int) -> float:
        """Return the rate of one direction in bytes per second, if `num_lanes` directions copy."""
        rate = self.alone if num_lanes == 1 else self.both / num_lanes
        return self.writing * rate if lane is Lane.TO_HOST else rate


@dataclass(slots=True)
class _UnderWay:
    number: int
    bytes_left: float


class TimedCopies:
    """Implementation of `Copies` with one lane per direction; the copies of a lane run one after another.

    Attributes:
        num_bytes: Bytes of all copies that were started, by lane.
    """

    def __init__(self, clock: Clock, sizes: UnitBytes, rates: CopyRates) -> None:
        self.num_bytes: Counter[Lane] = Counter()
        self._clock = clock
        self._sizes = sizes
        self._rates = rates
        self._time = 0.0  # simulated time until which copies have progressed
        self._lanes: dict[Lane, deque[_UnderWay]] = {Lane.TO_HOST: deque(), Lane.TO_DEVICE: deque()}
        self._under_way: set[int] = set()

    def start(self, orders: Sequence[CopyOrder]) -> None:
        self._copy_until(self._clock.now)
        for order in orders:
            num_bytes = len(order.blocks) * self._sizes.block + len(order.states) * self._sizes.state
            self._lanes[order.lane].append(_UnderWay(order.number, num_bytes))
            self._under_way.add(order.number)
            self.num_bytes[order.lane] += num_bytes

    def status(self, number: int) -> CopyStatus:
        self._copy_until(self._clock.now)
        return CopyStatus.UNDER_WAY if number in self._under_way else CopyStatus.DONE

    def wait(self, numbers: Sequence[int]) -> None:
        """Advance the clock until the given copies have ended."""
        self._copy_until(self._clock.now)
        while not self._under_way.isdisjoint(numbers):
            self._clock.now = self.next_end()
            self._copy_until(self._clock.now)

    def forget(self, number: int) -> None:
        """Do nothing: ended copies need no memory."""

    def next_end(self) -> float:
        """Return the time at which the next copy ends if no other copy is started; infinite without copies."""
        return min((self._time + seconds for _, seconds in self._heads()), default=inf)

    def _copy_until(self, now: float) -> None:
        while (end := self.next_end()) <= now:
            self._copy_for(end - self._time)
            self._end_first()
        self._copy_for(now - self._time)

    def _copy_for(self, seconds: float) -> None:
        heads = self._heads()
        for lane, _ in heads:
            self._lanes[lane][0].bytes_left -= seconds * self._rates.of(lane, len(heads))
        self._time += seconds

    def _end_first(self) -> None:
        lane, _ = min(self._heads(), key=itemgetter(1))
        self._under_way.discard(self._lanes[lane].popleft().number)

    def _heads(self) -> list[tuple[Lane, float]]:
        """Return the active lanes, each with the remaining seconds of its first copy if no other copy is started."""
        copying = [(lane, copies[0].bytes_left) for lane, copies in self._lanes.items() if copies]
        return [(lane, max(num_bytes, 0.0) / self._rates.of(lane, len(copying))) for lane, num_bytes in copying]
