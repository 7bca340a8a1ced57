"""Where the live state of a running request is."""

from dataclasses import dataclass, field

from .identifiers import DraftBufferId, SlotId


@dataclass(slots=True, eq=False)
class StateCursor:
    """The slots of a request's live state and of its drafts' states. Only its `DraftStates` change it.

    With draft slots, the live state is in column `accepted` - 1 of the request's draft window, whose column 0 is the
    live slot. Earlier columns are no longer needed, but the live slot holds what is stored once for all columns.

    With a draft buffer, the live slot holds the state after the first tokens, see `num_folded`, and the buffer has the
    inputs of the tokens after them.

    Args:
        draft_buffer: Index of the request's buffer; None with draft slots.
        draft_slots: Columns 1, 2, ... of the draft window.
        accepted: Tokens that the last step kept.
        settled: Tokens whose state was last brought into the live slot of a request with a buffer; 0 if never.
    """

    live_slot: SlotId
    draft_buffer: DraftBufferId | None = None
    draft_slots: list[SlotId] = field(default_factory=list)
    accepted: int = 1
    settled: int = 0

    @property
    def state_slot(self) -> SlotId:
        """Slot of the live state: the column that the last step accepted."""
        return self.draft_slots[self.accepted - 2] if self.draft_slots and self.accepted > 1 else self.live_slot

    def accept(self, num_tokens: int) -> None:
        """Move to the state after so many of the last step's tokens."""
        self.accepted = num_tokens

    def add_slots(self, slots: list[SlotId]) -> None:
        """Take further columns."""
        self.draft_slots += slots

    def remove_last_slot(self) -> None:
        """Drop the last column."""
        del self.draft_slots[-1]

    def settle(self, num_tokens: int) -> None:
        """Note that the live slot holds the state after `num_tokens`, all that are computed."""
        self.accepted, self.settled = 1, num_tokens

    def release_buffer(self) -> None:
        """Drop the buffer."""
        self.draft_buffer = None
