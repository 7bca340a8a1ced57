"""What decoding keeps and may take."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class DecodeRules:
    """Which states decoding leaves behind, and how many requests share the pool with draft windows.

    Args:
        checkpoints: Which boundaries that a request reaches in decode keep a state: its newest ("rolling"), "all" or
            "none".
        max_requests: Requests that run at once.
    """

    checkpoints: Literal["rolling", "all", "none"] = "rolling"
    max_requests: int = 0
