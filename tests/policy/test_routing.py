"""Prompts are routed to their cached prefix within a load bound; the router's records may be outdated."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.errors import CacheCapacityError
from megatron_mamba_cache.policy.block_hashing import CacheSalt, block_keys
from megatron_mamba_cache.policy.identifiers import BlockKey
from megatron_mamba_cache.policy.replica_keys import RecentKeys
from megatron_mamba_cache.policy.routing import PrefixRouter, PromptBlocks, ReplicaName, RoundRobinRouter, Route

BLOCK = 4
ROOT = CacheSalt("model", "0", 0).root()
NAMES = [ReplicaName(name) for name in "abcd"]


def blocks(tokens: Sequence[int], root: bytes = ROOT, max_new_tokens: int = 8) -> PromptBlocks:
    return PromptBlocks(block_keys(root, tokens, BLOCK), BLOCK, len(tokens), max_new_tokens)


def router(num_replicas: int = 4, load_factor: float = 1.5, max_keys: int = 1000) -> PrefixRouter:
    made = PrefixRouter(load_factor, max_keys=max_keys)
    for name in NAMES[:num_replicas]:
        made.join(name)
    return made


def everywhere(prompt: PromptBlocks) -> Callable[[ReplicaName], PromptBlocks]:
    return lambda _: prompt


def test_prompt_is_routed_to_the_replica_with_its_longest_cached_prefix() -> None:
    subject, prompt = router(), blocks(range(20))
    subject.publish(NAMES[1], prompt.keys[1:2])
    subject.publish(NAMES[2], prompt.keys[3:4])
    route = subject.route(0, everywhere(prompt))
    assert (route.replica, route.num_cached_blocks) == (NAMES[2], 4)


def test_state_at_the_prompt_end_is_not_a_routing_hit() -> None:
    subject, prompt = router(), blocks(range(8))
    subject.publish(NAMES[1], prompt.keys[1:2])
    assert subject.route(0, everywhere(prompt)).num_cached_blocks == 0


def test_dropped_or_flushed_prefix_is_ignored_by_the_router() -> None:
    prompt = blocks(range(20))
    for forget in (lambda made: made.drop(NAMES[2], prompt.keys), lambda made: made.flush(NAMES[2])):
        subject = router()
        subject.publish(NAMES[2], prompt.keys)
        forget(subject)
        assert subject.route(0, everywhere(prompt)).replica == NAMES[0]


def test_router_hashes_a_prompt_with_each_replicas_own_salt() -> None:
    subject, tokens = router(), range(20)
    salted = {name: blocks(tokens, CacheSalt("model", "0", epoch).root()) for epoch, name in enumerate(NAMES)}
    subject.publish(NAMES[1], salted[NAMES[0]].keys)  # keys of another epoch are never matched
    subject.publish(NAMES[3], salted[NAMES[3]].keys[:2])
    assert subject.route(0, salted.__getitem__).replica == NAMES[3]


def test_router_sends_prompts_to_a_replica_still_computing_their_prefix() -> None:
    subject = router()
    first, second = blocks(range(20)), blocks([*range(20), 50, 51, 52])
    subject.route(0, everywhere(blocks([90] * 9)))  # replica a is busier
    assert subject.route(1, everywhere(first)).replica == NAMES[1]
    assert subject.route(2, everywhere(second)).replica == NAMES[1]
    for request_id in range(3):
        subject.finish(request_id)
    assert subject.route(3, everywhere(second)).num_cached_blocks == 0  # no state was reported


def test_prompt_is_routed_where_its_blocks_were_sent_before() -> None:
    subject, prompt = router(), blocks(range(20))
    subject.route(0, everywhere(prompt))
    subject.route(1, everywhere(blocks([90] * 9)))
    subject.finish(0)
    assert subject.route(2, everywhere(prompt)) == Route(NAMES[0], 0)


def test_shared_prefix_does_not_overload_one_replica() -> None:
    """Requests arrive one at a time, so no replica is busy; still, none gets much more than its share of them."""
    subject, system = router(), list(range(8))
    served: Counter[ReplicaName] = Counter()
    for request_id in range(400):
        prompt = blocks([*system, *(100 + request_id + step for step in range(20))])
        route = subject.route(request_id, everywhere(prompt))
        served[route.replica] += 1
        subject.publish(route.replica, [prompt.keys[1], prompt.keys[-1]])
        subject.finish(request_id)
    assert max(served.values()) <= 1.3 * 100


def test_router_keeps_a_growing_conversation_on_one_replica() -> None:
    subject, tokens = router(), list(range(9))
    for request_id in range(50):
        prompt = blocks(tokens)
        route = subject.route(request_id, everywhere(prompt))
        assert route.replica == NAMES[0]
        subject.publish(route.replica, prompt.keys)
        subject.finish(request_id)
        tokens = tokens + [request_id] * 9


def test_router_sends_requests_elsewhere_when_the_cached_replica_is_busy() -> None:
    subject, prompt = router(num_replicas=2, load_factor=1.0), blocks(range(20))
    subject.publish(NAMES[0], prompt.keys)
    chosen = [subject.route(request_id, everywhere(prompt)).replica for request_id in range(20)]
    assert chosen[:2] == [NAMES[0]] * 2
    assert 0 < chosen.count(NAMES[1]) < 20


def test_router_alternates_between_idle_replicas() -> None:
    subject = router()
    chosen = []
    for request_id in range(8):
        chosen.append(subject.route(request_id, everywhere(blocks([request_id] * 9))).replica)
        subject.finish(request_id)
    assert chosen == NAMES * 2


def test_removed_replica_gets_no_request_and_its_load_is_forgotten() -> None:
    subject, prompt = router(num_replicas=2), blocks(range(20))
    subject.publish(NAMES[0], prompt.keys)
    assert subject.route(0, everywhere(prompt)).replica == NAMES[0]
    subject.leave(NAMES[0])
    subject.publish(NAMES[0], prompt.keys)  # a late report
    assert subject.route(0, everywhere(prompt)).replica == NAMES[1]
    subject.finish(0)
    assert subject.load(NAMES[1]) == 0


def test_router_refuses_invalid_settings_and_calls() -> None:
    with pytest.raises(ValueError, match=r"load_factor is 0\.9"):
        PrefixRouter(load_factor=0.9)
    with pytest.raises(ValueError, match="share_factor is nan"):
        PrefixRouter(share_factor=float("nan"))
    with pytest.raises(ValueError, match="max_keys is 0"):
        PrefixRouter(max_keys=0)
    with pytest.raises(CacheCapacityError, match="no replica is running"):
        PrefixRouter().route(0, everywhere(blocks([])))
    subject = router()
    subject.route(0, everywhere(blocks([])))
    with pytest.raises(ValueError, match="request 0 is in flight"):
        subject.route(0, everywhere(blocks([])))
    with pytest.raises(ValueError, match="replica a has already joined"):
        subject.join(NAMES[0])


def test_recent_keys_drop_the_least_recently_noted_key() -> None:
    keys = RecentKeys(3)
    keys.note(map(BlockKey, (1, 2, 3)))
    keys.note(map(BlockKey, (1, 4)))
    assert [key for key in range(1, 5) if key in keys] == [1, 3, 4] and len(keys) == 3


@given(
    st.lists(st.tuples(st.sampled_from(["route", "finish", "publish", "drop", "flush", "leave"]), st.integers(0, 99)))
)
def test_replica_load_is_the_sum_of_tokens_in_flight_and_stays_bounded(calls: list[tuple[str, int]]) -> None:
    """Apply publishes, drops and ends in any order: loads add up, and routing is bounded and repeatable."""
    subject, twin = router(max_keys=5), router(max_keys=5)
    prompts = [blocks([number % 3] * 8 + [number] * 5) for number in range(100)]
    in_flight: dict[int, tuple[ReplicaName, int]] = {}
    for request_id, (call, number) in enumerate(calls):
        name, prompt = NAMES[number % 4], prompts[number]
        if call == "route" and subject.replicas:
            before = {name: subject.load(name) for name in subject.replicas}
            num_before = len(in_flight)
            route = subject.route(request_id, everywhere(prompt))
            assert route == twin.route(request_id, everywhere(prompt))
            mean, mean_work = sum(before.values()) / len(before), sum(before.values()) / max(num_before, 1)
            assert before[route.replica] <= 1.5 * mean + mean_work + 1e-9
            in_flight[request_id] = (route.replica, prompt.work(route.num_cached_blocks))
        elif call == "finish" and in_flight:
            done = sorted(in_flight)[number % len(in_flight)]
            del in_flight[done]
            for made in (subject, twin):
                made.finish(done)
        elif call == "leave" and len(subject.replicas) > 1:
            in_flight = {known: entry for known, entry in in_flight.items() if entry[0] != name}
            for made in (subject, twin):
                made.leave(name)
        else:
            for made in (subject, twin):
                {"publish": made.publish, "drop": made.drop}.get(call, lambda *_: None)(name, prompt.keys)
                if call == "flush":
                    made.flush(name)
        for known in subject.replicas:
            assert subject.load(known) == sum(work for replica, work in in_flight.values() if replica == known)


def test_round_robin_routing_ignores_the_cache() -> None:
    subject, prompt = RoundRobinRouter(), blocks(range(20))
    for name in NAMES:
        subject.join(name)
    subject.publish(NAMES[3], prompt.keys)
    assert [subject.route(request_id, everywhere(prompt)).replica for request_id in range(6)] == [*NAMES, *NAMES[:2]]
    subject.leave(NAMES[1])
    assert {subject.route(request_id, everywhere(prompt)).replica for request_id in range(6, 9)} == {*"acd"}


@dataclass(slots=True)
class Conversations:
    """Simulates conversations of four turns, a fixed number at a time, on replicas that keep every boundary's state.

    A replica divides its speed equally among its requests. The next request to end is chosen at random, with
    probabilities proportional to these speeds.
    """

    subject: PrefixRouter
    rng: random.Random
    speeds: dict[ReplicaName, float]
    served: Counter[ReplicaName] = field(default_factory=Counter)
    num_later: int = 0
    num_at_home: int = 0

    def run(self, num_conversations: int, num_at_once: int) -> None:
        waiting = [self._first(number) for number in range(num_conversations)]
        running: list[tuple[int, list[int], ReplicaName | None, int]] = []
        next_id = 0
        in_flight: dict[int, tuple[list[int], ReplicaName, int]] = {}
        while waiting or in_flight or running:
            while waiting and len(in_flight) + len(running) < num_at_once:
                running.append((0, waiting.pop(), None, 0))
            for _, tokens, home, turn in running:
                route = self.subject.route(next_id, everywhere(blocks(tokens)))
                self.served[route.replica] += 1
                self.num_later += turn > 0
                self.num_at_home += turn > 0 and route.replica == home
                in_flight[next_id] = (tokens, route.replica, turn)
                next_id += 1
            busy = Counter(replica for _, replica, _ in in_flight.values())
            paces = [self.speeds[replica] / busy[replica] for _, replica, _ in in_flight.values()]
            (done,) = self.rng.choices(list(in_flight), paces)
            tokens, replica, turn = in_flight.pop(done)
            tokens = tokens + [self.rng.randrange(50) for _ in range(8)]
            self.subject.publish(replica, blocks(tokens).keys)
            self.subject.finish(done)
            more = [self.rng.randrange(50) for _ in range(self.rng.randrange(4, 30))]
            running = [(done, tokens + more, replica, turn + 1)] if turn < 3 else []

    def _first(self, number: int) -> list[int]:
        system = [number % 3] * 12 if number % 2 else []
        return system + [self.rng.randrange(50) for _ in range(self.rng.randrange(10, 60))]


@pytest.mark.parametrize("speeds", [(1, 1, 1, 1), (1.5, 0.7, 0.9, 0.9)])
@pytest.mark.parametrize("num_at_once", [8, 12, 40])
@pytest.mark.parametrize("seed", range(3))
def test_router_keeps_conversations_on_one_replica_with_even_load(
    num_at_once: int, seed: int, speeds: tuple[float, ...]
) -> None:
    """Conversations do not accumulate on the fastest replica if the replicas have different speeds."""
    load = Conversations(router(), random.Random(seed), dict(zip(NAMES, speeds, strict=True)))
    load.run(200, num_at_once)
    assert load.num_later == 600
    assert load.num_at_home >= 0.95 * load.num_later
    assert max(load.served.values()) <= 1.3 * sum(load.served.values()) / len(NAMES)
