"""The columns of requests' draft windows: slots of the shared pool, as many as each step needs."""

from collections.abc import Sequence

from .requests import RunningRequest
from .slot_pool import SlotPool


class DraftWindows:
    """Gives running requests slots for the states after their drafts, and takes them back.

    Column 0 is the request's live slot. Drafts never take slots that are needed for requests not admitted yet or for
    the checkpoints of running ones.

    Args:
        max_requests: The most requests with a live slot at once.
        num_checkpoints: Cached states to leave room for, per running request; none where their slots are others.
    """

    def __init__(self, slots: SlotPool, max_requests: int, num_checkpoints: int = 0) -> None:
        self._slots = slots
        self._max_requests = max_requests
        self._num_checkpoints = num_checkpoints

    def begin(self, row: RunningRequest) -> None:
        """Do nothing: an admitted request has its live slot, which is column 0."""

    def widen(self, row: RunningRequest, num_drafts: int) -> int:
        """Give the request columns for up to `num_drafts` drafts; return how many drafts it has columns for."""
        missing = num_drafts - len(row.draft_slots)
        if missing <= 0:
            return num_drafts
        num_live = self._slots.num_live
        num_to_come = max(0, self._max_requests - num_live)
        spare = self._slots.num_available_to_run - num_to_come - self._num_checkpoints * num_live
        if spare > 0:
            row.draft_slots += self._slots.take_draft(min(missing, spare))
        return min(num_drafts, len(row.draft_slots))

    def trim(self, row: RunningRequest) -> None:
        """Take back the columns past the accepted one, which the next step reads."""
        while len(row.draft_slots) >= row.accepted:
            self._slots.release_draft(row.draft_slots[-1])
            del row.draft_slots[-1]

    def close(self, row: RunningRequest) -> None:
        """Take back all columns but column 0, whose live slot has the live state by now."""
        row.accepted = 1
        self.trim(row)

    def end(self, row: RunningRequest) -> None:
        """Take back all columns but column 0: the request leaves."""
        self.close(row)

    def check_integrity(self, rows: Sequence[RunningRequest]) -> None:
        """Do nothing: the slot pool knows the owner of every column."""
