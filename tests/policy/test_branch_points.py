"""Positions at which waiting requests diverge, and the tokens that requests with a common prefix compute."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.policy.admission import (
    BRANCH_WINDOW,
    MOST_BRANCH_POINTS,
    PromptView,
    branch_points,
    num_common,
)
from megatron_mamba_cache.policy.block_hashing import KeyChain, block_keys
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from megatron_mamba_cache.policy.request_settings import RequestSpec
from megatron_mamba_cache.policy.requests import Candidate
from megatron_mamba_cache.policy.running_requests import RunningRequests
from megatron_mamba_cache.policy.scheduler import StepScheduler
from tests.policy.small_cache import BLOCK, ENOUGH, new_spec, run_step, small_cache

ROOT = bytes(32)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def view_of(prompt: list[int], *, may_skip: bool = True) -> PromptView:
    return PromptView(block_keys(ROOT, prompt, 2), len(prompt), may_skip)


@given(prompts, prompts)
def test_two_prompts_share_the_blocks_of_their_common_prefix(left: list[int], right: list[int]) -> None:
    shared = 0
    while left[shared : shared + 1] == right[shared : shared + 1] != []:
        shared += 1
    assert num_common(view_of(left).keys, view_of(right).keys) == shared // 2


@given(prompts, st.lists(prompts, max_size=12))
def test_branch_points_are_the_last_block_ends_shared_with_other_prompts(
    prompt: list[int], others: list[list[int]]
) -> None:
    deepest: Counter[int] = Counter()
    for other in others:
        usable = [p for p in range(2, len(other), 2) if p <= len(prompt) and other[:p] == prompt[:p]]
        deepest.update(usable[-1:])
    found = branch_points(view_of(prompt), map(view_of, others), 2)
    assert list(found) == sorted(set(found)) and set(found) <= set(deepest)
    assert len(found) == min(len(deepest), MOST_BRANCH_POINTS)
    assert all(deepest[left_out] <= deepest[taken] for left_out in set(deepest) - set(found) for taken in found)


def test_request_that_must_recompute_its_prompt_adds_no_branch_point() -> None:
    assert branch_points(view_of([1] * 8), [view_of([1] * 6, may_skip=False)], 2) == ()


@dataclass
class Queue:
    """Requests that a scheduler admits to a cache; counts the prompt tokens that each step computes."""

    cache: PrefixCache
    waiting: list[RequestSpec]
    max_tokens: int = ENOUGH

    def __post_init__(self) -> None:
        self.requests = RunningRequests(self.cache, 64, self.max_tokens)
        self._candidates: dict[int, Candidate] = {}
        self._scheduler = StepScheduler()

    def candidate(self, request_id: int) -> Candidate:
        if request_id not in self._candidates:
            spec = next(spec for spec in self.waiting if spec.request_id == request_id)
            self._candidates[request_id] = Candidate(spec)
        return self._candidates[request_id]

    def step(self) -> int:
        """Run a step and release prefilled requests; return the number of computed prompt tokens."""
        filled = self._scheduler.fill_step(self.requests, [self.candidate(spec.request_id) for spec in self.waiting])
        admitted = {request.request_id for request in filled.admitted}
        self.waiting = [spec for spec in self.waiting if spec.request_id not in admitted]
        computed = sum(request.scheduled for request in self.requests)
        run_step(self.cache, list(self.requests))
        self.requests.check_integrity()
        self.requests.drop([request for request in self.requests if not request.is_prefilling])
        return computed

    def steps(self) -> list[int]:
        """Run all requests; return the number of prompt tokens of each step."""
        found = []
        while self.waiting or self.requests:
            found.append(self.step())
        return found


def burst(count: int, shared: int, own: int) -> list[RequestSpec]:
    """Return requests with a common prefix of `shared` tokens."""
    beginning = [1000 + index for index in range(shared)]
    return [new_spec(index, beginning + [100 * (index + 1) + nth for nth in range(own)]) for index in range(count)]


@pytest.mark.parametrize("num_slots", [12, 40])
def test_simultaneous_requests_compute_their_common_prefix_once(num_slots: int) -> None:
    queue = Queue(small_cache(100, num_slots), burst(8, 3 * BLOCK, BLOCK + 1))
    first, *others = queue.steps()
    assert (first, sum(others)) == (4 * BLOCK + 1, 7 * (BLOCK + 1))
    assert len(others) == 1 or num_slots < 40


def test_shared_prefix_longer_than_a_step_is_computed_once() -> None:
    queue = Queue(small_cache(100, 40), burst(4, 3 * BLOCK, BLOCK + 1), max_tokens=2 * BLOCK)
    steps = queue.steps()
    assert sum(steps) == 3 * BLOCK + 4 * (BLOCK + 1)
    assert steps[0] == 2 * BLOCK


def test_prompts_that_diverge_at_two_points_resume_from_both() -> None:
    a, b = [1] * BLOCK, [2] * BLOCK
    specs = [
        new_spec(0, a + b + [3] * 5),
        new_spec(1, a + [4] * 5),
        new_spec(2, a + b + [5] * 5),
        new_spec(3, a + [6] * 5),
    ]
    assert Queue(small_cache(100, 40), specs).steps() == [2 * BLOCK + 5, 5 + 5 + 5]


def test_simultaneous_requests_of_different_tenants_share_nothing() -> None:
    beginning = [7] * (2 * BLOCK)
    specs = [new_spec(index, [*beginning, index], tenant=str(index)) for index in range(3)]
    assert Queue(small_cache(100, 40), specs).steps() == [3 * (2 * BLOCK + 1)]


def test_no_request_waits_for_a_prefix_whose_state_cannot_be_cached() -> None:
    queue = Queue(small_cache(100, 1), burst(3, 2 * BLOCK, 1))
    assert queue.steps() == [2 * BLOCK + 1] * 3
    assert queue.cache.counters.states_skipped_no_room and not queue.cache.counters.admissions_deferred


class UnreadablePrompt(Candidate):
    """Prompt whose block keys cannot be computed."""

    def begin_epoch(self, chain: KeyChain, epoch: int) -> None:
        raise MemoryError


def test_error_while_hashing_a_prompt_is_attributed_only_to_its_request() -> None:
    queue = Queue(small_cache(100, 40), burst(3, 2 * BLOCK, 1))
    scheduler = StepScheduler()
    with pytest.raises(MemoryError):
        scheduler.fill_step(
            queue.requests, [queue.candidate(0), queue.candidate(1), UnreadablePrompt(queue.waiting[2])]
        )
    assert scheduler.take_in_hand() == 2
    assert not queue.requests


def test_shared_prefixes_are_searched_in_a_limited_number_of_queued_requests() -> None:
    queue = Queue(small_cache(1000, 400), burst(BRANCH_WINDOW + 10, 0, BLOCK + 1))
    waiting = [queue.candidate(spec.request_id) for spec in queue.waiting]
    queue.requests = RunningRequests(queue.cache, 1, ENOUGH)
    StepScheduler().fill_step(queue.requests, waiting)
    seen = [candidate.request_id for candidate in waiting if candidate.chain.keys]
    assert max(seen) == BRANCH_WINDOW
