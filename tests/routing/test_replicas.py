"""Replicas in real processes: prompts find their prefix, and no death, slow step or failing one loses a request."""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.mcore.engine_runs import ORACLE_MARGIN, TINY_VOCAB, hybrid
from tests.routing.fleet import PATIENCE_S, Answer, Client, Fleet, ReplicaProcess, greedy
from tests.routing.replica_process import SIZES

MOST_SECONDS_AFTER_A_DEATH = 10
SLOW_STEP_S = 7  # longer than a connection may be silent
STEP_S = 0.02  # most of a step: a busy machine makes it little longer
NUM_TOKENS = 40
BLOCK = 16
SHARED_PROMPT = [1] * 40


@pytest.fixture
def fleet(many_processes: None) -> Iterator[Fleet]:
    started = Fleet()
    yield started
    started.end()


def some_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(TINY_VOCAB) for _ in range(num_tokens)]


def assert_right(prompt: Sequence[int], answer: Answer) -> None:
    """Assert that an answer has the tokens of an engine of its own: those of the fp64 oracle."""
    assert not answer.error
    check = hybrid(SIZES).oracle.check_greedy(list(prompt), answer.tokens, ORACLE_MARGIN)
    assert check.first_mismatch is None, f"{len(prompt)} tokens on {answer.replica}: differs at {check.first_mismatch}"


def run(scenario: Callable[[Client], Coroutine[Any, Any, None]], address: str, timeout_s: float = PATIENCE_S) -> None:
    async def with_client() -> None:
        async with Client(address) as client:
            await asyncio.wait_for(scenario(client), timeout_s)

    asyncio.run(with_client())


async def converse(client: Client, number: int, num_turns: int) -> tuple[list[Answer], list[list[int]]]:
    """Hold a conversation; those of even numbers share a system prompt."""
    rng = random.Random(number)
    text = [7] * (2 * BLOCK) if number % 2 == 0 else []
    answers, prompts = [], []
    for _ in range(num_turns):
        text = text + some_prompt(rng, rng.randrange(20, 50))
        prompts.append(text)
        answers.append(await client.send(text, greedy(6)))
        text = text + answers[-1].tokens
    return answers, prompts


async def pause_and_go_on(client: Client) -> None:
    """Pause all replicas; a request that comes meanwhile waits until they go on."""
    await client.inference.pause_engines()
    waiting = client.send([3] * 20, greedy(4))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    client.inference.unpause_engines()
    assert_right([3] * 20, await waiting)


async def suspend_and_go_on(client: Client) -> None:
    """Suspend all replicas; a request that comes meanwhile is computed after they resume."""
    client.inference.suspend_engines()
    waiting = client.send([4] * 20, greedy(4))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    client.inference.resume_engines()
    assert_right([4] * 20, await waiting)


async def busiest(client: Client, fleet: Fleet) -> ReplicaProcess:
    """Return the replica to which the requests of `kill_in_the_middle` are drawn."""
    return fleet.named((await client.send(SHARED_PROMPT, greedy(2))).replica)


async def kill_in_the_middle(
    client: Client, victim: ReplicaProcess, num_requests: int, how: signal.Signals = signal.SIGKILL
) -> list[tuple[list[int], Answer, float]]:
    """Send many requests and kill a replica meanwhile; return prompts, answers and seconds since then."""
    rng = random.Random(0)
    prompts = [SHARED_PROMPT + some_prompt(rng, 8 + 3 * number) for number in range(num_requests)]
    pending = [client.send(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
    await asyncio.sleep(NUM_TOKENS * STEP_S / 4)
    assert sum(answer.done() for answer in pending) < num_requests / 2
    victim.send_signal(how)
    death = time.monotonic()

    async def timed(answer: Any) -> tuple[Answer, float]:
        return await answer, time.monotonic() - death

    done = await asyncio.gather(*(timed(answer) for answer in pending))
    return [(prompt, answer, seconds) for prompt, (answer, seconds) in zip(prompts, done, strict=True)]


def test_turns_find_their_prefix_and_a_killed_replica_loses_no_request(fleet: Fleet) -> None:
    """Three launches of one replica each, the last two of which join the first one's coordinator."""
    fleet.launch([{"fail_steps": 40, "step_s": STEP_S}] * 3)

    async def scenario(client: Client) -> None:
        conversations = await asyncio.gather(*(converse(client, number, 4) for number in range(20)))
        later = [pair for answers, _ in conversations for pair in pairwise(answers)]
        at_home = [after for before, after in later if after.replica == before.replica]
        assert len(later) == 60 and len(at_home) >= 0.95 * len(later)
        assert sum(answer.cached_tokens >= BLOCK for answer in at_home) >= 0.95 * len(at_home)
        served = Counter(answer.replica for answers, _ in conversations for answer in answers)
        assert len(served) == 3 and max(served.values()) <= 1.3 * sum(served.values()) / 3, served
        for answers, prompts in conversations:
            for prompt, answer in zip(prompts, answers, strict=True):
                assert_right(prompt, answer)

        for how in (signal.SIGKILL, signal.SIGSTOP):  # its connections end; they fall silent
            victim = await busiest(client, fleet)
            outcomes = await kill_in_the_middle(client, victim, 15, how)
            for prompt, answer, seconds in outcomes:
                assert_right(prompt, answer)
                assert seconds < MOST_SECONDS_AFTER_A_DEATH
            await pause_and_go_on(client)
            await suspend_and_go_on(client)
        victim.send_signal(signal.SIGCONT)
        assert "declared this replica dead" in (await asyncio.to_thread(victim.report))["fenced"]
        await client.inference.stop_engines()

    run(scenario, fleet.address)
    statuses = fleet.wait_for_ends()
    assert sorted(statuses) == [-9, 0, 1]
    assert fleet.replicas[statuses.index(0)].report()["steps_aborted"]  # every fortieth step was made to fail


def test_a_slow_replica_is_alive_and_without_retries_the_requests_of_a_dead_one_say_why(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Two ranks of one launch; a request is not tried twice."""
    world = str(tmp_path / "store")
    routing = {"num_attempts": 1}
    ranks = [{"world": (rank, 2, world), "routing": routing, "step_s": STEP_S, "first_step_s": SLOW_STEP_S * rank} for rank in range(2)]
    fleet.launch_world(ranks)

    async def scenario(client: Client) -> None:
        slow = [client.send([number] * 30, greedy(4)) for number in range(4)]
        for number, answer in enumerate(await asyncio.gather(*slow)):
            assert_right([number] * 30, answer)
        assert max(answer.seconds for answer in await asyncio.gather(*slow)) >= SLOW_STEP_S

        outcomes = await kill_in_the_middle(client, await busiest(client, fleet), 10)
        failed = [answer for _, answer, _ in outcomes if answer.error]
        assert 0 < len(failed) < len(outcomes)
        assert all("1 replicas that it was sent to died" in answer.error for answer in failed)
        assert all(seconds < MOST_SECONDS_AFTER_A_DEATH for _, _, seconds in outcomes)
        for prompt, answer, _ in outcomes:
            if not answer.error:
                assert_right(prompt, answer)
        await suspend_and_go_on(client)
        for replica in fleet.replicas:
            replica.process.kill()
        while "no replica is left" not in (await client.send([1] * 20, greedy(4))).error:
            await asyncio.sleep(0.1)
        await client.inference.pause_engines()  # nobody is there to wait for
        await client.inference.stop_engines()

    run(scenario, fleet.address)
