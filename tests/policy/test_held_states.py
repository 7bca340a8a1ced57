"""States with raised priority until a time: repeated holds, evictions and cache breakpoints."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.policy.eviction_rules import HeldStates
from megatron_mamba_cache.policy.identifiers import BlockId
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from megatron_mamba_cache.policy.request_settings import PromptBreakpoint, RequestSpec, SamplingSettings
from megatron_mamba_cache.policy.requests import RunningRequest
from tests.policy.small_cache import BLOCK, admit, candidate_of, planned, small_cache

BLOCKS = [BlockId(number) for number in range(4)]
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["hold", "hold", "hold", "release", "time", "time", "clear"]),
        st.sampled_from(BLOCKS),
        st.integers(0, 60),
    ),
    max_size=60,
)


@given(CALLS)
def test_cached_state_is_held_until_the_latest_requested_time(calls: list[tuple[str, BlockId, int]]) -> None:
    held, until, now = HeldStates(), dict[BlockId, int](), 0
    for verb, block, number in calls:
        if verb == "hold":
            is_new = held.hold(block, now + number - 10)
            assert is_new is (number > 10 and block not in until)
            if number > 10:
                until[block] = max(until.get(block, 0), now + number - 10)
        elif verb == "release":
            held.release(block)
            until.pop(block, None)
        elif verb == "time":
            now = max(now, number)
            over = held.pass_time(number)
            assert sorted(over) == sorted(block for block, end in until.items() if end <= now)
            until = {block: end for block, end in until.items() if end > now}
        else:
            held.clear()
            until.clear()
        assert held.until == until


def test_repeated_holds_on_a_state_use_bounded_memory() -> None:
    held = HeldStates()
    for now in range(10_000):
        for block in BLOCKS:
            held.hold(block, now + 3600)
        held.pass_time(now)
    assert len(held._ends) <= 2 * len(BLOCKS)


def asked(request_id: int, first: int, num_tokens: int, arrived_s: int, *indices: PromptBreakpoint) -> RequestSpec:
    """Return a request for a prompt that begins with the token `first`."""
    prompt = np.array([first, *range(1, num_tokens)], dtype=np.int64)
    return RequestSpec(request_id, prompt, 64, SamplingSettings(), breakpoints=indices, arrived_s=arrived_s)


def run(cache: PrefixCache, spec: RequestSpec) -> RunningRequest:
    """Prefill a request and release it."""
    request = cache.admit(
        candidate_of(cache, spec), planned(cache, spec), branches=cache.branches(candidate_of(cache, spec), ())
    )
    while request.is_prefilling:
        cache.publish(request, request.scheduled)
        cache.advance(request, request.scheduled)
        if request.is_prefilling:
            cache.schedule_chunk(request, request.spec.prompt_len)
    cache.release(request)
    cache.check_integrity([])
    return request


def skipped(cache: PrefixCache, first: int, num_tokens: int) -> int:
    """Return the number of a prompt's tokens that need no prefill; do not change the cache."""
    return planned(cache, asked(99, first, num_tokens, 0)).match.skip_tokens


@pytest.mark.parametrize("eviction", ["lru", "cost"])
@pytest.mark.parametrize(("arrived_s", "keep_s", "is_kept"), [(100, 300, True), (100, 0, False), (0, 300, False)])
def test_state_at_a_cache_breakpoint_is_kept_for_its_ttl(
    arrived_s: int, keep_s: int, is_kept: bool, eviction: str
) -> None:
    cache = small_cache(64, 4, eviction=eviction)
    run(cache, asked(0, 1000, 3 * BLOCK, arrived_s, PromptBreakpoint(2 * BLOCK, keep_s)))
    assert skipped(cache, 1000, 3 * BLOCK) == 2 * BLOCK
    for number in range(1, 30):
        run(cache, asked(number, 1000 + number, 2 * BLOCK + 1, arrived_s + 10 * number))
    assert skipped(cache, 1000, 3 * BLOCK) == (2 * BLOCK if is_kept else 0)
    for number in range(31, 60):
        run(cache, asked(number, 1000 + number, 2 * BLOCK + 1, arrived_s + 10 * number))
    assert skipped(cache, 1000, 3 * BLOCK) == 0


def test_each_use_extends_and_never_shortens_a_states_hold() -> None:
    cache = small_cache(64, 4)
    index = PromptBreakpoint(2 * BLOCK + 1, 300)
    run(cache, asked(0, 1000, 3 * BLOCK, 100, index))
    run(cache, asked(1, 1000, 3 * BLOCK, 390, index))
    cache.slots.pass_time(50)
    for number in range(2, 30):
        run(cache, asked(number, 1000 + number, 2 * BLOCK + 1, 600))
    assert skipped(cache, 1000, 3 * BLOCK) == 2 * BLOCK
    run(cache, asked(50, 1, 2, 690))
    assert not cache.slots._held.until


def test_held_state_is_evicted_when_a_running_request_needs_its_slot() -> None:
    cache = small_cache(64, 2)
    run(cache, asked(0, 1000, BLOCK + 1, 100, PromptBreakpoint(BLOCK, 3600)))
    admit(cache, asked(1, 2000, 3, 100))
    admit(cache, asked(2, 3000, 3, 100))
    assert cache.slots.cached_blocks() == [] and not cache.slots._held.until
    cache.slots.check_integrity()


def test_count_of_newly_cached_tokens_excludes_already_resumable_tokens() -> None:
    cache = small_cache(64, 16)
    assert run(cache, asked(0, 7, 3 * BLOCK + 1, 0, PromptBreakpoint(BLOCK))).num_written == 3 * BLOCK
    assert run(cache, asked(1, 7, 3 * BLOCK + 1, 0)).num_written == 0
    assert run(cache, asked(2, 7, 5 * BLOCK + 2, 0)).num_written == 2 * BLOCK
    # A state between two others makes nothing resumable that was not, but what is before it.
    assert run(cache, asked(3, 7, 5 * BLOCK + 2, 0, PromptBreakpoint(4 * BLOCK))).num_written == 0
