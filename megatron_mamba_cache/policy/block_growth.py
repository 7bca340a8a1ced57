"""Give decoding requests the KV block for their next token; pause or evict requests when there are too few blocks."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ..errors import CacheCapacityError
from .prefix_cache import PrefixCache
from .requests import RunningRequest


@dataclass(frozen=True, slots=True)
class RequestDemand:
    """KV blocks that one request holds, and its need for another block in the next step.

    Args:
        age: Sequence number of the admission; the smallest is served first, and ties are broken by `index`.
        needs_block: True if the request cannot continue without one more block; always True for paused requests.
        blocks: Blocks that the request holds. A shared block becomes available when its last holder leaves.
        prefilling: True during prefill. The request then holds all blocks of its prompt and is never paused.
    """

    index: int
    age: int
    needs_block: bool
    blocks: tuple[int, ...]
    paused: bool
    prefilling: bool

    def __post_init__(self) -> None:
        if self.paused and not self.needs_block:
            raise ValueError(f"request {self.index}: needs_block must be True for a paused request")
        if self.prefilling and self.needs_block:
            raise ValueError(f"request {self.index}: needs_block must be False for a prefilling request")


@dataclass(frozen=True, slots=True)
class PreemptionPlan:
    """Plan for requests that need a block: each gets one, is paused or is evicted. All other requests continue.

    Args:
        grants: Requests that get one new block, oldest first. A paused request that gets a block resumes.
        paused: Requests that become paused, oldest first.
        evicted: Requests to evict, youngest first.
    """

    grants: tuple[int, ...]
    paused: tuple[int, ...]
    evicted: tuple[int, ...]


def plan_preemption(requests: Sequence[RequestDemand], num_available: int, paused_capacity: int) -> PreemptionPlan:
    """Give the available blocks to the oldest requests, pause the rest, and evict the youngest if too many are paused.

    Requests are evicted, youngest first, while paused requests hold more than `paused_capacity` blocks in total, or
    while all remaining requests would be paused.

    Args:
        num_available: Number of blocks available now, including evictable cached blocks.

    Raises:
        ValueError: If a request occurs twice or a number of blocks is negative.
        CacheCapacityError: If there is only one request and no block is available for it.
    """
    _check_demands(requests, num_available, paused_capacity)
    waiting = sorted((request for request in requests if request.needs_block), key=attrgetter("age", "index"))
    has_active = len(waiting) < len(requests)
    holders = Counter(block for request in requests for block in request.blocks)
    grants: list[RequestDemand] = []
    evicted: list[RequestDemand] = []
    while True:
        grants += waiting[:num_available]
        num_available, waiting = max(num_available - len(waiting), 0), waiting[num_available:]
        has_active = has_active or bool(grants)
        if not waiting or (
            has_active and len({block for request in waiting for block in request.blocks}) <= paused_capacity
        ):
            return PreemptionPlan(_numbers(grants), _numbers(waiting), _numbers(evicted))
        if len(waiting) == 1 and not has_active:
            if evicted:  # the states of the evicted requests may free memory for blocks
                return PreemptionPlan((), _numbers(waiting), _numbers(evicted))
            raise _no_room(waiting[0])
        leaving = waiting.pop()
        evicted.append(leaving)
        num_available += sum(holders[block] == 1 for block in leaving.blocks)
        holders.subtract(leaving.blocks)


def _check_demands(requests: Sequence[RequestDemand], num_available: int, paused_capacity: int) -> None:
    if num_available < 0 or paused_capacity < 0:
        raise ValueError(
            f"num_available and paused_capacity must not be negative, found {num_available} and {paused_capacity}"
        )
    if len({request.index for request in requests}) != len(requests):
        raise ValueError(f"each request may occur only once, found {[request.index for request in requests]}")


def _numbers(requests: Sequence[RequestDemand]) -> tuple[int, ...]:
    return tuple(request.index for request in requests)


def _no_room(request: RequestDemand) -> CacheCapacityError:
    return CacheCapacityError(
        f"request {request.index} is alone, holds {len(request.blocks)} KV blocks and needs 1 more, but none is "
        "available; raise --cache-gb, or --inference-dynamic-batching-buffer-size-gb if that is set"
    )


@dataclass(frozen=True, slots=True)
class GrowthOutcome:
    """Requests that `grow_requests` has paused, oldest first, and requests that it has evicted, youngest first."""

    paused: tuple[RunningRequest, ...] = ()
    evicted: tuple[RunningRequest, ...] = ()


def grow_requests(
    requests: Sequence[RunningRequest],
    cache: PrefixCache,
    paused_capacity: int,
    release: Callable[[RunningRequest], object] | None = None,
) -> GrowthOutcome:
    """Allocate the KV blocks that requests need for their next token; pause or evict requests if there are too few.

    Args:
        requests: All admitted requests that have not finished.
        paused_capacity: Maximum number of blocks that paused requests may keep.
        release: Function that releases everything an evicted request holds; None uses `cache.release`.

    Raises:
        CacheCapacityError: If only one request is left and the whole pool has too few blocks for it.
    """
    needing = [request for request in requests if _needs_block(request, cache.block_size)]
    if len(needing) <= cache.kv.num_available:
        for request in needing:
            cache.grow(request)
        return GrowthOutcome()
    if not cache.kv.num_available and len(needing) < len(requests) and _may_stay_paused(needing, paused_capacity):
        return GrowthOutcome()
    left, evicted = list(requests), []
    # Evict one request at a time: if states and blocks share memory, its freed states may make room for blocks.
    while (plan := _plan(left, cache, paused_capacity)).evicted:
        leaving = left.pop(plan.evicted[0])
        evicted.append(leaving)
        (release or cache.release)(leaving)
    for index in plan.grants:
        cache.grow(left[index])
    paused = tuple(left[index] for index in plan.paused if not left[index].is_paused)
    for request in paused:
        request.pause()
    return GrowthOutcome(paused, tuple(evicted))


def resume_requests(requests: Sequence[RunningRequest], cache: PrefixCache) -> None:
    """Give each paused request the block that it needs, in order, until no block is available."""
    for request in requests:
        if request.is_paused and cache.kv.num_available:
            cache.grow(request)


def _plan(requests: Sequence[RunningRequest], cache: PrefixCache, paused_capacity: int) -> PreemptionPlan:
    demands = [
        RequestDemand(
            index=index,
            age=request.age,
            needs_block=_needs_block(request, cache.block_size),
            blocks=tuple(request.block_ids),
            paused=request.is_paused,
            prefilling=request.is_prefilling,
        )
        for index, request in enumerate(requests)
    ]
    return plan_preemption(demands, cache.kv.num_available, paused_capacity)


def _needs_block(request: RunningRequest, block_size: int) -> bool:
    return not request.is_prefilling and request.computed == len(request.block_ids) * block_size


def _may_stay_paused(requests: Sequence[RunningRequest], capacity: int) -> bool:
    """Return whether all the requests are paused already and hold at most `capacity` blocks in total."""
    return (
        all(request.is_paused for request in requests)
        and len({block for request in requests for block in request.block_ids}) <= capacity
    )
