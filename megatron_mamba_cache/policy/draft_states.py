"""Storage policies for the states after a request's drafts: slots of the shared pool, or a buffer per request.

The setting `draft_states` selects the policy. `WindowStates` is used with `recurrences.window`, which works for every
recurrence. `ReplayStates` is used with recurrences that can replay the inputs of drafts.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from ..errors import CacheIntegrityError
from .identifiers import DraftBufferId, SlotId
from .requests import RunningRequest, StateCursor
from .slot_pool import SlotPool


class DraftStates(ABC):
    """Allocator of draft slots or buffers for requests; the only code that changes a `StateCursor`."""

    is_limited = False
    """True if `most_drafts` depends on the position."""

    @abstractmethod
    def begin(self, live_slot: SlotId) -> StateCursor:
        """Return a cursor for an admitted request; raise `CacheIntegrityError` if no draft buffer is free for it."""

    def most_drafts(self, computed: int, limit: int) -> int:
        """Return the maximum number of drafts, up to `limit`, after the token at position `computed`."""
        return limit

    def widen(self, cursor: StateCursor, num_drafts: int) -> int:
        """Allocate storage for the states after up to `num_drafts` drafts; return the number of drafts that fit."""
        return num_drafts

    def accept(self, cursor: StateCursor, num_tokens: int) -> None:
        """Make the state after the last step's first `num_tokens` tokens the live state; release unneeded storage."""
        cursor.accept(num_tokens)
        self.trim(cursor)

    def accept_followed(self, cursors: Sequence[StateCursor], num_tokens: Sequence[int]) -> None:
        """Like `accept` for each cursor, but keep all storage, because the next step is running with as many drafts."""
        for cursor, number in zip(cursors, num_tokens, strict=True):
            cursor.accept(number)

    @abstractmethod
    def trim(self, cursor: StateCursor) -> None:
        """Release draft storage that the next step does not read."""

    @abstractmethod
    def close(self, cursor: StateCursor, num_tokens: int) -> None:
        """Release the draft slots: the live slot now holds the state after all `num_tokens` computed tokens."""

    @abstractmethod
    def end(self, cursor: StateCursor) -> None:
        """Release all draft storage of a request that leaves; keep its live slot."""

    @abstractmethod
    def check_integrity(self, cursors: Sequence[StateCursor]) -> None:
        """Raise `CacheIntegrityError` unless each draft slot or buffer is either free or held by one cursor."""


class WindowStates(DraftStates):
    """`DraftStates` that store one state per draft, in slots of the shared pool.

    Slots needed to admit further requests or to checkpoint running requests are never used for drafts.

    Args:
        max_requests: Maximum number of requests with a live slot.
        keeps_checkpoints: True if each running request also keeps a decode checkpoint in these slots.
    """

    def __init__(self, slots: SlotPool, max_requests: int, *, keeps_checkpoints: bool = True) -> None:
        self._slots = slots
        self._max_requests = max_requests
        self._num_checkpoints = int(keeps_checkpoints and slots.shares_slots)  # number per request

    def begin(self, live_slot: SlotId) -> StateCursor:
        return StateCursor(live_slot)

    def widen(self, cursor: StateCursor, num_drafts: int) -> int:
        missing = num_drafts - len(cursor.draft_slots)
        if missing <= 0:
            return num_drafts
        num_live = self._slots.num_live
        num_to_come = max(0, self._max_requests - num_live)
        spare = self._slots.num_available_to_run - num_to_come - self._num_checkpoints * num_live
        if spare > 0:
            cursor.add_slots(self._slots.take_draft(min(missing, spare)))
        return min(num_drafts, len(cursor.draft_slots))

    def trim(self, cursor: StateCursor) -> None:
        """Release the columns after the accepted column; the next step reads the accepted column."""
        while len(cursor.draft_slots) >= cursor.accepted:
            self._slots.release_draft(cursor.draft_slots[-1])
            cursor.remove_last_slot()

    def close(self, cursor: StateCursor, num_tokens: int) -> None:
        self.accept(cursor, 1)

    def end(self, cursor: StateCursor) -> None:
        self.accept(cursor, 1)

    def check_integrity(self, cursors: Sequence[StateCursor]) -> None:
        """Do nothing, because the slot pool checks the owner of every column."""


class ReplayStates(DraftStates):
    """`DraftStates` that keep the newest tokens' inputs in one buffer per request, and recompute states from them.

    Args:
        max_requests: Maximum number of running requests; also the number of buffers.
        rounding_len: Number of token positions between two conversions of a state to its 16-bit dtype; None for fp32
            states.
    """

    def __init__(self, max_requests: int, rounding_len: int | None = None) -> None:
        self._num_buffers = max_requests
        self._rounding_len = rounding_len
        self.is_limited = rounding_len is not None
        self._free = [DraftBufferId(number) for number in reversed(range(max_requests))]

    def begin(self, live_slot: SlotId) -> StateCursor:
        if not self._free:
            raise CacheIntegrityError(f"all {self._num_buffers} draft buffers are in use")
        return StateCursor(live_slot, self._free.pop())

    def most_drafts(self, computed: int, limit: int) -> int:
        """Return the number of drafts, up to `limit`, before the next conversion of the state to its 16-bit dtype.

        A step converts a state only before its first token. Drafts past the next conversion position would read the
        fp32 state, and the results would depend on the number of drafts.
        """
        if self._rounding_len is None:
            return limit
        return min(limit, self._rounding_len - 1 - computed % self._rounding_len)

    def trim(self, cursor: StateCursor) -> None:
        """Do nothing, because the next step overwrites the inputs of rejected drafts."""

    def close(self, cursor: StateCursor, num_tokens: int) -> None:
        cursor.resolve(num_tokens)

    def end(self, cursor: StateCursor) -> None:
        if cursor.draft_buffer is not None:
            self._free.append(cursor.draft_buffer)
            cursor.release_buffer()

    def check_integrity(self, cursors: Sequence[StateCursor]) -> None:
        held = [cursor.draft_buffer for cursor in cursors]
        if Counter([*held, *self._free]) != Counter(range(self._num_buffers)):
            raise CacheIntegrityError(
                f"each of the {self._num_buffers} draft buffers must be held once or free, found {held} held and "
                f"{self._free} free"
            )


def num_folded(request: RunningRequest, fold_len: int) -> int:
    """Return how many tokens the state in the live slot includes, for a request with a draft buffer.

    After prefill, the live slot holds the prompt's state. Each later step adds to that state the buffered tokens up to
    the last position that is a multiple of `fold_len`.
    """
    cursor = request.cursor
    start_of_last_step = request.computed - cursor.accepted
    return max(request.spec.prompt_len, cursor.resolved, start_of_last_step // fold_len * fold_len)
