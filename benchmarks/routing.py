"""Check that turns reach the replica that has cached their prefix, and that the load is balanced.

    PYTHONPATH=. python3 benchmarks/routing.py [--json FILE] [--conversations N] [--at-once N]

Four replicas, each a process with its own engine on the CPU, run under one coordinator and serve Megatron's client. The
same conversations are routed by prefix and by round robin. Half of them begin with one of three system prompts. The
prompt of a later turn is the conversation so far, including replies, plus the user's new text. A fixed number of
conversations (`--at-once`) runs concurrently; the next one begins when one ends.

A turn is at home if it runs on the replica that served the preceding turn. Load is counted in requests, and in tokens
that were processed or generated. With routing by prefix, at least 95 % of later turns must be at home, and no replica
may have more than 1.3 times the mean load.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from measuring.machine import describe_machine

NUM_REPLICAS = 4
NUM_TURNS = 4
BLOCK = 16
VOCAB = 96
SYSTEM_PROMPT = 96
FIRST_TEXT, LATER_TEXT, REPLY = (40, 120), (16, 48), (6, 12)
REQUIRED_AT_HOME = 0.95
MOST_LOAD = 1.3
START_TIMEOUT_S = 180


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of one turn.

    Args:
        replica: Name of the replica that served it.
        is_at_home: True if the same replica served the preceding turn; None for a first turn.
    """

    replica: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    seconds: float
    is_at_home: bool | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of one routing policy; loads are those of the most loaded replica, relative to the mean."""

    later_turns: int
    at_home: float
    load_of_requests: float
    load_of_tokens: float
    prompt_tokens: int
    skipped_tokens: int
    seconds: float
    mean_seconds_of_a_turn: float


def figures_of(turns: Sequence[Turn], seconds: float) -> Figures:
    """Summarize the turns of one run."""
    later = [turn for turn in turns if turn.is_at_home is not None]
    tokens: Counter[str] = Counter()
    for turn in turns:
        tokens[turn.replica] += turn.prompt_tokens - turn.cached_tokens + turn.generated_tokens
    return Figures(
        later_turns=len(later),
        at_home=sum(bool(turn.is_at_home) for turn in later) / len(later),
        load_of_requests=_most_over_mean(Counter(turn.replica for turn in turns)),
        load_of_tokens=_most_over_mean(tokens),
        prompt_tokens=sum(turn.prompt_tokens for turn in turns),
        skipped_tokens=sum(turn.cached_tokens for turn in turns),
        seconds=seconds,
        mean_seconds_of_a_turn=sum(turn.seconds for turn in turns) / len(turns),
    )


def _most_over_mean(loads: Mapping[str, int]) -> float:
    return max(loads.values()) * NUM_REPLICAS / sum(loads.values())


def first_texts(num_conversations: int) -> list[list[int]]:
    """Return the first texts of the conversations; every other text begins with one of three system prompts."""
    rng = random.Random(0)
    systems = [_some_tokens(rng, (SYSTEM_PROMPT, SYSTEM_PROMPT)) for _ in range(3)]
    return [
        [*(rng.choice(systems) if number % 2 else ()), *_some_tokens(rng, FIRST_TEXT)]
        for number in range(num_conversations)
    ]


def _some_tokens(rng: random.Random, bounds: tuple[int, int]) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randint(*bounds))]


async def converse(client: Any, number: int, text: list[int]) -> list[Turn]:
    """Run one conversation and return its turns."""
    rng, turns = random.Random(number), []
    for _ in range(NUM_TURNS):
        turn, reply = await _take_turn(client, text, rng.randint(*REPLY), turns[-1].replica if turns else None)
        turns.append(turn)
        text = [*text, *reply, *_some_tokens(rng, LATER_TEXT)]
    return turns


async def _take_turn(client: Any, prompt: list[int], length: int, home: str | None) -> tuple[Turn, list[int]]:
    from megatron.core.inference.sampling_params import SamplingParams

    start = time.perf_counter()
    params = SamplingParams(num_tokens_to_generate=length, top_k=1, termination_id=-1)
    request = (await client.add_request(prompt, params)).merge()
    if request.failed():
        raise RuntimeError(f"a request of the benchmark failed: {request.events[-2].payload}")
    reported, reply = request.sampling_params, list(request.generated_tokens)
    is_at_home = None if home is None else reported.replica == home
    seconds = time.perf_counter() - start
    return Turn(reported.replica, len(prompt), reported.cached_tokens, len(reply), seconds, is_at_home), reply


async def run_conversations(address: str, num_conversations: int, num_at_once: int) -> Figures:
    """Run all conversations, stop the replicas, and return the results."""
    from megatron.core.inference.inference_client import InferenceClient

    client, turns = InferenceClient(address), []
    await client.start()
    waiting = enumerate(first_texts(num_conversations))

    async def talk() -> None:
        for number, text in waiting:
            turns.extend(await converse(client, number, text))

    start = time.perf_counter()
    await asyncio.gather(*(talk() for _ in range(num_at_once)))
    seconds = time.perf_counter() - start
    await client.stop_engines()
    client.stop()
    return figures_of(turns, seconds)


@contextmanager
def replicas(policy: str) -> Iterator[str]:
    """Context manager that starts the replicas and yields the coordinator's address.

    A client must stop the replicas.
    """
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    try:
        address = None
        for _ in range(NUM_REPLICAS):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_serve, args=(theirs, policy, address)))
            processes[-1].start()
            ends.append(ours)
            address = address or _wait(ours)  # the first replica starts the coordinator, to which the others connect
        for end in ends[1:]:
            _wait(end)
        yield address
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()


def _wait(end: Connection) -> str:
    if not end.poll(START_TIMEOUT_S):
        raise TimeoutError(f"a replica did not start within {START_TIMEOUT_S} s")
    return end.recv()


def _serve(pipe: Connection, policy: str, address: str | None) -> None:
    """Run one replica."""
    import torch

    from megatron_mamba_cache import CacheConfig, build_engine
    from megatron_mamba_cache.models.random_hybrid import RandomHybridConfig, random_hybrid_model
    from megatron_mamba_cache.replicas.settings import RoutingSettings

    torch.set_num_threads(1)
    sizes = RandomHybridConfig(
        pattern="M*M-", hidden_size=32, vocab_size=VOCAB, ssm_chunk_size=8, mamba_num_heads=4, mamba_head_dim=8,
        mamba_state_dim=8, max_sequence_length=1024, init_std=0.3,
    )  # fmt: skip
    config = CacheConfig(
        block_size_tokens=BLOCK, buffer_size_gb=0.05, prefix_caching_mamba_gb=0.02, max_requests=16, max_tokens=512,
        max_sequence_length=1024,
    )  # fmt: skip
    engine = build_engine(random_hybrid_model(sizes), config)

    async def serve() -> None:
        pipe.send(
            await engine.start_listening_to_data_parallel_coordinator(
                coordinator_address=address, routing=RoutingSettings(policy=policy)
            )
        )
        await engine.engine_loop_task

    asyncio.run(serve())


def table(figures: Mapping[str, Figures]) -> str:
    """Return the results as a Markdown table."""
    rows = [
        "| policy | later turns at home | load, highest / mean: requests, tokens | prompt tokens without prefill | "
        "whole run | a turn |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for policy, found in figures.items():
        skipped = (
            f"{found.skipped_tokens:,} of {found.prompt_tokens:,} ({found.skipped_tokens / found.prompt_tokens:.1%})"
        )
        rows.append(
            f"| {policy} | {found.at_home:.1%} of {found.later_turns} | {found.load_of_requests:.2f}, "
            f"{found.load_of_tokens:.2f} | {skipped} | {found.seconds:.1f} s | {found.mean_seconds_of_a_turn:.3f} s |"
        )
    return "\n".join(rows)


def shortfalls(figures: Figures) -> Iterable[str]:
    """Yield the requirements that routing by prefix does not meet."""
    if figures.at_home < REQUIRED_AT_HOME:
        yield f"{figures.at_home:.1%} of later turns at home, {REQUIRED_AT_HOME:.0%} needed"
    for kind, load in (("requests", figures.load_of_requests), ("tokens", figures.load_of_tokens)):
        if load > MOST_LOAD:
            yield f"a replica has {load:.2f} times the mean load in {kind}, at most {MOST_LOAD} allowed"


def main() -> None:
    """Run both policies, print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--conversations", type=int, default=200, metavar="N")
    parser.add_argument("--at-once", type=int, default=24, metavar="N", help="number of concurrent conversations")
    arguments = parser.parse_args()
    figures = {}
    for policy in ("prefix", "round-robin"):
        with replicas(policy) as address:
            figures[policy] = asyncio.run(run_conversations(address, arguments.conversations, arguments.at_once))
    print(describe_machine().removesuffix(".") + f", pyzmq {version('pyzmq')}.")
    print()
    print(table(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps({policy: asdict(found) for policy, found in figures.items()}, indent=2))
    missed = list(shortfalls(figures["prefix"]))
    print("\n" + ("; ".join(missed) or "Routing by prefix holds what is required."))
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
