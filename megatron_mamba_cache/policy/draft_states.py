"""Where to keep the states after a request's drafts: in slots of the shared pool, or in one buffer per request.

The setting `draft_states` chooses. `WindowStates` are the policy of `recurrences.window`, and serve every recurrence;
`ReplayStates` are that of a recurrence's own replay.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from ..errors import CacheIntegrityError
from .identifiers import DraftBufferId, SlotId
from .requests import RunningRequest, StateCursor
from .slot_pool import SlotPool


class DraftStates(ABC):
    """Give requests the slots or buffers that their drafts need; nothing else changes a `StateCursor`."""

    @abstractmethod
    def begin(self, live_slot: SlotId) -> StateCursor:
        """Return the cursor of an admitted request; raise `CacheIntegrityError` if there is no room for it."""

    def most_drafts(self, computed: int, limit: int) -> int:
        """Return how many drafts, at most `limit`, may follow the token at position `computed`."""
        return limit

    def widen(self, cursor: StateCursor, num_drafts: int) -> int:
        """Make room for the states after up to `num_drafts` drafts; return how many drafts fit."""
        return num_drafts

    def accept(self, cursor: StateCursor, num_tokens: int) -> None:
        """Move to the state after `num_tokens` tokens of the last step; release what the next step does not read."""
        cursor.accept(num_tokens)
        self.trim(cursor)

    @abstractmethod
    def trim(self, cursor: StateCursor) -> None:
        """Release the room for drafts that no step computed."""

    @abstractmethod
    def close(self, cursor: StateCursor, num_tokens: int) -> None:
        """Release all room for drafts; the live slot holds the state after all `num_tokens` computed tokens."""

    @abstractmethod
    def end(self, cursor: StateCursor) -> None:
        """Release everything except the live slot, because the request leaves."""

    @abstractmethod
    def check_integrity(self, cursors: Sequence[StateCursor]) -> None:
        """Raise `CacheIntegrityError` unless cursors and free room agree."""


class WindowStates(DraftStates):
    """`DraftStates` that store one state per draft, in slots of the shared pool.

    Slots needed to admit further requests or to checkpoint running requests are never used for drafts.

    Args:
        max_requests: The most requests with a live slot at once.
        keeps_checkpoints: True if each running request keeps a checkpoint, in the same slots.
    """

    def __init__(self, slots: SlotPool, max_requests: int, *, keeps_checkpoints: bool = True) -> None:
        self._slots = slots
        self._max_requests = max_requests
        self._num_checkpoints = int(keeps_checkpoints and slots.shares_slots)  # of each request

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
        """Release the columns after the accepted column, from which the next step reads."""
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
    """`DraftStates` that store the inputs of tokens in one buffer per request, with room for all drafts.

    Args:
        max_requests: The most requests that run at once, and the number of buffers.
        rounding_len: Number of positions between two roundings of the stored states; None if states are not rounded.
    """

    def __init__(self, max_requests: int, rounding_len: int | None = None) -> None:
        self._num_buffers = max_requests
        self._rounding_len = rounding_len
        self._free = [DraftBufferId(number) for number in reversed(range(max_requests))]

    def begin(self, live_slot: SlotId) -> StateCursor:
        if not self._free:
            raise CacheIntegrityError(f"need a free draft buffer, found all {self._num_buffers} in use")
        return StateCursor(live_slot, self._free.pop())

    def most_drafts(self, computed: int, limit: int) -> int:
        """Limit drafts to the tokens before the next rounding.

        A step rounds a state before its first token. Tokens after the next rounding would read the unrounded state, and
        then their bits would depend on the number of drafts.
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
                f"requests hold draft buffers {held} and {self._free} are free, of {self._num_buffers}"
            )


def num_folded(request: RunningRequest, fold_len: int) -> int:
    """Return how many tokens the state in the live slot includes, for a request with a draft buffer.

    Prefill leaves the prompt's state there. Then each step folds the tokens that are in the buffer, up to a multiple of
    `fold_len`.
    """
    cursor = request.cursor
    start_of_last_step = request.computed - cursor.accepted
    return max(request.spec.prompt_len, cursor.resolved, start_of_last_step // fold_len * fold_len)
