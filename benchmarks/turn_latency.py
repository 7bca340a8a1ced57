"""Measure the time to first token of a later turn with a cache, and the cache's cost if no prompt can hit.

    PYTHONPATH=. python3 benchmarks/turn_latency.py [--shape NAME] [--recorded FILE]
        [--new-tokens N ...] [--json FILE]

Later turns: each conversation has three turns, the last of which has a long reply, and then a fourth turn, whose time
to first token is measured. One request runs at a time. The caches are: no cache, states at the boundaries of prompts
only, and states of replies as well ("full"). "Full, no room" is the full cache after unrelated prompts have filled its
memory, so that each turn must evict. The lengths of the conversations differ by fractions of a block, and engines
alternate.

The first token must come 8 times sooner than without a cache, and as soon without room as with room. If the last reply
has 1,000 tokens or more, it must come twice as soon as with states at prompt boundaries only. With `--recorded`, the
conversations are those of a recorded load that fit in a request, and their last turns are measured.

No hits: prompts that share no prefix, with and without the cache. The two engines alternate batch by batch and take
turns to go first, so that drift of the machine affects both. The cache must keep 0.98 of the throughput.

With `--new-tokens`, the script measures only the time to first token of turns with these numbers of new tokens after a
cached history.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from loads.conversation_load import Conversation, Turn
from loads.open_loop import fitting
from loads.recorded_sessions import recorded_conversations
from loads.serving_engine import (
    LARGE_SHAPES,
    MODES,
    QWEN_SHAPES,
    Mode,
    ServedShape,
    add_shape_arguments,
    add_weights_arguments,
    model_of,
    send,
    serving_engine,
    shape_of,
)
from measuring.ceilings import floor_us
from measuring.machine import describe_machine
from measuring.model_floors import step_bytes

from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries
from megatron_mamba_cache.mcore.step_report import failure_reason
from megatron_mamba_cache.planning.recorded_load import read_load

FULL, NO_ROOM = "full", "full, no room"
CACHES = {**MODES, NO_ROOM: MODES[FULL]}
REQUIRED = {"no cache": 8.0, "prompt boundaries": 2.0}
REQUIRED_THROUGHPUT = 0.98
NUM_TURNS = 9  # turns per length with `--new-tokens`
NUM_EVICTIONS = 8
"""Number of states that other requests must have evicted before the memory counts as full."""


@dataclass(frozen=True, slots=True)
class History:
    """Lengths (user tokens, reply tokens) of the turns before the measured turn, and the measured turn's new tokens."""

    turns: tuple[tuple[int, int], ...]
    new: int


@dataclass(frozen=True, slots=True)
class Scale:
    """Workload of a shape; the prompts of its batches cannot hit the cache."""

    history: History
    repetitions: int
    batch: int
    prompt: int
    reply: int
    rounds: int


_LONG_CHAT = History(((2900, 128), (2900, 128), (1100, 1024)), 256)
SCALES = {
    **dict.fromkeys(LARGE_SHAPES, Scale(_LONG_CHAT, 7, batch=32, prompt=2000, reply=128, rounds=8)),
    "small": Scale(_LONG_CHAT, 5, batch=8, prompt=2000, reply=32, rounds=4),
    "tiny": Scale(History(((700, 16), (700, 16), (300, 256)), 64), 5, batch=6, prompt=300, reply=24, rounds=8),
}
LIMITS = {
    **{name: {"max_requests": 32, "max_tokens": 16_384, "state_gb": 10.0, "kv_gb": 4.0} for name in LARGE_SHAPES},
    **{name: {"max_requests": 32, "max_tokens": 16_384, "state_gb": 4.0, "kv_gb": 6.0} for name in QWEN_SHAPES},
    "small": {"max_tokens": 16_384},
    "tiny": {"max_tokens": 4096},
}
"""Shapes of which several engines fit in memory, and a prompt in one step."""
CACHED_BLOCKS = {**dict.fromkeys(LARGE_SHAPES, 32), "small": 32, "tiny": 8}
"""Lengths of the history of turns of `--new-tokens`."""


@dataclass(frozen=True, slots=True)
class TurnLatency:
    """Latencies of the measured turns, by cache; numbers of tokens are medians.

    Args:
        first_tokens_ms: Time to first token in each repetition, in order.
        times_sooner: Speedup of the full cache over each other cache: median over the repetitions.
        room: Time to first token without room, relative to that with room: median over the repetitions; None if not
            measured.
        floor_ms: Time to read all weights, the history's KV and one state at the speed of a plain copy; None on a CPU.
    """

    prompt_tokens: int
    cached_tokens: dict[str, int]
    first_tokens_ms: dict[str, list[float]]
    times_sooner: dict[str, float]
    room: float | None = None
    floor_ms: float | None = None

    @property
    def first_token_ms(self) -> dict[str, float]:
        """Median time to first token over the repetitions, in milliseconds."""
        return {name: median(times) for name, times in self.first_tokens_ms.items()}


@dataclass(frozen=True, slots=True)
class ColdThroughput:
    """Tokens per second without hits, by cache; `ratio` is that of the full cache to no cache, median over rounds."""

    tokens_per_s: dict[str, float]
    ratio: float
    lowest: float
    highest: float


def later_turns(
    model: Any, shape: ServedShape, load: Sequence[Conversation], caches: Mapping[str, Mode] = CACHES
) -> TurnLatency:
    """Measure the last turn of each conversation with every cache; the first conversation is only a warmup."""
    milliseconds: dict[str, list[float]] = {name: [] for name in caches}
    cached: dict[str, list[int]] = {name: [] for name in caches}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(serving_engine(model, shape, mode)) for name, mode in caches.items()}
        if NO_ROOM in engines:
            fill_memory(engines[NO_ROOM], shape)
        prompts = {name: last_prompts(engine, load) for name, engine in engines.items() if name != "no cache"}
        prompts["no cache"] = prompts[FULL]
        for repetition in range(len(load)):
            for name in rotated(list(caches), repetition):
                first_token_s, skipped = first_token(engines[name], 10_000 + repetition, prompts[name][repetition])
                if repetition:
                    milliseconds[name].append(1e3 * first_token_s)
                    cached[name].append(skipped)
        prompt_tokens = int(median(len(prompt) for prompt in prompts[FULL][1:]))
        num_bytes = step_bytes(model, engines[FULL], prompt_tokens, hits_all=True)

    def times_of_full(name: str) -> float:
        return median(other / full for other, full in zip(milliseconds[name], milliseconds[FULL], strict=True))

    return TurnLatency(
        prompt_tokens,
        {name: int(median(counts)) for name, counts in cached.items()},
        milliseconds,
        {name: times_of_full(name) for name in REQUIRED if name in caches},
        times_of_full(NO_ROOM) if NO_ROOM in caches else None,
        floor_us(num_bytes) / 1e3 if torch.cuda.is_available() else None,
    )


def made_load(shape: ServedShape, scale: Scale) -> list[Conversation]:
    """Return a synthetic conversation for each repetition, and one more for the warmup."""
    rng = random.Random(0)
    *before, last = [*scale.history.turns, (scale.history.new, 2)]
    load = []
    for _ in range(scale.repetitions + 1):
        opening = tuple(some_tokens(rng, shape, rng.randrange(shape.block_size)))
        turns = [Turn(0.0, tuple(some_tokens(rng, shape, num_new)), num_reply) for num_new, num_reply in before]
        turns.append(Turn(0.0, tuple(some_tokens(rng, shape, last[0])), last[1]))
        load.append(Conversation(0.0, opening, tuple(turns)))
    return load


def recorded_load(path: Path, shape: ServedShape, scale: Scale) -> list[Conversation]:
    """Return conversations of a recorded load that have a later turn, as many as `made_load` returns.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file has an unknown format, or if too few of its conversations fit.
    """
    load = fitting(recorded_conversations(read_load(path), shape.vocab_size), shape.max_length)
    load = [conversation for conversation in load if len(conversation.turns) > 1][: scale.repetitions + 1]
    if len(load) < 2:
        raise ValueError(
            f"{path} must have two conversations of at least two turns that fit in {shape.max_length} tokens"
        )
    return load


def fill_memory(engine: Any, shape: ServedShape) -> None:
    """Serve unrelated prompts until they evict each other's states."""
    rng = random.Random(2)
    for request_id in itertools.count(1_000_000):
        run(engine, {request_id: some_tokens(rng, shape, 8 * shape.block_size)}, 1)
        if engine.context.snapshot().counters.states_evicted >= NUM_EVICTIONS:
            return


def last_prompts(engine: Any, load: Sequence[Conversation]) -> list[list[int]]:
    """Serve all turns except the last of each conversation, all conversations concurrently; return the last prompts."""
    texts = [[*conversation.prefix, *conversation.turns[0].new_tokens] for conversation in load]
    for number in range(max(len(conversation.turns) for conversation in load) - 1):
        going_on = [index for index, conversation in enumerate(load) if number + 1 < len(conversation.turns)]
        replies = run(
            engine,
            {len(load) * number + index: texts[index] for index in going_on},
            [load[index].turns[number].num_reply for index in going_on],
        )
        for index, reply in zip(going_on, replies, strict=True):
            texts[index] += [*reply, *load[index].turns[number + 1].new_tokens]
    return texts


def first_token(engine: Any, request_id: int, prompt: Sequence[int]) -> tuple[float, int]:
    """Run a request until its first token; return the seconds and the number of skipped prompt tokens."""
    began = time.perf_counter()
    send(engine, request_id, prompt, 2)
    while not engine.get_request(request_id).generated_tokens:
        engine.step_modern()
    seconds = time.perf_counter() - began
    run(engine, {}, 1)
    return seconds, engine.cached_tokens(request_id)


def cold_throughput(model: Any, shape: ServedShape, scale: Scale) -> ColdThroughput:
    """Measure batches that cannot hit the cache, with and without a cache.

    Raises:
        RuntimeError: If a prompt hit the cache.
    """
    seconds: dict[str, list[float]] = {"no cache": [], "full": []}
    rng = random.Random(1)
    with ExitStack() as stack:
        engines = {name: stack.enter_context(serving_engine(model, shape, MODES[name])) for name in seconds}
        for number in range(-1, scale.rounds):  # the first round is a warmup
            ids = range(scale.batch * (number + 1), scale.batch * (number + 2))
            prompts = {request_id: some_tokens(rng, shape, scale.prompt) for request_id in ids}
            for name in rotated(list(seconds), number):
                began = time.perf_counter()
                run(engines[name], prompts, scale.reply)
                if number >= 0:
                    seconds[name].append(time.perf_counter() - began)
        if engines["full"].context.counters.prompt_tokens_skipped:
            raise RuntimeError("prompts that share no text must not hit the cache, but one did")
    ratios = [without / full for without, full in zip(seconds["no cache"], seconds["full"], strict=True)]
    num_tokens = scale.batch * (scale.prompt + scale.reply)
    speeds = {name: num_tokens / median(times) for name, times in seconds.items()}
    return ColdThroughput(speeds, median(ratios), min(ratios), max(ratios))


def by_new_tokens(model: Any, shape: ServedShape, num_cached: int, lengths: Sequence[int]) -> dict[int, list[float]]:
    """Return the milliseconds to first token of turns of each length after cached tokens, measured in random order.

    Raises:
        RuntimeError: If a turn found fewer cached tokens.
    """
    rng = random.Random(0)
    history = some_tokens(rng, shape, num_cached)
    order = [length for length in lengths for _ in range(NUM_TURNS)]
    rng.shuffle(order)
    times: dict[int, list[float]] = {length: [] for length in lengths}
    with serving_engine(model, shape, MODES[FULL]) as engine:
        run(engine, {0: [*history, 0]}, 2)
        for number, length in enumerate(order, 1):
            seconds, found = first_token(engine, number, [*history, *some_tokens(rng, shape, length)])
            if found != num_cached:
                raise RuntimeError(f"a turn must find {num_cached} cached tokens, found {found}")
            times[length].append(1e3 * seconds)
    return times


def run(engine: Any, prompts: Mapping[int, Sequence[int]], num_tokens: int | Sequence[int]) -> list[list[int]]:
    """Run requests, and those that are already running, to their end; return the replies in the order of the prompts.

    Args:
        num_tokens: Number of tokens of each reply, or of all replies.

    Raises:
        RuntimeError: If a request fails.
    """
    lengths = [num_tokens] * len(prompts) if isinstance(num_tokens, int) else num_tokens
    for (request_id, prompt), length in zip(prompts.items(), lengths, strict=True):
        send(engine, request_id, prompt, length)
    replies: dict[int, list[int]] = {}
    while engine.has_unfinished_requests():
        for request in (record.merge() for record in engine.step_modern()["finished_request_records"]):
            if (reason := failure_reason(request)) is not None:
                raise RuntimeError(f"request {request.request_id} failed: {reason}")
            replies[request.request_id] = list(request.generated_tokens)
    return [replies[request_id] for request_id in prompts]


def rotated(names: list[str], number: int) -> list[str]:
    """Return the names, rotated to the left by `number`."""
    first = number % len(names)
    return names[first:] + names[:first]


def some_tokens(rng: random.Random, shape: ServedShape, count: int) -> list[int]:
    """Return random token ids."""
    return [rng.randrange(shape.vocab_size) for _ in range(count)]


def latency_table(latency: TurnLatency) -> str:
    """Return the times to first token of later turns as a Markdown table."""
    lines = [f"A later turn, {latency.prompt_tokens:,} prompt tokens including the history:", ""]
    medians = latency.first_token_ms
    lines += ["| engine | tokens without prefill | time to first token, ms | speedup of the full cache | goal |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for name, first_token_ms in medians.items():
        sooner = f"{latency.times_sooner[name]:.2f} | {REQUIRED[name]:g}" if name in latency.times_sooner else " | "
        lines.append(f"| {name} | {latency.cached_tokens[name]:,} | {first_token_ms:,.2f} | {sooner} |")
    if latency.room is not None:
        lines += ["", f"Without room, the time to first token is {latency.room:.3f} times that with room."]
    if latency.floor_ms is not None:
        times = medians[FULL] / latency.floor_ms
        lines += ["", f"Reading all weights, the history's KV and a state takes {latency.floor_ms:.2f} ms; the full "]
        lines[-1] += f"cache's first token comes in {times:.2f} times that."
    return "\n".join(lines)


def cold_sentence(cold: ColdThroughput) -> str:
    """Return the throughput of batches that cannot hit the cache as a sentence."""
    speeds = ", ".join(f"{name} {speed:,.0f}" for name, speed in cold.tokens_per_s.items())
    return (
        f"Without hits, prompt and generated tokens/s: {speeds}; with the cache {cold.ratio:.3f} of without "
        f"({cold.lowest:.3f} to {cold.highest:.3f}; required {REQUIRED_THROUGHPUT})."
    )


def table_of_lengths(times: Mapping[int, Sequence[float]]) -> str:
    """Return the times to first token by number of new tokens as a Markdown table."""
    lines = ["| new tokens | time to first token, ms | fastest, ms |", "|---:|---:|---:|"]
    lines += [f"| {length:,} | {median(ms):.2f} | {min(ms):.2f} |" for length, ms in times.items()]
    return "\n".join(lines)


def main() -> None:
    """Measure, print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape_arguments(parser)
    add_weights_arguments(parser)
    parser.add_argument("--recorded", type=Path, metavar="FILE", help="conversations of a recorded load")
    parser.add_argument("--only-cached", action="store_true", help="measure only the later turn with the full cache")
    parser.add_argument(
        "--caches", nargs="+", choices=CACHES, default=list(CACHES), help="caches with which the later turn is measured"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="measured batches without hits; 0: none")
    parser.add_argument(
        "--new-tokens",
        type=int,
        nargs="+",
        metavar="N",
        help="measure only turns with N new tokens after a cached history",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    shape, scale = shape_of(parser, arguments, LIMITS), SCALES[arguments.shape]
    try:
        load = recorded_load(arguments.recorded, shape, scale) if arguments.recorded else made_load(shape, scale)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if FULL not in arguments.caches:
        parser.error(f"--caches: needs {FULL!r}, which the others are compared with")
    if arguments.new_tokens:
        num_cached = CACHED_BLOCKS[arguments.shape] * shape.block_size
        with quiet_libraries(), own_warnings_hidden():
            times = by_new_tokens(model_of(shape), shape, num_cached, arguments.new_tokens)
        print(table_of_lengths(times))
        write(arguments.json, {"machine": describe_machine(), "weights": shape.weights, "first tokens, ms": times})
        return
    with quiet_libraries(), own_warnings_hidden():
        model = model_of(shape)
        names = (FULL, NO_ROOM) if arguments.only_cached else arguments.caches
        latency = later_turns(model, shape, load, {name: CACHES[name] for name in names})
        print(latency_table(latency), flush=True)
        rounds = scale.rounds if arguments.rounds is None else arguments.rounds
        is_cold_measured = rounds > 0 and not arguments.only_cached
        cold = cold_throughput(model, shape, replace(scale, rounds=rounds)) if is_cold_measured else None
    if cold is not None:
        print(f"\n{cold_sentence(cold)}")
    figures = {
        "machine": describe_machine(),
        "weights": shape.weights,
        "later turns": asdict(latency),
        "nothing hits": cold and asdict(cold),
    }
    write(arguments.json, figures)


def write(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write the results as JSON if a path is given."""
    if path:
        path.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
