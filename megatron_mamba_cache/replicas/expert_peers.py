"""Steps of ranks that share experts: all of them step together, or none.

The engine imports this module without pyzmq.
"""

import asyncio
from collections.abc import Awaitable, Callable
from enum import IntEnum

_ROUND_S = 0.02  # as long as Megatron's idle loop sleeps


class Standing(IntEnum):
    """State of a rank before a round; the highest of a group counts for all its ranks."""

    STOPPED = 0
    """It has received the final stop, and leaves once all ranks have received it."""
    RESTING = 1
    """It has no requests, or a signal to pause, stop or suspend."""
    WORKING = 2
    """It has requests: all ranks step, those without requests included."""
    SUSPENDED = 3
    """It cannot compute: no rank steps."""


async def all_step(mine: Standing, highest: Callable[[Standing], Awaitable[int]]) -> bool:
    """Return True if the ranks of a group step now; a collective of each round.

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
