"""Rules for the states that decoding keeps, for the slots that it may take, and for its drafts."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class DecodeRules:
    """Which states decoding keeps, and how many requests share the pool with draft windows.

    Args:
        checkpoints: Boundaries reached in decode that keep a state: a request's newest ("rolling"), "all" or "none".
        max_requests: The most requests that run at once.
        replays: Whether states are replayed, so that drafts take no slots.
        rounding_len: Positions from one rounding of replayed states to the next; None if they are stored as computed.
    """

    checkpoints: Literal["rolling", "all", "none"] = "rolling"
    max_requests: int = 0
    replays: bool = False
    rounding_len: int | None = None

    def most_drafts(self, computed: int, limit: int) -> int:
        """Return how many drafts, `limit` at most, a row may have whose next token is the one at `computed`.

        A step rounds a state before its first token. Tokens behind the next rounding would read the state before it,
        and what they are would depend on the number of drafts.
        """
        if self.rounding_len is None:
            return limit
        return min(limit, self.rounding_len - 1 - computed % self.rounding_len)
