"""Measure how fast sessions are restored from the host, and how much copies slow down concurrent decoding.

    PYTHONPATH=. python3 benchmarks/host_tier.py [--shape NAME] [--rounds N] [--cold-rounds N]
        [--json FILE]

GPU memory has room for the decoding requests and for one or two long sessions; host memory has room for all sessions.
Most turns therefore find their session only in host memory, and evict another session from the GPU.

- Restores: the time to first token of a turn whose session is in host memory, compared with a turn whose session is on
  the GPU, and with a plain copy of the same number of bytes from pinned memory in the same run.
- Concurrent decoding: the mean time of decode steps while a session is restored for a waiting request, divided by the
  mean time of the same number of later steps.
- Other costs of the tier, measured with two engines in turn, with and without the tier: the throughput of prompts that
  share no text, and the time of decode steps while a finished session is written to the host.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from loads.serving_engine import (
    LARGE_SHAPES,
    MODES,
    ServedShape,
    add_shape_arguments,
    model_of,
    send,
    serving_engine,
    shape_of,
)
from measuring.gpu_time import gpu_seconds
from measuring.machine import describe_machine
from step_cost import timed_step
from turn_latency import first_token, rotated, some_tokens

from megatron_mamba_cache.command_line.quiet import quiet_libraries

NUM_SESSIONS = 5
NUM_WARMING = 5


@dataclass(frozen=True, slots=True)
class Scale:
    """Numbers of tokens and requests in the load.

    Args:
        length: Tokens of a session.
        rows: Number of requests that decode during the copies.
        cold_prompt, cold_reply, cold_batch: Prompt tokens, reply tokens and number of requests in a batch without hits.
    """

    length: int
    rows: int
    cold_prompt: int
    cold_reply: int
    cold_batch: int


SCALES = {
    **dict.fromkeys(LARGE_SHAPES, Scale(131_072, 32, 2048, 128, 32)),
    "small": Scale(32_768, 16, 1024, 64, 16),
    "tiny": Scale(2048, 4, 128, 16, 4),
}
LIMITS = {
    "8b": {"cache_gb": 6.5, "host_cache_gb": 12.0},
    "nano3": {"cache_gb": 3.4, "host_cache_gb": 5.0},
    "super": {"cache_gb": 3.4, "host_cache_gb": 5.0},
    "granite-small": {"cache_gb": 9.0, "host_cache_gb": 14.0},
    "granite-tiny": {"cache_gb": 3.4, "host_cache_gb": 6.0},
    "bamba": {"cache_gb": 6.5, "host_cache_gb": 11.0},
    "small": {"cache_gb": 0.8, "host_cache_gb": 3.0},
    "tiny": {"cache_gb": 0.0014, "host_cache_gb": 0.01},
}


@dataclass
class Returns:
    """Milliseconds to the first token of a turn, by the location of its session, and of a plain copy of the session."""

    num_bytes: int
    copy_ms: float | None
    from_host_ms: list[float] = field(default_factory=list)
    on_card_ms: list[float] = field(default_factory=list)

    @property
    def times_the_copy(self) -> float | None:
        """Time that a restore adds to a turn, divided by the time of the plain copy."""
        if self.copy_ms is None:
            return None
        return (median(self.from_host_ms) - median(self.on_card_ms)) / self.copy_ms


@dataclass
class Slowdown:
    """Seconds of decode steps during copies, and of the same number of steps without copies."""

    under_way: list[float] = field(default_factory=list)
    undisturbed: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Ratio of the mean times of a step, with copies to without."""
        return fmean(self.under_way) / fmean(self.undisturbed)


class Sessions:
    """Long session texts; the prompt of each turn is one of these texts plus new tokens."""

    def __init__(self, engine: Any, shape: ServedShape, scale: Scale, rng: random.Random) -> None:
        self._engine, self._shape, self._rng = engine, shape, rng
        self._next_id = 10**6
        self.texts = [some_tokens(rng, shape, scale.length) for _ in range(NUM_SESSIONS)]

    def turn(self, number: int) -> tuple[float, int]:
        """Run a turn; return its seconds to the first token and its number of restored tokens."""
        self._next_id += 1
        seconds, _ = first_token(self._engine, self._next_id, self.continued(number))
        from_host = self._engine.tier_tokens(self._next_id).from_host
        self._engine.context.memory.below.drain()
        return seconds, from_host

    def continued(self, number: int) -> list[int]:
        """Return the prompt of a session's next turn. It reaches no new block boundary, so all turns are alike."""
        return self.texts[number] + some_tokens(self._rng, self._shape, self._shape.block_size * 3 // 4)


def returns(engine: Any, sessions: Sessions, rounds: int) -> Returns:
    """Measure turns whose sessions are in host memory and on the GPU."""
    for number in range(NUM_SESSIONS):
        sessions.turn(number)
    usage = engine.context.memory.below.usage()["host_bytes"]
    num_bytes = (usage["kv_cached"] + usage["states_cached"]) // NUM_SESSIONS
    found = Returns(num_bytes, plain_copy_ms(num_bytes))
    for number in [number for number in range(NUM_SESSIONS * rounds) for _ in range(2)]:
        seconds, from_host = sessions.turn(number % NUM_SESSIONS)
        (found.from_host_ms if from_host else found.on_card_ms).append(1e3 * seconds)
    if not found.from_host_ms:
        counters = engine.context.counters
        raise RuntimeError(
            f"no session was restored from the host (usage {usage}): {counters.states_written_to_host} states were "
            f"written, {counters.host_writes_failed} writes and {counters.host_restores_failed} restores failed; "
            "if nothing failed, lower --cache-gb"
        )
    return found


def plain_copy_ms(num_bytes: int) -> float | None:
    """Return the milliseconds to copy `num_bytes` from pinned memory to the GPU; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    pinned, target = torch.empty(num_bytes, dtype=torch.uint8).pin_memory(), torch.empty(num_bytes, dtype=torch.uint8)
    target = target.cuda()
    return 1e3 * gpu_seconds(lambda: target.copy_(pinned, non_blocking=True), 5)


def steps_during_restores(engine: Any, sessions: Sessions, rounds: int) -> Slowdown:
    """Measure decode steps while sessions are restored."""
    found = Slowdown()
    for number in range(NUM_SESSIONS * rounds):
        request_id = 2 * 10**6 + number
        send(engine, request_id, sessions.continued(number % NUM_SESSIONS), 2)
        steps = timed_while(engine, lambda request=request_id: request in engine.waiting_request_ids)
        while request_id in engine.requests:
            engine.step_modern()
        settle(engine)
        if engine.tier_tokens(request_id).from_host:
            found.under_way += steps
            found.undisturbed += [timed_step(engine) for _ in steps]
    if not found.under_way:
        raise RuntimeError("a session must be restored from the host, but none was; lower --cache-gb")
    return found


def timed_while(engine: Any, is_under_way: Callable[[], bool]) -> list[float]:
    """Return the seconds of each step while `is_under_way` is true, without the last step."""
    steps: list[float] = []
    while is_under_way():
        steps.append(timed_step(engine))
    return steps[:-1] or steps


def are_under_way(engine: Any) -> bool:
    """Return True if copies between tiers are in flight."""
    return any(engine.context.memory.below.usage().get("tier_copies", {}).values())


def settle(engine: Any) -> None:
    """Run steps until no copy is in flight, and a few more."""
    while are_under_way(engine):
        engine.step_modern()
    for _ in range(NUM_WARMING):
        engine.step_modern()


def start_decoding(engine: Any, shape: ServedShape, scale: Scale, rng: random.Random, num_tokens: int) -> None:
    """Start the requests, and run steps until all of them decode."""
    for index in range(scale.rows):
        send(engine, index, some_tokens(rng, shape, shape.block_size // 2), num_tokens)
    while engine.waiting_request_ids or not engine.context.is_decode_only():
        engine.step_modern()
    for _ in range(NUM_WARMING):
        engine.step_modern()


def costs(model: Any, shape: ServedShape, scale: Scale, rounds: int, cold_rounds: int) -> tuple[list[float], Slowdown]:
    """Return the cost of the tier for prompts that hit nothing, and for decode steps while a session is written.

    The first is the throughput with the tier relative to that without, for each round.
    """
    shapes = {"with": shape, "without": replace(shape, host_cache_gb=None)}
    rng = random.Random(2)
    with ExitStack() as stack:
        engines = {name: stack.enter_context(serving_engine(model, one, MODES["full"])) for name, one in shapes.items()}
        cold = cold_ratios(engines, shape, scale, rng, cold_rounds)
        return cold, steps_during_writes(engines, shape, scale, rng, rounds)


def cold_ratios(
    engines: dict[str, Any], shape: ServedShape, scale: Scale, rng: random.Random, rounds: int
) -> list[float]:
    """Measure batches of prompts that share no text."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(-1, rounds):
        prompts = [some_tokens(rng, shape, scale.cold_prompt) for _ in range(scale.cold_batch)]
        for name in rotated(list(engines), number):
            began = time.perf_counter()
            for index, prompt in enumerate(prompts):
                send(engines[name], 4 * 10**6 + (number + 1) * len(prompts) + index, prompt, scale.cold_reply)
            while engines[name].has_unfinished_requests():
                engines[name].step_modern()
            seconds[name].append(time.perf_counter() - began)
    return [without / with_it for with_it, without in zip(seconds["with"], seconds["without"], strict=True)][1:]


def steps_during_writes(
    engines: dict[str, Any], shape: ServedShape, scale: Scale, rng: random.Random, rounds: int
) -> Slowdown:
    """Measure decode steps while a finished session is written to the host, and the same steps without a tier."""
    rows = rng.getrandbits(32)
    for engine in engines.values():
        start_decoding(engine, shape, scale, random.Random(rows), shape.max_length - shape.block_size)
    found = Slowdown()
    for number in range(-1, rounds):
        prompt, request_id = some_tokens(rng, shape, scale.length), 3 * 10**6 + number
        steps: dict[str, list[float]] = {}
        for name, engine in engines.items():
            send(engine, request_id, prompt, 2)
            while request_id in engine.requests:
                engine.step_modern()
            steps[name] = [timed_step(engine)]
            while are_under_way(engine) if name == "with" else len(steps[name]) < len(steps["with"]):
                steps[name].append(timed_step(engine))
            settle(engine)
        if number >= 0:
            found.under_way += steps["with"]
            found.undisturbed += steps["without"]
    return found


def measured(model: Any, shape: ServedShape, scale: Scale, rounds: int) -> tuple[Returns, Slowdown]:
    """Measure turns, and concurrent decode steps."""
    rng = random.Random(1)
    with serving_engine(model, shape, MODES["full"]) as engine:
        sessions = Sessions(engine, shape, scale, rng)
        found = returns(engine, sessions, rounds)
        start_decoding(engine, shape, scale, rng, shape.max_length - shape.block_size)
        return found, steps_during_restores(engine, sessions, rounds)


def table(found: Returns, restores: Slowdown, writes: Slowdown, cold: Sequence[float]) -> str:
    """Return the results as a Markdown table."""
    copy = "" if found.copy_ms is None else f"{found.copy_ms:.1f} | {found.times_the_copy:.2f}"
    return "\n".join(
        [
            "| bytes of a session | on the GPU, ms | from the host, ms | plain copy, ms | added time / copy |",
            "|---:|---:|---:|---:|---:|",
            f"| {found.num_bytes:,} | {median(found.on_card_ms):.1f} | {median(found.from_host_ms):.1f} | {copy} |",
            "",
            "| concurrent copy | steps | undisturbed step, ms | step, ms | ratio |",
            "|---|---:|---:|---:|---:|",
            *(
                f"| a session {what} | {len(one.under_way)} | {1e3 * fmean(one.undisturbed):.3f} "
                f"| {1e3 * fmean(one.under_way):.3f} | {one.ratio:.3f} |"
                for what, one in (("is restored", restores), ("is written to the host", writes))
            ),
            "",
            f"Without hits: {median(cold):.3f} of the tokens per second without the tier, the median of "
            f"{len(cold)} rounds from {min(cold):.3f} to {max(cold):.3f}.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape_arguments(parser)
    parser.add_argument("--host-cache-gb", type=float, metavar="G", help="GiB of host memory for prefixes")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--cold-rounds", type=int, metavar="N", help="rounds of prompts that share no text; default: --rounds"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    given = parser.parse_args(arguments)
    scale, shape = SCALES[given.shape], shape_of(parser, given, LIMITS)
    shape = replace(shape, max_requests=scale.rows + 1, max_length=scale.length + 8 * shape.block_size)
    if given.host_cache_gb is not None:
        shape = replace(shape, host_cache_gb=given.host_cache_gb)
    with quiet_libraries():  # hides the log lines of failed copies
        model = model_of(shape)
        found, restores = measured(model, shape, scale, given.rounds)
        cold, writes = costs(model, shape, scale, given.rounds, given.cold_rounds or given.rounds)
    print(table(found, restores, writes, cold))
    if given.json:
        figures = {"returns": asdict(found), "restores": asdict(restores), "writes": asdict(writes), "cold": cold}
        given.json.write_text(json.dumps({"machine": describe_machine()} | figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
