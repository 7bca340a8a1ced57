"""A replica of several ranks in real processes behaves like one of a single process."""

import asyncio
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.replicas.fleet import Client, Fleet, greedy
from tests.replicas.scenarios import (
    BLOCK,
    MOST_SECONDS_AFTER_A_DEATH,
    STEP_S,
    assert_right,
    converse,
    kill_in_the_middle,
    pause_and_go_on,
    run,
    suspend_and_go_on,
)

TENSOR, PIPELINE = (2, 1), (1, 2)


@pytest.fixture
def fleet(many_processes: None) -> Iterator[Fleet]:
    started = Fleet()
    yield started
    started.end()


def launch(fleet: Fleet, layout: tuple[int, int], tmp_path: Path) -> None:
    """Start one replica of two ranks; steps of both are compared."""
    world = str(tmp_path / "store")
    fleet.launch_world([{"world": (rank, 2, world), "layout": layout, "step_s": STEP_S} for rank in range(2)])
    assert fleet.replicas[0].name == fleet.replicas[1].name


@pytest.mark.parametrize(
    "layout", [pytest.param(TENSOR, id="tensor"), pytest.param(PIPELINE, id="pipeline", marks=pytest.mark.long)]
)
def test_replica_with_several_ranks_serves_clients_and_obeys_signals(
    layout: tuple[int, int], fleet: Fleet, tmp_path: Path
) -> None:
    launch(fleet, layout, tmp_path)

    async def scenario(client: Client) -> None:
        for _ in range(2):
            conversations = await asyncio.gather(*(converse(client, number, 3) for number in range(4)))
            for answers, prompts in conversations:
                assert all(after.cached_tokens >= BLOCK for _, after in pairwise(answers))
                for prompt, answer in zip(prompts, answers, strict=True):
                    assert_right(prompt, answer)
            await pause_and_go_on(client)
            await suspend_and_go_on(client)
        too_long = await client.send([1] * 600, greedy(4))
        assert too_long.error and not too_long.tokens
        await client.inference.stop_engines()

    run(scenario, fleet.address)
    assert fleet.wait_for_ends() == [0, 0]


@pytest.mark.long
def test_requests_fail_when_a_rank_of_their_replica_dies(fleet: Fleet, tmp_path: Path) -> None:
    """The replica's first rank, which started the coordinator, ends before the coordinator."""
    launch(fleet, TENSOR, tmp_path)

    async def scenario(client: Client) -> None:
        outcomes = await kill_in_the_middle(client, fleet.replicas[1], 6, signal.SIGKILL)
        assert all("no replica is left" in answer.error for _, answer in outcomes)
        assert await asyncio.to_thread(fleet.wait_for_ends) == [1, -signal.SIGKILL]
        assert "no replica is left" in (await client.send([1] * 20, greedy(4))).error

    run(scenario, fleet.address)
    fleet.wait_until_nothing_listens()


def test_rank_that_waits_for_a_dead_rank_times_out(fleet: Fleet, tmp_path: Path) -> None:
    """An idle replica: its second rank computes nothing that the first one's end would break."""
    launch(fleet, TENSOR, tmp_path)
    first, second = fleet.replicas
    first.process.kill()
    assert second.reports.poll(MOST_SECONDS_AFTER_A_DEATH)
    assert "one of its processes has ended" in second.report()["error"]
    assert fleet.wait_for_ends() == [-signal.SIGKILL, 1]
