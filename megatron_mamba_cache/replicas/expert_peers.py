"""Synchronize expert-parallel ranks: either all of them step, or none.

This module must not import pyzmq, because the engine imports it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from enum import IntEnum

_ROUND_S = 0.02  # equals the sleep of Megatron's idle loop


class Standing(IntEnum):
    """State of a rank before a step; the highest state in a group applies to all its ranks."""

    STOPPED = 0
    """It has received the final stop, and leaves once all ranks have received it."""
    RESTING = 1
    """It has no requests, or a signal to pause, stop or suspend."""
    WORKING = 2
    """It has requests: all ranks step, those without requests included."""
    SUSPENDED = 3
    """It cannot compute: no rank steps."""


async def all_step(mine: Standing, highest: Callable[[Standing], Awaitable[int]]) -> bool:
    """Return whether the group runs a step now; all of its ranks call it before each step.

    If this rank has stopped, it returns once all have stopped.

    Args:
        mine: State of this rank.
        highest: Function that returns the maximum state over the group.
    """
    found = await highest(mine)
    while mine is Standing.STOPPED and found > Standing.STOPPED:
        await asyncio.sleep(_ROUND_S)
        found = await highest(mine)
    return found == Standing.WORKING
