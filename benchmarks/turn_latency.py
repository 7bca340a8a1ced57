"""How much sooner does a later turn begin with a cache, and what does the cache cost when nothing can hit?

    PYTHONPATH=. python3 benchmarks/turn_latency.py [--shape 8b|nano3|small|tiny] [--json FILE]

Later turns: conversations of three turns with a long last reply, then a fourth turn, whose time to first token is
measured, one request at a time, without a cache, with states at boundaries of prompts only, and with states of replies
too. Each repetition is another conversation, a fraction of a block longer or shorter, so that the boundaries differ;
engines alternate. The first token must come 8 times sooner than without a cache and, if that reply has 1,000 tokens or
more, twice as soon as with prompts' boundaries only.

No hits: prompts that share no prefix, in an engine with the cache and in one without. They alternate batch by batch and
take turns to go first, so that the machine's drift affects both. The cache must keep 0.98 of the throughput.
"""

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from loads.serving_engine import MODES, Mode, ServedShape, add_shape_arguments, model_of, send, serving_engine, shape_of
from measuring.ceilings import floor_us
from measuring.machine import describe_machine
from measuring.step_bytes import step_bytes

from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries
from megatron_mamba_cache.mcore.failure_reason import failure_reason

REQUIRED = {"no cache": 8.0, "prompt boundaries": 2.0}
REQUIRED_THROUGHPUT = 0.98


@dataclass(frozen=True, slots=True)
class History:
    """The (user, reply) lengths of the turns before the measured one, and the measured turn's new tokens."""

    turns: tuple[tuple[int, int], ...]
    new: int


@dataclass(frozen=True, slots=True)
class Scale:
    """The workload of a shape; prompts of the batches cannot hit."""

    history: History
    repetitions: int
    batch: int
    prompt: int
    reply: int
    rounds: int


SCALES = {
    "nano3": Scale(
        History(((2900, 128), (2900, 128), (1100, 1024)), 256), 7, batch=32, prompt=2000, reply=128, rounds=8
    ),
    "8b": Scale(History(((2900, 128), (2900, 128), (1100, 1024)), 256), 7, batch=32, prompt=2000, reply=128, rounds=8),
    "small": Scale(History(((2900, 128), (2900, 128), (1100, 1024)), 256), 5, batch=8, prompt=2000, reply=32, rounds=4),
    "tiny": Scale(History(((700, 16), (700, 16), (300, 256)), 64), 5, batch=6, prompt=300, reply=24, rounds=8),
}
LIMITS = {
    "8b": {"max_requests": 32, "max_tokens": 16_384, "state_gb": 10.0, "kv_gb": 4.0},
    "nano3": {"max_requests": 32, "max_tokens": 16_384, "state_gb": 10.0, "kv_gb": 4.0},
    "small": {"max_tokens": 16_384},
    "tiny": {"max_tokens": 4096},
}
"""Three engines fit in memory beside each other, and a prompt in one step."""


@dataclass(frozen=True, slots=True)
class TurnLatency:
    """Latency of the measured turn, by mode; milliseconds are medians.

    Args:
        times_sooner: Speedup over each mode without replies' states: median of each repetition's ratio.
        floor_ms: Reading all weights, the history's KV and a state, at the rate of a plain copy; None on a CPU.
    """

    prompt_tokens: int
    cached_tokens: dict[str, int]
    first_token_ms: dict[str, float]
    times_sooner: dict[str, float]
    floor_ms: float | None = None


@dataclass(frozen=True, slots=True)
class ColdThroughput:
    """Tokens per second when nothing hits; `ratio` is the median over rounds, with the cache over without."""

    tokens_per_s: dict[str, float]
    ratio: float
    lowest: float
    highest: float


def later_turns(model: Any, shape: ServedShape, scale: Scale, modes: Mapping[str, Mode] = MODES) -> TurnLatency:
    """Measure the last turn of each repetition's conversation in every mode."""
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    cached: dict[str, list[int]] = {mode: [] for mode in modes}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(serving_engine(model, shape, mode)) for name, mode in modes.items()}
        histories = {name: histories_in(engine, shape, scale) for name, engine in engines.items() if name != "no cache"}
        histories["no cache"] = histories["full"]
        prompt_tokens = len(histories["full"][0])
        for repetition in range(-1, scale.repetitions):  # the first is not counted
            for name in rotated(list(modes), repetition):
                first_token_s, skipped = first_token(engines[name], 10_000 + repetition, histories[name][repetition])
                if repetition >= 0:
                    seconds[name].append(first_token_s)
                    cached[name].append(skipped)
        num_bytes = step_bytes(model, engines["full"], prompt_tokens, hits_all=True)
    pairs = {
        name: [other / full for other, full in zip(seconds[name], seconds["full"], strict=True)]
        for name in REQUIRED
        if name in modes
    }
    return TurnLatency(
        prompt_tokens,
        {name: int(median(counts)) for name, counts in cached.items()},
        {name: 1e3 * median(times) for name, times in seconds.items()},
        {name: median(ratios) for name, ratios in pairs.items()},
        floor_us(num_bytes) / 1e3 if torch.cuda.is_available() else None,
    )


def histories_in(engine: Any, shape: ServedShape, scale: Scale) -> list[list[int]]:
    """Serve all turns but the last, all conversations together; return the prompts of their last turns."""
    drawn = random.Random(0)
    texts: list[list[int]] = [[] for _ in range(scale.repetitions + 1)]
    jitters = [drawn.randrange(shape.block_size) for _ in texts]
    for number, (num_new, num_reply) in enumerate(scale.history.turns):
        for index, text in enumerate(texts):
            text += some_tokens(drawn, shape, num_new + (0 if number else jitters[index]))
        replies = run(engine, {len(texts) * number + index: text for index, text in enumerate(texts)}, num_reply)
        for text, reply in zip(texts, replies, strict=True):
            text += reply
    return [text + some_tokens(drawn, shape, scale.history.new) for text in texts]


def first_token(engine: Any, request_id: int, prompt: Sequence[int]) -> tuple[float, int]:
    """Return the seconds from a request's arrival to its first token, and the tokens it skipped; it ends then."""
    began = time.perf_counter()
    send(engine, request_id, prompt, 2)
    while not engine.get_request(request_id).generated_tokens:
        engine.step_modern()
    seconds = time.perf_counter() - began
    run(engine, {}, 0)
    return seconds, engine.cached_tokens(request_id)


def cold_throughput(model: Any, shape: ServedShape, scale: Scale) -> ColdThroughput:
    """Measure batches that cannot hit, with and without a cache.

    Raises:
        RuntimeError: If a prompt hit.
    """
    seconds: dict[str, list[float]] = {"no cache": [], "full": []}
    drawn = random.Random(1)
    with ExitStack() as stack:
        engines = {name: stack.enter_context(serving_engine(model, shape, MODES[name])) for name in seconds}
        for number in range(-1, scale.rounds):  # the first is not counted
            ids = range(scale.batch * (number + 1), scale.batch * (number + 2))
            prompts = {request_id: some_tokens(drawn, shape, scale.prompt) for request_id in ids}
            for name in rotated(list(seconds), number):
                began = time.perf_counter()
                run(engines[name], prompts, scale.reply)
                if number >= 0:
                    seconds[name].append(time.perf_counter() - began)
        if engines["full"].context.counters.prompt_tokens_skipped:
            raise RuntimeError("prompts that have nothing in common hit the cache")
    ratios = [without / full for without, full in zip(seconds["no cache"], seconds["full"], strict=True)]
    num_tokens = scale.batch * (scale.prompt + scale.reply)
    speeds = {name: num_tokens / median(times) for name, times in seconds.items()}
    return ColdThroughput(speeds, median(ratios), min(ratios), max(ratios))


def run(engine: Any, prompts: Mapping[int, Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Run requests, and those already running, to their end; return the replies in the order of the prompts.

    Raises:
        RuntimeError: If a request fails.
    """
    for request_id, prompt in prompts.items():
        send(engine, request_id, prompt, num_tokens)
    replies: dict[int, list[int]] = {}
    while engine.has_unfinished_requests():
        for request in (record.merge() for record in engine.step_modern()["finished_request_records"]):
            if (reason := failure_reason(request)) is not None:
                raise RuntimeError(f"request {request.request_id} failed: {reason}")
            replies[request.request_id] = list(request.generated_tokens)
    return [replies[request_id] for request_id in prompts]


def rotated(names: list[str], number: int) -> list[str]:
    """Return the names, rotated by `number`."""
    first = number % len(names)
    return names[first:] + names[:first]


def some_tokens(drawn: random.Random, shape: ServedShape, count: int) -> list[int]:
    """Draw tokens."""
    return [drawn.randrange(shape.vocab_size) for _ in range(count)]


def table(latency: TurnLatency, cold: ColdThroughput | None) -> str:
    """Return the figures as Markdown."""
    lines = [f"A later turn, {latency.prompt_tokens:,} tokens with its history:", ""]
    lines += ["| engine | tokens skipped | first token, ms | the full cache's is sooner by | required |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for name in latency.first_token_ms:
        sooner = f"{latency.times_sooner[name]:.2f} | {REQUIRED[name]:g}" if name in latency.times_sooner else " | "
        lines.append(f"| {name} | {latency.cached_tokens[name]:,} | {latency.first_token_ms[name]:,.2f} | {sooner} |")
    if latency.floor_ms is not None:
        times = latency.first_token_ms["full"] / latency.floor_ms
        lines += ["", f"Reading all weights, the history's KV and a state takes {latency.floor_ms:.2f} ms; the full "]
        lines[-1] += f"cache's first token comes in {times:.2f} times that."
    if cold is None:
        return "\n".join(lines)
    speeds = ", ".join(f"{name} {speed:,.0f}" for name, speed in cold.tokens_per_s.items())
    lines += ["", f"Where nothing can hit, prompt and generated tokens/s: {speeds}; with the cache "]
    lines[-1] += (
        f"{cold.ratio:.3f} of without ({cold.lowest:.3f} to {cold.highest:.3f}; required {REQUIRED_THROUGHPUT})."
    )
    return "\n".join(lines)


def main() -> None:
    """Measure, print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape_arguments(parser)
    parser.add_argument("--only-cached", action="store_true", help="the later turn with the full cache, nothing else")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to FILE")
    arguments = parser.parse_args()
    shape, scale = shape_of(parser, arguments, LIMITS), SCALES[arguments.shape]
    with quiet_libraries(), own_warnings_hidden():
        model = model_of(shape)
        modes = {"full": MODES["full"]} if arguments.only_cached else MODES
        latency = later_turns(model, shape, scale, modes)
        cold = None if arguments.only_cached else cold_throughput(model, shape, scale)
    print(table(latency, cold))
    if arguments.json:
        figures = {"machine": describe_machine(), "later turns": asdict(latency), "nothing hits": cold and asdict(cold)}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
