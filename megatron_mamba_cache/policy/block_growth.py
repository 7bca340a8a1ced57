"""Give decoding requests the block that their next token needs; when there are too few, pause and evict."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .preemption import PreemptionPlan, RowDemand, plan_preemption
from .prefix_cache import PrefixCache
from .requests import RunningRequest


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
