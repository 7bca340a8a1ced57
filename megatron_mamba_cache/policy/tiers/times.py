"""What copying and computing take, as the ranks of a model agree once: whether a copy is sooner than a prefill."""

from collections.abc import Callable
from typing import NamedTuple

from .copies import Agree


class CopyTimes(NamedTuple):
    """Nanoseconds.

    Args:
        block, state: To copy one from the host to the device.
        token: To compute one token of a prompt.
        disk_block, disk_state: To read one from the disk.
    """

    block: int
    state: int
    token: int
    disk_block: int = 0
    disk_state: int = 0


COPIES_TAKE_NOTHING = CopyTimes(block=0, state=0, token=1)
"""What holds until all ranks have measured."""


class AgreedTimes:
    """Times that are agreed once every rank has measured them: the slowest copies, and the fastest prefill.

    Args:
        measure: Returns what this rank has measured; None if it lacks anything.
    """

    def __init__(self, measure: Callable[[], CopyTimes | None], agree: Agree) -> None:
        self._measure = measure
        self._agree = agree
        self._agreed: CopyTimes | None = None

    def now(self) -> CopyTimes:
        """Return the times. Until they are agreed this is collective: call it for the same decisions on all ranks."""
        if self._agreed is not None:
            return self._agreed
        found = self._measure() or CopyTimes(0, 0, 0)
        token, *others = self._agree([found.token, *(-time for time in _copies_of(found))])
        if not token:
            return COPIES_TAKE_NOTHING
        block, state, disk_block, disk_state = (-time for time in others)
        self._agreed = CopyTimes(block, state, token, disk_block, disk_state)
        return self._agreed


def _copies_of(times: CopyTimes) -> tuple[int, ...]:
    return times.block, times.state, times.disk_block, times.disk_state
