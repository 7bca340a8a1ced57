"""Agree with the other expert-parallel ranks on whether to run a step now.

This module must not import pyzmq, because the engine imports it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from enum import IntEnum

_ROUND_S = 0.02  # equals the sleep of Megatron's idle loop


class Standing(IntEnum):
    """State of a rank before a step; the highest state in an expert-parallel group applies to all of its ranks."""

    STOPPED = 0
    """The rank has received the final STOP and leaves once all ranks have received it."""
    RESTING = 1
    """The rank has no requests, or has received a signal to pause, stop or suspend."""
    WORKING = 2
    """The rank has requests: all ranks run a step, including ranks without requests."""
    SUSPENDED = 3
    """The rank is suspended and cannot compute: no rank runs a step."""


async def all_step(mine: Standing, highest: Callable[[Standing], Awaitable[int]]) -> bool:
    """Return True if the expert-parallel group runs a step now; all of its ranks must call this before each step.

    If this rank has stopped, wait until all other ranks have stopped, too.

    Args:
        mine: State of this rank.
        highest: Collective function that takes this rank's state and returns the maximum over the group.
    """
    found = await highest(mine)
    while mine is Standing.STOPPED and found > Standing.STOPPED:
        await asyncio.sleep(_ROUND_S)
        found = await highest(mine)
    return found == Standing.WORKING
