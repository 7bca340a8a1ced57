"""Random and mutated messages, while requests run: tokens are the same, and memory is flat."""

import asyncio
import gc
import random
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.routing.fleet import Client, Fleet, greedy
from tests.routing.hostile import Attacker
from tests.routing.scenarios import assert_right, run, some_prompt

MOST_GROWTH_BYTES = 64 * 2**20


@pytest.fixture
def fleet(many_processes: None) -> Iterator[Fleet]:
    started = Fleet()
    yield started
    started.end()


def listening_ports(process: psutil.Process) -> list[int]:
    """Return the ports on which a process listens."""
    return [found.laddr.port for found in process.net_connections("tcp") if found.status == psutil.CONN_LISTEN]


async def attack(addresses: list[str], num_messages: int, seed: int) -> None:
    """Send messages to all addresses in turn, and leave the requests time to run."""
    attackers = [Attacker(address, random.Random(seed + number)) for number, address in enumerate(addresses)]
    for number in range(num_messages):
        attackers[number % len(attackers)].send()
        if number % 20 == 0:
            await asyncio.sleep(0)
    await asyncio.to_thread(lambda: [attacker.close() for attacker in attackers])


@pytest.mark.parametrize(
    "num_messages",
    [pytest.param(300, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.slow)],
    ids=["a few", "ten thousand"],
)
def test_messages_of_strangers_change_no_token_and_take_no_memory(
    num_messages: int, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.launch_world([{"world": (rank, 2, str(tmp_path / "store")), "layout": (2, 1)} for rank in range(2)])
    ranks = [psutil.Process(replica.process.pid) for replica in fleet.replicas]
    (coordinator,) = [
        child for rank in ranks for child in rank.children() if port_of_fleet(fleet) in listening_ports(child)
    ]
    ports = [port for rank in ranks for port in listening_ports(rank)]
    of_ranks = [f"tcp://127.0.0.1:{port}" for port in ports if reaches_loopback(ranks, port)]
    assert len(of_ranks) >= 2
    rng = random.Random(0)

    async def scenario(client: Client) -> None:
        await attack([fleet.address, *of_ranks], num_messages // 10, 1)  # caches and allocators reach their size
        before = [process.memory_info().rss for process in (coordinator, *ranks)]
        prompts = [some_prompt(rng, 20 + 5 * number) for number in range(8)]
        pending = [client.send(prompt, greedy(24)) for prompt in prompts]
        await attack([fleet.address, *of_ranks], num_messages, 2)
        for prompt, answer in zip(prompts, await asyncio.gather(*pending), strict=True):
            assert_right(prompt, answer)
        prompt = some_prompt(rng, 30)
        assert_right(prompt, await client.send(prompt, greedy(8)))
        gc.collect()
        after = [process.memory_info().rss for process in (coordinator, *ranks)]
        growth = [late - early for late, early in zip(after, before, strict=True)]
        print("bytes by which coordinator and ranks have grown:", growth)
        assert max(growth) < MOST_GROWTH_BYTES, growth
        await client.inference.stop_engines()

    run(scenario, fleet.address)
    assert fleet.wait_for_ends() == [0, 0]


def port_of_fleet(fleet: Fleet) -> int:
    return int(fleet.address.rsplit(":", 1)[1])


def reaches_loopback(ranks: list[psutil.Process], port: int) -> bool:
    """Whether a port is one of ours: all of them listen on loopback, gloo's are left alone."""
    listening = [found for rank in ranks for found in rank.net_connections("tcp") if found.status == psutil.CONN_LISTEN]
    return any(found.laddr.port == port and found.laddr.ip == "127.0.0.1" for found in listening)
