"""What ranks that share experts agree on before each round of their loops: whether all step, and when all leave.

Signals of a coordinator reach them in different rounds. No rank may compute while a peer's memory is dropped, since a
forward needs all of them, and none may leave while a peer still asks for it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from enum import IntEnum

_ROUND_S = 0.02  # as long as Megatron's loop rests where there is nothing to do


class Standing(IntEnum):
    """How a rank stands before a round. The highest standing of a group decides for all of it."""

    STOPPED = 0
    """It has heard that all engines have stopped, and leaves once all have heard it."""
    RESTING = 1
    """It has no requests, or was told to pause, stop or suspend."""
    WORKING = 2
    """It has requests: all step, those without any for the others' sake."""
    SUSPENDED = 3
    """It cannot compute: nobody steps."""


async def all_step(mine: Standing, highest: Callable[[Standing], Awaitable[int]]) -> bool:
    """Return whether the ranks of a group step now; all of them call it, once a round.

    Where this rank has stopped, it returns once all have.

    Args:
        mine: Standing of this rank.
        highest: All-reduces standings over the group.
    """
    found = await highest(mine)
    while mine is Standing.STOPPED and found > Standing.STOPPED:
        await asyncio.sleep(_ROUND_S)
        found = await highest(mine)
    return found == Standing.WORKING
