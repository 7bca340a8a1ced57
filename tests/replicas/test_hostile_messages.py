"""Random and mutated messages that arrive while requests run change no tokens and do not increase memory."""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_mamba_cache.replicas.access import port_of
from tests.replicas.fleet import Client, Fleet, greedy
from tests.replicas.hostile import Attacker
from tests.replicas.scenarios import assert_right, run, some_prompt

MOST_GROWTH_BYTES = 16 * 2**20
FEW = 300
NUM_REQUESTS = 4


@pytest.fixture
def fleet(many_processes: None) -> Iterator[Fleet]:
    started = Fleet()
    yield started
    started.end()


async def attack(addresses: list[str], num_messages: int, seed: int) -> None:
    """Send messages to all addresses in turn, and leave the requests time to run."""
    attackers = [Attacker(address, random.Random(seed + number)) for number, address in enumerate(addresses)]
    for number in range(num_messages):
        attackers[number % len(attackers)].send()
        if number % 20 == 0:
            await asyncio.sleep(0.001)
    await asyncio.to_thread(lambda: [attacker.close() for attacker in attackers])


async def ask_while_attacked(client: Client, addresses: list[str], num_messages: int, seed: int) -> None:
    """Send requests and hostile messages at the same time; assert that each request has its own tokens."""
    rng = random.Random(seed)
    prompts = [some_prompt(rng, 20 + 5 * number) for number in range(NUM_REQUESTS)]
    pending = [client.send(prompt, greedy(24)) for prompt in prompts]
    await attack(addresses, num_messages, seed)
    for prompt, answer in zip(prompts, await asyncio.gather(*pending), strict=True):
        assert_right(prompt, answer)


def coordinator_of(fleet: Fleet, ranks: list[psutil.Process]) -> psutil.Process:
    """Return the coordinator's process, which listens on the fleet's address and was started by a rank."""
    children = [child for rank in ranks for child in rank.children()]
    port = port_of(fleet.address)
    (found,) = [child for child in children if any(c.laddr.port == port for c in child.net_connections("tcp"))]
    return found


def resident(processes: list[psutil.Process]) -> list[int]:
    return [process.memory_info().rss for process in processes]


@pytest.mark.long
@pytest.mark.parametrize("num_messages", [FEW, pytest.param(10_000, marks=pytest.mark.slow)], ids=["few", "many"])
def test_random_messages_do_not_change_tokens_or_leak_memory(num_messages: int, fleet: Fleet, tmp_path: Path) -> None:
    fleet.launch_world([{"world": (rank, 2, str(tmp_path / "store")), "layout": (2, 1)} for rank in range(2)])
    publishers = [address for replica in fleet.replicas for address in replica.listening]
    assert len(publishers) == 2  # of prompts and of their number
    addresses = [fleet.address] * 6 + publishers
    ranks = [psutil.Process(replica.process.pid) for replica in fleet.replicas]
    processes = [coordinator_of(fleet, ranks), *ranks]

    async def scenario(client: Client) -> None:
        await ask_while_attacked(client, addresses, num_messages // 2, 1)  # caches reach their size
        before, begin = resident(processes), time.monotonic()
        await ask_while_attacked(client, addresses, num_messages, 2)
        after = resident(processes)
        growth = [late - early for late, early in zip(after, before, strict=True)]
        print(
            f"{num_messages} messages in {time.monotonic() - begin:.1f} s; coordinator and ranks had "
            f"{[f'{size / 2**20:.1f}' for size in before]} MiB, grown by {[f'{size / 2**20:.2f}' for size in growth]}"
        )
        assert max(growth) < MOST_GROWTH_BYTES, growth
        await client.inference.stop_engines()

    run(scenario, fleet.address)
    assert fleet.wait_for_ends() == [0, 0]
