"""The host tier under random requests, with copies that end late, fail, or read their source as late as allowed.

The model stores, for each index of memory, the key of the text that was last written there; None for garbage. Every
block and state that can be found on the device or host must contain the data of its key. If blocks and slots share
slabs, a write to one overwrites the other kind in its slab.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_mamba_cache.metrics import CacheCounters
from megatron_mamba_cache.policy.admission import AdmissionRules
from megatron_mamba_cache.policy.block_hashing import block_keys
from megatron_mamba_cache.policy.boundaries import BoundaryRule
from megatron_mamba_cache.policy.draft_states import WindowStates
from megatron_mamba_cache.policy.eviction_rules import EVICTION_RULES
from megatron_mamba_cache.policy.index_pools import CacheSpace
from megatron_mamba_cache.policy.pools import CachePools
from megatron_mamba_cache.policy.prefix_cache import CacheIdentity, PrefixCache
from megatron_mamba_cache.policy.requests import Candidate, RunningRequest
from megatron_mamba_cache.policy.running_requests import RunningRequests
from megatron_mamba_cache.policy.scheduler import StepScheduler
from megatron_mamba_cache.policy.slabs import SlabSpace
from megatron_mamba_cache.policy.tiers.cache_tiers import HostTier
from megatron_mamba_cache.policy.tiers.copies import CopyOrder, CopyStatus, CopyTimes, Lane
from tests.policy.small_cache import BLOCK, new_spec
from tests.policy.split_space import SplitSpace

MAX_ROWS = 3
MAX_LEN = 6 * BLOCK  # a lone request always fits
Slabs = tuple[int, int, int]
SIZES: list[tuple[Slabs | None, Slabs | None]] = [
    (None, None),
    ((5, 3, 1), (6, 3, 1)),
    ((8, 2, 1), (7, 3, 2)),
    ((4, 4, 2), (16, 2, 1)),
]
"""Slabs of the device and of the host, with the blocks and slots per slab; None: separate memory."""


@dataclass(slots=True)
class Memory:
    """The key last written to each block and slot of the device or the host."""

    slabs: Slabs | None
    blocks: dict[int, int | None] = field(default_factory=dict)
    states: dict[int, int | None] = field(default_factory=dict)

    def space(self) -> CacheSpace:
        return SplitSpace(11, 7) if self.slabs is None else SlabSpace(*self.slabs)

    def write_block(self, block: int, key: int | None) -> None:
        self.blocks[block] = key
        if self.slabs is not None:
            _, per_slab, slots = self.slabs
            first = block // per_slab * slots
            self.states.update(dict.fromkeys(range(first, first + slots)))

    def write_state(self, slot: int, key: int | None) -> None:
        self.states[slot] = key
        if self.slabs is not None:
            _, blocks, per_slab = self.slabs
            first = slot // per_slab * blocks
            self.blocks.update(dict.fromkeys(range(first, first + blocks)))


@dataclass(slots=True)
class Fate:
    """Outcome of a copy on two ranks: number of polls before it ends, if it fails, and when it reads its source."""

    late: tuple[int, int] = (0, 0)
    fails: tuple[bool, bool] = (False, False)
    reads_at_end: bool = True


class FatedCopies:
    """`Copies` of the first of two ranks; `agree` also has the statuses of the second rank."""

    def __init__(self, device: Memory, host: Memory) -> None:
        self.next_fate = Fate()
        self.seen: Counter[str] = Counter()
        self._sides = {Lane.TO_HOST: (device, host), Lane.TO_DEVICE: (host, device)}
        self._orders: dict[int, CopyOrder] = {}
        self._fates: dict[int, Fate] = {}
        self._polls: Counter[int] = Counter()
        self._asked: list[int] = []

    def start(self, orders: Sequence[CopyOrder]) -> None:
        for order in orders:
            self._orders[order.number], self._fates[order.number] = order, self.next_fate
            self._fill(order, is_good=not self.next_fate.reads_at_end)

    def status(self, number: int) -> CopyStatus:
        self._polls[number] += 1
        self._asked.append(number)
        return self._status_on(number, 0)

    def agree(self, statuses: Sequence[int]) -> list[int]:
        asked, self._asked = self._asked, []
        if not asked:  # what copies take, not how far they are
            return list(statuses)
        agreed = [min(status, self._status_on(n, 1)) for n, status in zip(asked, statuses, strict=True)]
        for number, status in zip(asked, agreed, strict=True):
            self.seen[f"{self._orders[number].lane.name} {CopyStatus(status).name}"] += 1
            if status == CopyStatus.DONE and self._fates[number].reads_at_end:
                self._fill(self._orders[number], is_good=True)
            elif status == CopyStatus.FAILED:
                self._fill(self._orders[number], is_good=False)
        return agreed

    def wait(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._polls[number] = max(*self._fates[number].late, self._polls[number])

    def forget(self, number: int) -> None:
        del self._orders[number], self._fates[number]

    @property
    def num_under_way(self) -> int:
        return len(self._orders)

    def _status_on(self, number: int, rank: int) -> CopyStatus:
        fate = self._fates[number]
        if self._polls[number] <= fate.late[rank]:
            return CopyStatus.UNDER_WAY
        return CopyStatus.FAILED if fate.fails[rank] else CopyStatus.DONE

    def _fill(self, order: CopyOrder, *, is_good: bool) -> None:
        source, target = self._sides[order.lane]
        for read, written in order.blocks:
            target.write_block(written, source.blocks.get(read) if is_good else None)
        for read, written in order.states:
            target.write_state(written, source.states.get(read) if is_good else None)


class TieredWorkload:
    """Processes requests with scheduler, cache and tier, as an engine does."""

    def __init__(self, slabs: tuple[Slabs | None, Slabs | None], eviction: str) -> None:
        self.device, self.host = Memory(slabs[0]), Memory(slabs[1])
        self.copies = FatedCopies(self.device, self.host)
        rules = [EVICTION_RULES[eviction](float(BLOCK)) for _ in range(2)]
        pools = CachePools.over(self.device.space(), rules[0], block_size=BLOCK)
        self.below = CachePools.over(self.host.space(), rules[1], block_size=BLOCK)
        counters = CacheCounters()
        self.tier = HostTier(
            pools,
            self.below,
            self.copies,
            self.copies.agree,
            counters,
            block_size=BLOCK,
            measure=lambda: CopyTimes(1, 1, 1),
        )
        self.cache = PrefixCache(
            pools,
            AdmissionRules(BoundaryRule(BLOCK), align_prefill_chunks=True),
            CacheIdentity("model", "0"),
            counters,
            draft_states=WindowStates(pools.slots, MAX_ROWS),
            tiers=self.tier,
        )
        self.requests = RunningRequests(self.cache, MAX_ROWS, 64)
        self.queue: dict[int, Candidate] = {}
        self.texts: list[list[int]] = [[1]]
        self.scheduler = StepScheduler()
        self.num_requests = 0

    def come(self, text: int, cut: int, new: Sequence[int]) -> None:
        """Queue a request that continues a prefix of a known text."""
        known = self.texts[text % len(self.texts)]
        prompt = [*known[: len(known) - cut % len(known)], *new][: MAX_LEN - 1]
        self._queue(self.num_requests, prompt)
        self.num_requests += 1

    def step(self, token: int) -> None:
        """Run a step; each request that samples gets the same token."""
        self.tier.land(wait=not self.requests)
        self._schedule()
        decoding = self.requests.decoding
        for request in decoding:
            self.cache.schedule_decode(request)
        requests = [*decoding, *(request for request in self.requests.prefilling if request.scheduled)]
        for request in requests:
            if request.is_prefilling:
                self._write(request)
                self.cache.publish(request, request.scheduled)
        for request in requests:
            if request.samples_this_step:
                request.generated.append(token)
            if not request.is_prefilling:
                self._write(request)
                self.cache.publish(request, request.scheduled)
            self.cache.advance(request, request.scheduled)
        for request in requests:
            if request.length >= MAX_LEN:
                self.end(request)
        for request in self.requests.grow(4).evicted:
            waiting, self.queue = self.queue, {}
            self._queue(request.request_id, self._tokens(request), request.age)
            self.queue.update(waiting)
        self.tier.start()

    def end(self, request: RunningRequest) -> None:
        """End a running request."""
        self.texts.append(self._tokens(request))
        self.requests.drop([request])

    def cancel(self, request_id: int) -> None:
        """Cancel a waiting request."""
        del self.queue[request_id]
        self.tier.forget(request_id)

    def check(self) -> None:
        """Assert that all bookkeeping is consistent, and that every entry that can be found was written."""
        self.cache.check_integrity(self.requests.oldest_first)
        for pools, memory in ((self.cache.pools, self.device), (self.below, self.host)):
            found = {block: pools.kv.key_of(block) for block in range(pools.kv.num_blocks)}  # type: ignore[arg-type]
            for block, key in found.items():
                if key is not None:
                    assert memory.blocks.get(block) == key, "a block is found that holds something else"
            for block in pools.slots.cached_blocks():
                slot = pools.slots.slot_of(block)
                assert slot is not None and memory.states.get(slot) == found[block], (
                    "a state is found that is not there"
                )

    def finish(self) -> None:
        """End all requests and copies; assert that all memory is free."""
        self.requests.drop(list(self.requests))
        for request_id in list(self.queue):
            self.cancel(request_id)
        self.tier.drain()
        self.check()
        assert not self.tier.takes_room and not self.copies.num_under_way
        assert not self.cache.kv.num_referenced and not self.below.kv.num_referenced
        self.cache.flush()
        for pools in (self.cache.pools, self.below):
            assert pools.kv.num_free == pools.kv.num_blocks and pools.slots.num_free == pools.slots.num_slots

    def _queue(self, request_id: int, prompt: Sequence[int], age: int | None = None) -> None:
        self.queue[request_id] = Candidate(new_spec(request_id, prompt, max_len=MAX_LEN), age)

    def _schedule(self) -> None:
        step = self.scheduler.fill_step(self.requests, list(self.queue.values()))
        for request in step.admitted:
            del self.queue[request.request_id]
            if request.source_slot is not None:
                assert self.device.states[request.source_slot] == self._keys(request, request.computed)[-1]
        self.tier.start()

    def _write(self, request: RunningRequest) -> None:
        """Write what the request's step computes, as the model's kernels do."""
        end = request.computed + request.scheduled
        keys = self._keys(request, end)
        for index in range(request.computed // BLOCK, -(-end // BLOCK)):
            if index >= request.num_shared_blocks:
                self.device.write_block(request.block_ids[index], keys[index] if index < len(keys) else None)
        for state in request.reserved:
            if state.position <= end:
                self.device.write_state(state.slot, keys[state.position // BLOCK - 1])
        self.device.write_state(request.cursor.live_slot, None)

    def _tokens(self, request: RunningRequest) -> list[int]:
        return [*request.spec.prompt.tolist(), *request.generated]

    def _keys(self, request: RunningRequest, end: int) -> list[int]:
        return list(block_keys(self.cache.root_of(""), self._tokens(request)[:end], BLOCK))


class HostTierMachine(RuleBasedStateMachine):
    """Requests arrive, run, end, are cancelled and flushed, in memory that is always too small."""

    @initialize(slabs=st.sampled_from(SIZES), eviction=st.sampled_from(sorted(EVICTION_RULES)))
    def begin(self, slabs: tuple[Slabs | None, Slabs | None], eviction: str) -> None:
        self.load = TieredWorkload(slabs, eviction)

    @rule(
        late=st.tuples(*[st.sampled_from([0, 0, 1, 4])] * 2),
        fails=st.tuples(*[st.sampled_from([False, False, True])] * 2),
    )
    def change_fate(self, late: tuple[int, int], fails: tuple[bool, bool]) -> None:
        self.load.copies.next_fate = Fate(late, fails, reads_at_end=not self.load.copies.next_fate.reads_at_end)

    @rule(
        text=st.integers(0, 99), cut=st.sampled_from([0, 0, 0, 1, 7]), new=st.lists(st.sampled_from([1, 2]), max_size=9)
    )
    def come(self, text: int, cut: int, new: list[int]) -> None:
        self.load.come(text, cut, new or [1])

    @rule(token=st.sampled_from([1, 2]), times=st.integers(1, 6))
    def step(self, token: int, times: int) -> None:
        for _ in range(times):
            self.load.step(token)
            self.load.check()

    @precondition(lambda self: self.load.requests)
    @rule(index=st.integers(0, MAX_ROWS - 1))
    def end(self, index: int) -> None:
        self.load.end(self.load.requests.oldest_first[index % len(self.load.requests)])

    @precondition(lambda self: self.load.queue)
    @rule(index=st.integers(0, 9))
    def cancel(self, index: int) -> None:
        self.load.cancel(sorted(self.load.queue)[index % len(self.load.queue)])

    @precondition(lambda self: self.load.num_requests % 8 == 7)
    @rule()
    def flush(self) -> None:
        self.load.num_requests += 1
        self.load.cache.flush()

    @invariant()
    def all_agrees(self) -> None:
        self.load.check()

    def teardown(self) -> None:
        if hasattr(self, "load"):
            self.load.finish()


TestHostTier = HostTierMachine.TestCase
TestHostTier.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("slabs", SIZES)
def test_long_random_workload_covers_every_copy_outcome_and_restored_hits(
    slabs: tuple[Slabs | None, Slabs | None],
) -> None:
    load, rng = TieredWorkload(slabs, "cost"), random.Random(str(slabs))
    for turn in range(3000):
        if rng.random() < 0.1:
            fails = rng.random() < 0.2, rng.random() < 0.2
            load.copies.next_fate = Fate((rng.choice([0, 0, 2]), rng.choice([0, 1])), fails, rng.random() < 0.7)
        if len(load.queue) < 3 and rng.random() < 0.4:
            load.come(
                rng.randrange(len(load.texts)), rng.choice([0, 0, 5]), rng.choices([1, 2, 3], k=rng.randrange(1, 7))
            )
        if load.queue and rng.random() < 0.03:
            load.cancel(rng.choice(sorted(load.queue)))
        if load.requests and rng.random() < 0.2:
            load.end(rng.choice(load.requests.oldest_first))
        if turn % 300 == 299:
            load.cache.flush()
        load.step(rng.choice([1, 2]))
        load.check()
    load.finish()
    counters, seen = load.cache.counters, load.copies.seen
    print(slabs, dict(seen), counters)
    assert len(seen) == 6, "an end of a copy never came"
    assert counters.prompt_tokens_from_host and counters.states_restored_from_host
    failed = seen["TO_HOST FAILED"], seen["TO_DEVICE FAILED"]
    assert counters.host_writes_failed > failed[0], "no write was void"
    assert counters.host_restores_failed >= failed[1]
