"""How ranks that share experts agree, before each round of their loops, whether all step and when all leave.

A coordinator's signals reach them in different rounds. No rank may compute while a peer's memory is dropped, since a
forward needs all of them, and none may leave while a peer still needs it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from enum import IntEnum

_ROUND_S = 0.02  # as long as Megatron's idle loop sleeps


class Standing(IntEnum):
    """The state of a rank before a round. The highest standing in a group decides for all its ranks."""

    STOPPED = 0
    """It has received the final stop, and leaves once all ranks have received it."""
    RESTING = 1
    """It has no requests, or was told to pause, stop or suspend."""
    WORKING = 2
    """It has requests: all ranks step, those without requests included."""
    SUSPENDED = 3
    """It cannot compute: no rank steps."""


async def all_step(mine: Standing, highest: Callable[[Standing], Awaitable[int]]) -> bool:
    """Return whether the ranks of a group step now; all of them call it once per round.

    If this rank has stopped, it returns once all have stopped.

    Args:
        mine: Standing of this rank.
        highest: All-reduces standings over the group.
    """
    found = await highest(mine)
    while mine is Standing.STOPPED and found > Standing.STOPPED:
        await asyncio.sleep(_ROUND_S)
        found = await highest(mine)
    return found == Standing.WORKING
