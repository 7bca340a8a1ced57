"""What copying and computing take, as the ranks of a model agree once: whether a copy is sooner than a prefill."""

from collections.abc import Callable
from typing import NamedTuple

from .copies import Agree


class CopyTimes(NamedTuple):
    """Nanoseconds.

    Args:
        block, state: To copy one from the host to the device.
        disk_block, disk_state: To read one from the disk.
        token: To compute one token of a prompt.
    """

    block: int
    state: int
    disk_block: int
    disk_state: int
    token: int


COPIES_TAKE_NOTHING = CopyTimes(0, 0, 0, 0, 1)
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
        found = self._measure() or CopyTimes(0, 0, 0, 0, 0)
        least = self._agree([*(-time for time in found[:-1]), found.token])
        if not least[-1]:
            return COPIES_TAKE_NOTHING
        self._agreed = CopyTimes._make([*(-time for time in least[:-1]), least[-1]])
        return self._agreed
