"""Running requests: their number, their token budget, and what remains after a failed release."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megatron_mamba_cache.policy.admission import Refusal
from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.policy.running_requests import RequestCounts, RunningRequests
from tests.policy.small_cache import ENOUGH, candidate_of, new_spec, run_step, small_cache

MAX_REQUESTS = 3
MAX_TOKENS = 10
MAX_MIXED = 6
MAX_LEN = 20
NUM_BLOCKS = 7  # too few for three of the longest requests


class RunningRequestsMachine(RuleBasedStateMachine):
    """Requests arrive, compute, pause and leave, with a small cache."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = RunningRequests(small_cache(NUM_BLOCKS), MAX_REQUESTS, MAX_TOKENS, MAX_MIXED)
        self.num_seen = 0

    @rule(prompt=st.lists(st.sampled_from([1, 1, 2]), min_size=1, max_size=MAX_LEN - 1))
    def admit(self, prompt: list[int]) -> None:
        before, budget = list(self.requests), self.requests.prompt_budget
        self.num_seen += 1
        candidate = candidate_of(self.requests.cache, new_spec(self.num_seen, prompt, max_len=MAX_LEN))
        outcome = self.requests.admit(candidate, budget)
        assert (outcome is Refusal.TOO_MANY_REQUESTS) == (len(before) == MAX_REQUESTS)
        if isinstance(outcome, Refusal):
            assert list(self.requests) == before
        else:
            assert list(self.requests) == [*before, outcome]
            assert self.requests.prompt_budget == budget - outcome.scheduled

    @rule(grows=st.booleans())
    def step(self, grows: bool) -> None:
        """Run a step as an engine does: continue prompts, decode, drop requests that end, and grow the others."""
        for request in self.requests.prefilling:
            if not request.scheduled and self.requests.prompt_budget > 0:
                self.requests.cache.continue_prefill(request, self.requests.prompt_budget)
        for request in self.requests.decoding:
            self.requests.cache.schedule_decode(request)
        run_step(self.requests.cache, [request for request in self.requests if request.scheduled])
        self.requests.drop([request for request in self.requests if request.length >= MAX_LEN])
        before = list(self.requests)
        held_back = self.requests.grow(paused_capacity=2)
        assert list(self.requests) == [request for request in before if request not in held_back.evicted]
        assert all(request.is_paused for request in held_back.paused)

    @precondition(lambda self: len(self.requests))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        leaving = data.draw(st.lists(st.sampled_from(list(self.requests)), unique_by=id))
        staying = [request for request in self.requests if request not in leaving]
        self.requests.drop(leaving)
        assert list(self.requests) == staying
        self.requests.resume()

    @invariant()
    def counts_are_those_of_the_requests(self) -> None:
        prefilling = [request for request in self.requests if request.is_prefilling and request.scheduled]
        decoding = [request for request in self.requests if not request.is_prefilling and not request.is_paused]
        num_tokens = sum(request.scheduled for request in prefilling) + len(decoding)
        counts = self.requests.counts
        assert counts.requests == len(self.requests) == len(self.requests.oldest_first) <= MAX_REQUESTS
        assert counts.prefilling == len(prefilling) and counts.tokens == num_tokens
        assert counts.paused == counts.requests - len(prefilling) - len(decoding)
        assert self.requests.budget == MAX_TOKENS - num_tokens >= 0
        kept = MAX_MIXED - (num_tokens - len(decoding)) if decoding else MAX_TOKENS
        assert self.requests.prompt_budget == min(self.requests.budget, kept)
        assert self.requests.decoding == decoding
        assert self.requests.any_paused == any(request.is_paused for request in self.requests)

    @invariant()
    def requests_and_pools_agree(self) -> None:
        self.requests.check_integrity()


TestRunningRequests = RunningRequestsMachine.TestCase
TestRunningRequests.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def running(num_requests: int) -> RunningRequests:
    """Return requests of four prompt tokens each, admitted but not computed."""
    requests = RunningRequests(small_cache(), max_requests=num_requests, max_tokens=ENOUGH)
    for request_id in range(num_requests):
        admitted(requests, request_id)
    return requests


def admitted(requests: RunningRequests, request_id: int) -> RunningRequest | Refusal:
    return requests.admit(candidate_of(requests.cache, new_spec(request_id, [request_id] * 4)), requests.budget)


def test_prompt_token_limit_applies_only_to_steps_that_also_decode() -> None:
    requests = RunningRequests(small_cache(64), max_requests=3, max_tokens=ENOUGH, max_mixed_prompt_tokens=8)
    first = requests.admit(candidate_of(requests.cache, new_spec(0, [1] * 20)), requests.prompt_budget)
    assert isinstance(first, RunningRequest) and first.scheduled == 20  # no request decodes yet
    run_step(requests.cache, [first])
    assert requests.prompt_budget == 8 < requests.budget
    second = requests.admit(candidate_of(requests.cache, new_spec(1, [2] * 20)), requests.prompt_budget)
    assert isinstance(second, RunningRequest) and second.scheduled == 8
    assert requests.prompt_budget == 0 < requests.budget


def test_admission_stops_at_max_requests_until_a_request_leaves() -> None:
    requests = running(2)
    assert admitted(requests, 2) is Refusal.TOO_MANY_REQUESTS
    assert requests.counts == RequestCounts(requests=2, paused=0, prefilling=2, tokens=8)
    requests.drop([requests.oldest_first[0]])
    assert isinstance(admitted(requests, 2), RunningRequest)
    assert [request.request_id for request in requests] == [1, 2]


def test_only_requests_waiting_for_a_shared_prefix_count_as_deferred() -> None:
    requests = RunningRequests(small_cache(), max_requests=8, max_tokens=ENOUGH)
    counters, prompt = requests.cache.counters, [1] * 9
    assert isinstance(requests.admit(candidate_of(requests.cache, new_spec(0, prompt)), ENOUGH), RunningRequest)
    assert requests.admit(candidate_of(requests.cache, new_spec(1, [2])), 0) is Refusal.NO_TOKENS
    assert counters.admissions_deferred == 0
    assert requests.admit(candidate_of(requests.cache, new_spec(2, prompt)), ENOUGH) is Refusal.WAITS_FOR_PREFIX
    assert counters.admissions_deferred == 1 and len(requests) == 1


def test_failed_release_keeps_that_request_and_the_following_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = running(4)
    first, second, third, fourth = requests
    release = requests.cache.release

    def fail_on_second(request: RunningRequest) -> None:
        if request is second:
            raise RuntimeError("release")
        release(request)

    with monkeypatch.context() as patch:
        patch.setattr(requests.cache, "release", fail_on_second)
        with pytest.raises(RuntimeError, match="release"):
            requests.drop([first, second, third])
    assert list(requests) == [second, third, fourth] and not first.block_ids
    assert requests.counts == RequestCounts(requests=3, paused=0, prefilling=3, tokens=12)
    requests.check_integrity()
    requests.drop([second, third, fourth])
    assert not len(requests) and requests.counts == RequestCounts()
    requests.check_integrity()
