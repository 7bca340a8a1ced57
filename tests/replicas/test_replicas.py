"""Replicas in real processes: prefix routing; deaths, slow steps and failed steps lose no request."""

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.replicas.fleet import Client, Fleet, greedy
from tests.replicas.scenarios import (
    BLOCK,
    STEP_S,
    abort_and_go_on,
    assert_right,
    busiest,
    converse,
    kill_in_the_middle,
    pause_and_go_on,
    run,
    suspend_and_go_on,
)

SLOW_STEP_S = 7  # longer than a connection may be silent


@pytest.fixture
def fleet(many_processes: None) -> Iterator[Fleet]:
    started = Fleet()
    yield started
    started.end()


def test_later_turns_hit_the_cache_and_no_request_is_lost_when_a_replica_dies(fleet: Fleet) -> None:
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
            for prompt, answer in await kill_in_the_middle(client, victim, 12, how):
                assert_right(prompt, answer)
            await pause_and_go_on(client)
            await abort_and_go_on(client)
            await suspend_and_go_on(client)
        victim.send_signal(signal.SIGCONT)
        assert "declared this replica dead" in (await asyncio.to_thread(victim.report))["error"]
        await client.inference.stop_engines()

    run(scenario, fleet.address)
    statuses = fleet.wait_for_ends()
    assert sorted(statuses) == [-9, 0, 1]
    assert fleet.replicas[statuses.index(0)].report()["steps_aborted"]  # every fortieth step was made to fail


@pytest.mark.long
def test_slow_replica_stays_alive_and_requests_of_a_dead_replica_report_the_reason(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Two ranks of one launch; a request is not tried twice."""
    world = str(tmp_path / "store")
    routing = {"num_attempts": 1}
    ranks = [
        {"world": (rank, 2, world), "routing": routing, "step_s": STEP_S, "first_step_s": SLOW_STEP_S * rank}
        for rank in range(2)
    ]
    fleet.launch_world(ranks)

    async def scenario(client: Client) -> None:
        slow = [client.send([number] * 30, greedy(4)) for number in range(4)]
        for number, answer in enumerate(await asyncio.gather(*slow)):
            assert_right([number] * 30, answer)
        assert max(answer.seconds for answer in await asyncio.gather(*slow)) >= SLOW_STEP_S

        outcomes = await kill_in_the_middle(client, await busiest(client, fleet), 10)
        failed = [answer for _, answer in outcomes if answer.error]
        assert 0 < len(failed) < len(outcomes)
        assert all("1 replicas that it was sent to died" in answer.error for answer in failed)
        for prompt, answer in outcomes:
            if not answer.error:
                assert_right(prompt, answer)
        await suspend_and_go_on(client)
        for replica in fleet.replicas:
            replica.process.kill()
        while "no replica is left" not in (await client.send([1] * 20, greedy(4))).error:
            await asyncio.sleep(0.1)
        await client.inference.pause_engines()  # there is no replica to wait for
        await client.inference.stop_engines()

    run(scenario, fleet.address)


@pytest.mark.long
def test_oversized_reply_fails_only_its_own_request(fleet: Fleet) -> None:
    limit, scored = 20_000, {"return_log_probs": True, "top_n_logprobs": 20, "skip_prompt_log_probs": True}
    fleet.launch([{"step_s": 0.0}], {"max_message_bytes": limit})

    async def scenario(client: Client) -> None:
        prompts = [[number] * 30 for number in range(4)]
        large = [client.send([9] * 30, greedy(120, **scored)) for _ in range(2)]
        small = [client.send(prompt, greedy(24)) for prompt in prompts]
        for answer in await asyncio.gather(*large):
            assert f"above max_message_bytes={limit - 64}; ask for fewer log-probs" in answer.error
        for prompt, answer in zip(prompts, await asyncio.gather(*small), strict=True):
            assert_right(prompt, answer)
        await client.inference.stop_engines()

    run(scenario, fleet.address)
    assert fleet.wait_for_ends() == [0]
