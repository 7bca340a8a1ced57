"""Plan which rows get a block, pause or are evicted when a step's rows need more KV blocks than there are."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import CacheCapacityError


@dataclass(frozen=True, slots=True)
class RowDemand:
    """What one row holds and needs for the next step.

    Args:
        age: order of admission; smaller is older and goes first, ties broken by `row`.
        needs_block: the row cannot continue without one more block; true of every paused row.
        blocks: blocks held; one that several rows hold is available once the last of them has left.
        prefilling: the row holds all its blocks already, and is never paused.
    """

    row: int
    age: int
    needs_block: bool
    blocks: tuple[int, ...]
    paused: bool
    prefilling: bool

    def __post_init__(self) -> None:
        if self.paused and not self.needs_block:
            raise ValueError(f"row {self.row}: a paused row needs a block, got needs_block=False")
        if self.prefilling and self.needs_block:
            raise ValueError(f"row {self.row}: a prefilling row holds its blocks, got needs_block=True")


@dataclass(frozen=True, slots=True)
class PreemptionPlan:
    """What happens to the rows that need a block; every other row continues.

    Args:
        grants: rows that get one new block, oldest first; a paused row among them resumes.
        paused: rows that are paused from now on, oldest first.
        evicted: rows that leave, in the order they leave: youngest first.
    """

    grants: tuple[int, ...]
    paused: tuple[int, ...]
    evicted: tuple[int, ...]


def plan_preemption(rows: Sequence[RowDemand], num_available: int, paused_capacity: int) -> PreemptionPlan:
    """Give the remaining blocks to the oldest rows, pause the others, and evict the youngest that may not stay.

    A paused row may not stay while the paused rows together hold more than `paused_capacity` blocks, or while no
    row would be active.

    Args:
        num_available: blocks available now, evictable cached ones included.

    Raises:
        ValueError: If a row occurs twice or a number of blocks is negative.
        CacheCapacityError: If a single row remains and there is no block for it.
    """
    _check_rows(rows, num_available, paused_capacity)
    waiting = sorted((row for row in rows if row.needs_block), key=_seniority)
    has_active = len(waiting) < len(rows)
    holders = Counter(block for row in rows for block in row.blocks)
    grants: list[RowDemand] = []
    evicted: list[RowDemand] = []
    while True:
        grants += waiting[:num_available]
        num_available, waiting = max(num_available - len(waiting), 0), waiting[num_available:]
        has_active = has_active or bool(grants)
        if not waiting or (has_active and len({block for row in waiting for block in row.blocks}) <= paused_capacity):
            return PreemptionPlan(_numbers(grants), _numbers(waiting), _numbers(evicted))
        if len(waiting) == 1 and not has_active:
            if evicted:  # what they hold beside blocks may make room
                return PreemptionPlan((), _numbers(waiting), _numbers(evicted))
            raise _no_room(waiting[0])
        leaving = waiting.pop()
        evicted.append(leaving)
        num_available += sum(holders[block] == 1 for block in leaving.blocks)
        holders.subtract(leaving.blocks)


def _check_rows(rows: Sequence[RowDemand], num_available: int, paused_capacity: int) -> None:
    if num_available < 0 or paused_capacity < 0:
        raise ValueError(
            f"num_available and paused_capacity must not be negative, got {num_available} and {paused_capacity}"
        )
    if len({row.row for row in rows}) != len(rows):
        raise ValueError(f"each row may occur once, got {[row.row for row in rows]}")


def _seniority(row: RowDemand) -> tuple[int, int]:
    return row.age, row.row


def _numbers(rows: Sequence[RowDemand]) -> tuple[int, ...]:
    return tuple(row.row for row in rows)


def _no_room(row: RowDemand) -> CacheCapacityError:
    return CacheCapacityError(
        f"row {row.row}, the only one, holds {len(row.blocks)} KV blocks and needs 1 more, 0 available; "
        "raise --cache-gb, or --inference-dynamic-batching-buffer-size-gb where that is given"
    )
