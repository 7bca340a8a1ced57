"""Rings of running requests whose states are replayed: one each, and no slot for a draft."""

from collections import Counter
from collections.abc import Sequence

from ..errors import CacheIntegrityError
from .identifiers import RingId
from .requests import RunningRequest


class RequestRings:
    """Gives each running request a ring; the counterpart of `DraftWindows`, for steps that write no state a draft.

    Args:
        max_requests: The most requests that run at once, and the number of rings.
    """

    def __init__(self, max_requests: int) -> None:
        self._num_rings = max_requests
        self._free = [RingId(number) for number in reversed(range(max_requests))]

    def begin(self, row: RunningRequest) -> None:
        """Give the request a ring.

        Raises:
            CacheIntegrityError: If more requests run than there are rings.
        """
        if not self._free:
            raise CacheIntegrityError(f"all {self._num_rings} rings belong to running requests")
        row.ring = self._free.pop()

    def widen(self, row: RunningRequest, num_drafts: int) -> int:
        """Return how many drafts the request has room for: all."""
        return num_drafts

    def trim(self, row: RunningRequest) -> None:
        """Do nothing: a rejected draft leaves nothing behind."""

    def close(self, row: RunningRequest) -> None:
        """Note that the request's live slot has the state of all its computed tokens."""
        row.accepted, row.settled = 1, row.computed

    def end(self, row: RunningRequest) -> None:
        """Take the ring back, if the request has one."""
        if row.ring is not None:
            self._free.append(row.ring)
            row.ring = None

    def check_integrity(self, rows: Sequence[RunningRequest]) -> None:
        """Raise `CacheIntegrityError` unless each ring is free or belongs to one of the requests."""
        held = [row.ring for row in rows]
        if Counter([*held, *self._free]) != Counter(range(self._num_rings)):
            raise CacheIntegrityError(f"rows hold rings {held} and {self._free} are free, of {self._num_rings}")
