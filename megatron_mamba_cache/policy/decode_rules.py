"""Rules for the state slots that decoding keeps and may take."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class DecodeRules:
    """Which states decoding keeps, and how many requests share the pool with draft windows.

    Args:
        checkpoints: Boundaries reached in decode that keep a state: a request's newest ("rolling"), "all" or "none".
        max_requests: The most requests that run at once.
        replays: Whether states are replayed, so that drafts take no slots.
    """

    checkpoints: Literal["rolling", "all", "none"] = "rolling"
    max_requests: int = 0
    replays: bool = False
