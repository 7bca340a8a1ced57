"""A replica that several ranks compute together, in real processes: to its clients it is as one of a single process."""

import asyncio
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.routing.fleet import Client, Fleet, greedy
from tests.routing.scenarios import (
    BLOCK,
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


@pytest.mark.parametrize("layout", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
def test_ranks_of_a_replica_serve_clients_and_follow_their_signals(
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


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_ends_the_requests_of_its_replica(dead: int, fleet: Fleet, tmp_path: Path) -> None:
    launch(fleet, TENSOR, tmp_path)

    async def scenario(client: Client) -> None:
        outcomes = await kill_in_the_middle(client, fleet.replicas[dead], 6, signal.SIGKILL)
        assert all("no replica is left" in answer.error for _, answer in outcomes)
        await client.inference.stop_engines()

    run(scenario, fleet.address)
    statuses = fleet.wait_for_ends()
    assert statuses[dead] == -signal.SIGKILL and statuses[1 - dead] == 1
