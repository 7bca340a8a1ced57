"""Give decoding requests the block that their next token needs; when there are too few, pause and evict."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import CacheCapacityError
from .prefix_cache import PrefixCache
from .requests import RunningRequest


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


@dataclass(frozen=True, slots=True)
class GrowthOutcome:
    """Requests held back: `paused` ones newly wait for a block, `evicted` ones were released, youngest first."""

    paused: tuple[RunningRequest, ...] = ()
    evicted: tuple[RunningRequest, ...] = ()


def grow_rows(
    rows: Sequence[RunningRequest],
    cache: PrefixCache,
    paused_capacity: int,
    release: Callable[[RunningRequest], object] | None = None,
) -> GrowthOutcome:
    """Grow, pause, resume and evict requests after a step.

    Args:
        rows: All admitted requests that have not finished.
        paused_capacity: Blocks that paused requests may keep.
        release: Takes back all that an evicted request holds; None is `cache.release`.

    Raises:
        CacheCapacityError: If a single request cannot continue even with the whole pool.
    """
    needing = [row for row in rows if _needs_block(row, cache.block_size)]
    if len(needing) <= cache.kv.num_available:
        for row in needing:
            cache.grow(row)
        return GrowthOutcome()
    if not cache.kv.num_available and len(needing) < len(rows) and _may_stay_paused(needing, paused_capacity):
        return GrowthOutcome()
    left, evicted = list(rows), []
    # Rows leave one by one: where memory is shared, the states of one that leaves may make room for blocks too.
    while (plan := _plan(left, cache, paused_capacity)).evicted:
        leaving = left.pop(plan.evicted[0])
        evicted.append(leaving)
        (release or cache.release)(leaving)
    for index in plan.grants:
        cache.grow(left[index])
    paused = tuple(left[index] for index in plan.paused if not left[index].is_paused)
    for row in paused:
        row.pause()
    return GrowthOutcome(paused, tuple(evicted))


def resume_rows(rows: Sequence[RunningRequest], cache: PrefixCache) -> None:
    """Give paused requests, in order, the block each waits for, while blocks last; for use after others left.

    When only paused requests are left, at least one resumes: together they may hold less than the pool.
    """
    for row in rows:
        if row.is_paused and cache.kv.num_available:
            cache.grow(row)


def _plan(rows: Sequence[RunningRequest], cache: PrefixCache, paused_capacity: int) -> PreemptionPlan:
    demands = [
        RowDemand(
            row=index,
            age=row.age,
            needs_block=_needs_block(row, cache.block_size),
            blocks=tuple(row.block_ids),
            paused=row.is_paused,
            prefilling=row.is_prefilling,
        )
        for index, row in enumerate(rows)
    ]
    return plan_preemption(demands, cache.kv.num_available, paused_capacity)


def _needs_block(row: RunningRequest, block_size: int) -> bool:
    return not row.is_prefilling and row.computed == len(row.block_ids) * block_size


def _may_stay_paused(rows: Sequence[RunningRequest], capacity: int) -> bool:
    """Return whether all rows are already paused and together hold at most `capacity` blocks."""
    return all(row.is_paused for row in rows) and len({block for row in rows for block in row.block_ids}) <= capacity
