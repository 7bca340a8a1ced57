"""Properties of preemption plans."""

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_mamba_cache.errors import CacheCapacityError
from megatron_mamba_cache.policy.block_growth import PreemptionPlan, RequestDemand, plan_preemption

SHARED = (90, 91)  # blocks of a prefix that several requests hold


def own(request: int, num_blocks: int) -> tuple[int, ...]:
    """Return the ids of blocks that only this request holds."""
    return tuple(range(100 * (request + 1), 100 * (request + 1) + num_blocks))


def demand(request: int, *, num_own: int = 2, shared: tuple[int, ...] = (), paused: bool = False) -> RequestDemand:
    """Return the demand of a request that needs a block; its age is its number."""
    return RequestDemand(request, request, True, (*shared, *own(request, num_own)), paused, False)


def content(request: int, *, shared: tuple[int, ...] = (), prefilling: bool = False) -> RequestDemand:
    """Return the demand of a request that needs no block."""
    return RequestDemand(request, request, False, (*shared, *own(request, 2)), False, prefilling)


@st.composite
def request_demands(draw: st.DrawFn) -> list[RequestDemand]:
    """Return the demands of requests that share blocks through common prefixes or in other ways."""
    numbers = draw(st.permutations(range(draw(st.integers(0, 7)))))
    requests = []
    for number in numbers:
        state = draw(st.sampled_from(["decoding", "needy", "paused", "prefilling"]))
        shared = draw(st.lists(st.integers(0, 7), unique=True, max_size=4))
        blocks = (*shared, *own(number, draw(st.integers(0, 3))))
        age = draw(st.integers(0, 4))
        needs_block = state in ("needy", "paused")
        requests.append(RequestDemand(number, age, needs_block, blocks, state == "paused", state == "prefilling"))
    return requests


def num_freed(requests: list[RequestDemand], evicted: tuple[int, ...]) -> int:
    """Return the number of blocks held only by evicted requests."""
    kept = {block for request in requests if request.index not in evicted for block in request.blocks}
    return len(distinct_blocks(requests, evicted) - kept)


def distinct_blocks(requests: list[RequestDemand], numbers: Sequence[int]) -> set[int]:
    return {block for request in requests if request.index in numbers for block in request.blocks}


def by_seniority(requests: list[RequestDemand]) -> list[int]:
    return [request.index for request in sorted(requests, key=lambda request: (request.age, request.index))]


def plan_or_skip(requests: list[RequestDemand], num_available: int, paused_capacity: int) -> PreemptionPlan:
    try:
        return plan_preemption(requests, num_available, paused_capacity)
    except CacheCapacityError:
        assume(False)
        raise


ANY_CASE = given(request_demands(), st.integers(0, 5), st.integers(0, 12))


def test_preemption_plan_is_empty_when_no_request_needs_a_block() -> None:
    assert plan_preemption([content(0), content(1, prefilling=True)], 0, 0) == PreemptionPlan((), (), ())


def test_oldest_requests_get_the_last_free_blocks() -> None:
    requests = [demand(3), demand(1), demand(2)]
    assert plan_preemption(requests, 2, 10) == PreemptionPlan((1, 2), (3,), ())


def test_older_paused_request_resumes_before_a_younger_request_continues() -> None:
    assert plan_preemption([demand(2), demand(1, paused=True)], 1, 10) == PreemptionPlan((1,), (2,), ())


def test_requests_of_equal_age_are_ordered_by_index() -> None:
    requests = [RequestDemand(number, 0, True, own(number, 1), False, False) for number in (2, 0, 1)]
    assert plan_preemption(requests, 1, 10) == PreemptionPlan((0,), (1, 2), ())


def test_youngest_request_is_evicted_if_no_request_could_run() -> None:
    assert plan_preemption([demand(0), demand(1), demand(2)], 0, 100) == PreemptionPlan((0, 1), (), (2,))


def test_blocks_held_by_another_request_are_not_freed() -> None:
    requests = [demand(0, num_own=1), demand(1, num_own=1), demand(2, num_own=0, shared=own(0, 1))]
    assert plan_preemption(requests, 0, 100) == PreemptionPlan((0,), (), (2, 1))


def test_blocks_shared_only_by_evicted_requests_are_freed() -> None:
    requests = [demand(0), demand(1, num_own=0, shared=SHARED), demand(2, num_own=0, shared=SHARED)]
    assert plan_preemption(requests, 0, 100) == PreemptionPlan((0,), (), (2, 1))
    paused = [content(0), demand(1), demand(2, num_own=0, shared=SHARED), demand(3, num_own=0, shared=SHARED)]
    assert plan_preemption(paused, 0, 0) == PreemptionPlan((1,), (), (3, 2))


def test_evicting_a_request_does_not_free_blocks_it_shares() -> None:
    requests = [content(0, shared=SHARED), demand(1, num_own=0, shared=SHARED)]
    assert plan_preemption(requests, 0, 0) == PreemptionPlan((), (), (1,))


def test_youngest_request_is_evicted_if_paused_requests_hold_too_many_blocks() -> None:
    requests = [
        content(0, shared=SHARED),
        demand(1, num_own=0, shared=SHARED),
        demand(2, num_own=0, shared=(*SHARED, 92)),
    ]
    requests.append(content(3, shared=(92,)))
    assert plan_preemption(requests, 0, 2) == PreemptionPlan((), (1,), (2,))


def test_block_shared_by_paused_requests_is_counted_once() -> None:
    requests = [content(0, shared=SHARED), *(demand(request, num_own=0, shared=SHARED) for request in (1, 2, 3))]
    assert plan_preemption(requests, 0, 2) == PreemptionPlan((), (1, 2, 3), ())


def test_prefilling_request_counts_as_running() -> None:
    assert plan_preemption([content(0, prefilling=True), demand(1)], 0, 10) == PreemptionPlan((), (1,), ())


def test_error_for_a_lone_request_without_a_block_names_the_setting() -> None:
    with pytest.raises(CacheCapacityError, match="--inference-dynamic-batching-buffer-size-gb"):
        plan_preemption([demand(0)], 0, 100)


def test_lone_request_that_can_get_a_block_continues() -> None:
    assert plan_preemption([demand(0, num_own=9)], 1, 0) == PreemptionPlan((0,), (), ())


@ANY_CASE
def test_each_request_that_needs_a_block_gets_exactly_one_outcome(
    requests: list[RequestDemand], num_available: int, capacity: int
) -> None:
    plan = plan_or_skip(requests, num_available, capacity)
    needy = [request.index for request in requests if request.needs_block]
    assert sorted(plan.grants + plan.paused + plan.evicted) == sorted(needy)


@ANY_CASE
def test_granted_blocks_never_exceed_the_available_blocks(
    requests: list[RequestDemand], num_available: int, capacity: int
) -> None:
    plan = plan_or_skip(requests, num_available, capacity)
    assert len(plan.grants) <= num_available + num_freed(requests, plan.evicted)


@ANY_CASE
def test_no_free_block_remains_while_a_request_is_paused(
    requests: list[RequestDemand], num_available: int, capacity: int
) -> None:
    plan = plan_or_skip(requests, num_available, capacity)
    assert not plan.paused or len(plan.grants) == num_available + num_freed(requests, plan.evicted)


@ANY_CASE
def test_granted_paused_and_evicted_requests_are_ordered_by_age(
    requests: list[RequestDemand], num_available: int, capacity: int
) -> None:
    plan = plan_or_skip(requests, num_available, capacity)
    order = [*plan.grants, *plan.paused, *reversed(plan.evicted)]
    assert order == by_seniority([request for request in requests if request.needs_block])


@ANY_CASE
def test_oldest_request_that_needs_a_block_is_evicted_last(
    requests: list[RequestDemand], num_available: int, capacity: int
) -> None:
    plan = plan_or_skip(requests, num_available, capacity)
    oldest = by_seniority([request for request in requests if request.needs_block])[:1]
    if set(oldest) & set(plan.evicted):
        assert not plan.grants and not plan.paused
        assert any(not request.needs_block for request in requests)


@ANY_CASE
def test_preemption_leaves_at_least_one_request_running(
    requests: list[RequestDemand], num_available: int, capacity: int
) -> None:
    plan = plan_or_skip(requests, num_available, capacity)
    assert not requests or plan.grants or any(not request.needs_block for request in requests)


@ANY_CASE
def test_paused_requests_hold_no_more_blocks_than_allowed(
    requests: list[RequestDemand], num_available: int, capacity: int
) -> None:
    plan = plan_or_skip(requests, num_available, capacity)
    assert len(distinct_blocks(requests, plan.paused)) <= capacity


@ANY_CASE
def test_no_request_is_evicted_unnecessarily(requests: list[RequestDemand], num_available: int, capacity: int) -> None:
    plan = plan_or_skip(requests, num_available, capacity)
    waiting = by_seniority([request for request in requests if request.needs_block])[num_available:]
    has_active = len(waiting) < len(requests)
    fits = len(distinct_blocks(requests, waiting)) <= capacity
    assert bool(plan.evicted) == (bool(waiting) and not (has_active and fits))


@ANY_CASE
def test_capacity_error_is_raised_only_if_no_eviction_could_help(
    requests: list[RequestDemand], num_available: int, capacity: int
) -> None:
    try:
        plan_preemption(requests, num_available, capacity)
    except CacheCapacityError:
        assert num_available == 0 and all(request.needs_block for request in requests)
        assert num_freed(requests, tuple(by_seniority(requests)[1:])) == 0


@ANY_CASE
def test_preemption_plan_does_not_depend_on_the_order_of_requests(
    requests: list[RequestDemand], num_available: int, capacity: int
) -> None:
    plan = plan_or_skip(requests, num_available, capacity)
    assert plan_preemption(requests[::-1], num_available, capacity) == plan


@pytest.mark.parametrize(("needs_block", "paused", "prefilling"), [(False, True, False), (True, False, True)])
def test_paused_request_that_needs_no_block_or_prefills_is_refused(
    needs_block: bool, paused: bool, prefilling: bool
) -> None:
    with pytest.raises(ValueError, match="request 0"):
        RequestDemand(0, 0, needs_block, (1, 2), paused, prefilling)


@pytest.mark.parametrize(
    ("requests", "num_available", "capacity"), [([], -1, 0), ([], 0, -1), ([content(0), content(0)], 1, 1)]
)
def test_preemption_plan_refuses_invalid_arguments(
    requests: list[RequestDemand], num_available: int, capacity: int
) -> None:
    with pytest.raises(ValueError, match=r"must|once"):
        plan_preemption(requests, num_available, capacity)
