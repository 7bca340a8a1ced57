"""Scenarios of clients with real replicas."""

import asyncio
import random
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tests.mcore.engine_runs import ORACLE_MARGIN, TINY_VOCAB, hybrid
from tests.replicas.fleet import PATIENCE_S, Answer, Client, Fleet, ReplicaProcess, greedy
from tests.replicas.replica_process import SIZES

MOST_SECONDS_AFTER_A_DEATH = 10
STEP_S = 0.03  # most of a step: a busy machine makes it little longer
NUM_TOKENS = 24
BLOCK = 16
SHARED_PROMPT = [1] * 40


def some_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(TINY_VOCAB) for _ in range(num_tokens)]


def assert_right(prompt: Sequence[int], answer: Answer) -> None:
    """Assert that a reply has the tokens that the fp64 reference model generates."""
    assert not answer.error
    check = hybrid(SIZES).oracle.check_greedy(list(prompt), answer.tokens, ORACLE_MARGIN)
    assert check.first_mismatch is None, f"{len(prompt)} tokens on {answer.replica}: differs at {check.first_mismatch}"


def run(scenario: Callable[[Client], Coroutine[Any, Any, None]], address: str, timeout_s: float = PATIENCE_S) -> None:
    async def with_client() -> None:
        async with Client(address) as client:
            await asyncio.wait_for(scenario(client), timeout_s)

    asyncio.run(with_client())


async def converse(client: Client, number: int, num_turns: int) -> tuple[list[Answer], list[list[int]]]:
    """Run a conversation; conversations with even numbers share a system prompt."""
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
    """Pause all replicas, and check that a request sent meanwhile waits until they continue."""
    await client.inference.pause_engines()
    waiting = client.send([3] * 20, greedy(4))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    client.inference.unpause_engines()
    assert_right([3] * 20, await waiting)


async def abort_and_go_on(client: Client) -> None:
    """Abort a long request, one in the queue of paused replicas, and one that is not in any; others continue."""
    inference, scored = client.inference, greedy(400, return_log_probs=True, skip_prompt_log_probs=True)
    first = inference.next_request_id
    long, other = inference.add_request([5] * 20, scored), client.send([6] * 20, greedy(NUM_TOKENS))
    await asyncio.sleep(20 * STEP_S)
    for _ in range(2):
        await inference.pause()
    waiting = inference.add_request([5] * 21, scored)
    (tokens, log_probs), *none = await inference.abort([first, first + 2, 10**6])
    assert 0 < len(tokens) == len(log_probs) < 400 and none == [([], []), ([], [])]
    assert_right([5] * 20, Answer(tokens, "", 0, "", 0.0))
    for future, found in ((long, tokens), (waiting, [])):
        record = (await future).merge()  # a failed step may have interrupted it
        assert record.sampling_params.aborted, record
        assert record.generated_tokens == found
    assert await inference.abort([first]) == [([], [])]
    for _ in range(2):
        inference.resume_generation()
    assert_right([6] * 20, await other)


async def suspend_and_go_on(client: Client) -> None:
    """Suspend all replicas, and check that a request sent meanwhile is computed after they resume."""
    client.inference.suspend_engines()
    waiting = client.send([4] * 20, greedy(4))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    client.inference.resume_engines()
    assert_right([4] * 20, await waiting)


async def busiest(client: Client, fleet: Fleet) -> ReplicaProcess:
    """Return the replica that attracts the requests of `kill_in_the_middle`."""
    return fleet.named((await client.send(SHARED_PROMPT, greedy(2))).replica)


def many_prompts(seed: int, num_requests: int) -> list[list[int]]:
    """Return random prompts that begin like `SHARED_PROMPT`."""
    rng = random.Random(seed)
    return [SHARED_PROMPT + some_prompt(rng, 8 + 3 * number) for number in range(num_requests)]


async def most_seconds_after_a_death(client: Client, num_requests: int) -> float:
    """Return the limit, plus what a busy machine takes longer than the pace of steps for as many requests unharmed."""
    answers = await asyncio.gather(*(client.send(text, greedy(NUM_TOKENS)) for text in many_prompts(1, num_requests)))
    busy = max(answer.seconds for answer in answers) - NUM_TOKENS * STEP_S
    return MOST_SECONDS_AFTER_A_DEATH + max(busy, 0.0)


async def kill_in_the_middle(
    client: Client, victim: ReplicaProcess, num_requests: int, how: signal.Signals = signal.SIGKILL
) -> list[tuple[list[int], Answer]]:
    """Send many requests and kill a replica meanwhile; return prompts and answers, all of which came in time."""
    limit = await most_seconds_after_a_death(client, num_requests)
    prompts = many_prompts(0, num_requests)
    pending = [client.send(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
    await asyncio.sleep(NUM_TOKENS * STEP_S / 4)
    assert sum(answer.done() for answer in pending) < num_requests / 2
    victim.send_signal(how)
    death = time.monotonic()
    answers = await asyncio.gather(*pending)
    assert time.monotonic() - death < limit
    return list(zip(prompts, answers, strict=True))
