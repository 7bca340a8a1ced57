"""The simulated server gives the expected times, skips steps exactly, and releases everything in its tiers."""

import random

import pytest

from benchmarks.loads.simulated_server import ServedRequest, ServerSettings, SimulatedServer, TimedRequest
from benchmarks.loads.timed_copies import Clock, CopyRates, TimedCopies
from megatron_mamba_cache.planning.caches import CacheSizes, TieredCache, empty_cache, tiered_cache
from megatron_mamba_cache.planning.plan import BlockText
from megatron_mamba_cache.policy.identifiers import BlockKey
from megatron_mamba_cache.policy.slabs import SlabSpace
from megatron_mamba_cache.policy.tiers.copies import CopyTimes, Lane
from tests.policy.split_space import SplitSpace

BLOCK = 64
SIZES = CacheSizes(kv_bytes_per_token=1024, state_bytes=4 * BLOCK * 1024, block_size=BLOCK)
SETTINGS = ServerSettings(4, 512, decode_rows=(1, 3), decode_steps_s=(0.01, 0.03), prompt_token_s=0.001)
RATES = CopyRates(alone=1e9, both=2e9)
TIMES = CopyTimes(block=65_536, state=262_144, token=1_000_000)


def text(first: int, prompt_len: int, reply_len: int) -> BlockText:
    length = prompt_len + reply_len
    return BlockText([BlockKey(first + index) for index in range(length // BLOCK)], prompt_len, length)


def served_by_card(requests: list[TimedRequest], space: SplitSpace | SlabSpace) -> list[ServedRequest]:
    clock = Clock()
    cache = empty_cache(space, SIZES, max_requests=SETTINGS.max_requests)
    return SimulatedServer(requests, cache, SETTINGS, clock, TimedCopies(clock, SIZES.unit, RATES)).run()


def served_with_host(
    requests: list[TimedRequest], device: SlabSpace, host: SlabSpace
) -> tuple[list[ServedRequest], TieredCache, TimedCopies]:
    clock = Clock()
    copies = TimedCopies(clock, SIZES.unit, RATES)
    tiered = tiered_cache(device, host, SIZES, copies, TIMES, SETTINGS.max_requests)
    served = SimulatedServer(requests, tiered.cache, SETTINGS, clock, copies, tiered.tier).run()
    return served, tiered, copies


def plenty() -> SplitSpace:
    return SplitSpace(2000, 2000)


def test_simulated_step_times_are_interpolated() -> None:
    assert SETTINGS.step_s(0, 100) == pytest.approx(0.1)
    assert SETTINGS.step_s(2, 0) == pytest.approx(0.02)
    assert SETTINGS.step_s(9, 10) == pytest.approx(0.03 + 0.01)


def test_simulated_request_takes_one_prefill_and_one_step_per_token() -> None:
    (request,) = served_by_card([TimedRequest(text(1, 300, 100), None, 2.0)], plenty())
    assert request.arrived_s == 2.0
    assert request.first_token_s == pytest.approx(2.0 + 300 * 0.001)
    assert request.ended_s == pytest.approx(request.first_token_s + 99 * 0.01)


def test_simulated_turn_arrives_after_the_preceding_reply_and_skips_cached_tokens() -> None:
    turns = [TimedRequest(text(1, 300, 100), None, 0.0), TimedRequest(text(1, 450, 1), 0, 5.0)]
    first, second = served_by_card(turns, plenty())
    assert second.arrived_s == pytest.approx(first.ended_s + 5.0)
    assert second.skipped == 384  # the last boundary of 399 computed tokens
    assert second.time_to_first_token == pytest.approx((450 - 384) * 0.001)


def test_simulated_request_without_room_waits_until_another_ends() -> None:
    requests = [TimedRequest(text(1 + 100 * number, 128, 200), None, 0.0) for number in range(6)]
    served = served_by_card(requests, plenty())
    assert [request.admitted_s for request in served[:4]] == [0.0] * 4
    assert min(request.admitted_s for request in served[4:]) >= min(request.ended_s for request in served[:4])


def test_error_names_the_request_that_exceeds_the_memory() -> None:
    with pytest.raises(RuntimeError, match="request 0"):
        served_by_card([TimedRequest(text(1, 128 * BLOCK, 1), None, 0.0)], SlabSpace(4, 4, 1))


def conversations(seed: int) -> list[TimedRequest]:
    """Return conversations of several turns; each prompt continues the preceding turn."""
    rng = random.Random(seed)
    requests: list[TimedRequest] = []
    for number in range(8):
        last, length = None, rng.randrange(100, 600)
        for _ in range(rng.randrange(2, 7)):
            reply_len = rng.randrange(1, 150)
            requests.append(TimedRequest(text(1 + 1000 * number, length, reply_len), last, rng.uniform(0, 3)))
            last, length = len(requests) - 1, length + reply_len + rng.randrange(1, 200)
    return requests


def small_device() -> SlabSpace:
    return SlabSpace(20, 4, 1)


@pytest.mark.parametrize("seed", range(5))
def test_simulation_that_skips_uneventful_steps_gives_the_same_result(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = conversations(seed)
    jumped, _, _ = served_with_host(requests, small_device(), SlabSpace(60, 4, 1))
    monkeypatch.setattr(SimulatedServer, "_take_quiet_steps", lambda self, rows, step_s: 0)
    stepped, _, _ = served_with_host(requests, small_device(), SlabSpace(60, 4, 1))
    assert [(a.skipped, a.restored) for a in jumped] == [(b.skipped, b.restored) for b in stepped]
    assert [a.first_token_s for a in jumped] == pytest.approx([b.first_token_s for b in stepped])
    assert [a.ended_s for a in jumped] == pytest.approx([b.ended_s for b in stepped])


@pytest.mark.parametrize("seed", range(5))
def test_simulated_host_tier_restores_evicted_blocks(seed: int) -> None:
    requests = conversations(seed)
    alone, unlimited = served_by_card(requests, small_device()), served_by_card(requests, plenty())
    served, tiered, copies = served_with_host(requests, small_device(), SlabSpace(200, 4, 1))
    skipped = [sum(request.skipped for request in run) for run in (alone, served, unlimited)]
    print(f"seed {seed}: skipped {skipped}, {sum(request.restored for request in served)} of them restored")
    assert skipped[0] < skipped[1] <= skipped[2]
    # Preempted requests also restore blocks.
    assert 0 < sum(request.restored for request in served) <= tiered.cache.counters.prompt_tokens_from_host
    assert copies.num_bytes[Lane.TO_DEVICE] and copies.num_bytes[Lane.TO_HOST]
    tiered.tier.drain()
    tiered.cache.check_integrity([])
    assert not tiered.cache.kv.num_referenced and not tiered.cache.slots.num_live and not tiered.tier.takes_room


def test_simulated_request_waits_only_for_its_own_copy() -> None:
    """A session returns after another session has evicted it from the GPU."""
    first = [TimedRequest(text(1, 60 * BLOCK, 1), None, 0.0), TimedRequest(text(1, 61 * BLOCK, 1), 0, 60.0)]
    other = TimedRequest(text(1000, 60 * BLOCK, 1), None, 20.0)
    served, _, copies = served_with_host([*first, other], small_device(), SlabSpace(60, 4, 1))
    back = served[1]
    assert back.skipped == back.restored == 60 * BLOCK
    copy_s = copies.num_bytes[Lane.TO_DEVICE] / RATES.alone
    assert copies.num_bytes[Lane.TO_DEVICE] == 60 * SIZES.unit.block + SIZES.unit.state
    assert back.copy_wait_s == pytest.approx(copy_s)
    assert back.time_to_first_token == pytest.approx(copy_s + BLOCK * 0.001)
