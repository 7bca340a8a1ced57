"""Measure decoding after a long history, and how much a long prompt slows down concurrent decoding.

    PYTHONPATH=. python3 benchmarks/long_context.py [--shape NAME] [--json FILE]

Long history: one request decodes alone after a long prompt, without drafts. The floor of its step is the time to move
the weights (of experts: those that one token uses), to read and write its state, and to read its KV, at the speed of a
plain copy in the same run.

Long prompt: requests decode without a prompt, then while a long prompt is prefilled. Each line of the table is an
engine with another `max_prompt_tokens_beside_decode`; a lower limit slows down decoding less but makes the prefill
longer. "Prefill" is the time from the arrival of the prompt to its first token, also relative to the first line.
Without other requests, the prefill takes the same time in all engines; this time is reported with the long history.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from loads.serving_engine import (
    LARGE_SHAPES,
    MODES,
    ServedShape,
    add_shape_arguments,
    add_weights_arguments,
    model_of,
    send,
    serving_engine,
    shape_of,
)
from measuring.machine import describe_machine
from measuring.serving_figures import nearest_rank
from step_cost import step_cost, timed_step
from turn_latency import first_token, some_tokens

from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries

NUM_UNDISTURBED = 30
NUM_WARMING = 5
ROWS = 32
LIMITS = {
    "8b": {"state_gb": 8.0, "kv_gb": 6.0},
    "nano3": {"state_gb": 8.0, "kv_gb": 3.0},
    "super": {"state_gb": 8.0, "kv_gb": 3.0},
    "small": {"state_gb": 0.5, "kv_gb": 3.0},
}
LENGTHS = {**dict.fromkeys(LARGE_SHAPES, 131_072), "small": 65_536, "tiny": 2048}
CHUNKS = {"tiny": (128, 32)}


@dataclass(frozen=True, slots=True)
class LongRow:
    """Time of a decode step of one request after a long history, and the seconds to prefill that history alone."""

    history: int
    prefill_s: float
    step_ms: float
    replay_ms: float | None
    floor_ms: float | None


@dataclass(frozen=True, slots=True)
class Disturbed:
    """Decoding during the prefill of a long prompt: milliseconds per token, and the seconds of the prefill."""

    chunk: int
    undisturbed_ms: float
    median_ms: float
    p99_ms: float
    graph_share: float
    prefill_s: float


def long_row(model: Any, shape: ServedShape, history: int) -> LongRow:
    """Measure one request after a prompt of `history` tokens."""
    with serving_engine(model, replace(shape, max_requests=1), MODES["full"]) as engine:
        prefill_s, _ = first_token(engine, 10**6, some_tokens(random.Random(history), shape, history))
        cost = step_cost(model, engine, shape, 1, history)
    return LongRow(history, prefill_s, cost.wall_ms, cost.replay_ms, cost.floor_ms)


def disturbed(model: Any, shape: ServedShape, rows: int, chunk: int, length: int) -> Disturbed:
    """Measure decode steps while a prompt of `length` tokens is prefilled, with at most `chunk` tokens per step."""
    limits = {"max_requests": max(shape.max_requests, rows + 1), "max_tokens": shape.max_tokens + rows}
    shape = replace(shape, **limits, prompt_tokens_with_decode=chunk)
    rng = random.Random(chunk)
    with serving_engine(model, shape, MODES["full"]) as engine:
        for index in range(rows):
            reply = NUM_WARMING + NUM_UNDISTURBED + 4 * length // chunk + rows * shape.block_size // chunk + 16
            send(engine, index, some_tokens(rng, shape, shape.block_size // 2), reply)
        while engine.waiting_request_ids or not engine.context.is_decode_only():
            engine.step_modern()
        undisturbed = [timed_step(engine) for _ in range(NUM_WARMING + NUM_UNDISTURBED)][NUM_WARMING:]
        counters = engine.context.counters
        steps, graphs = counters.steps, counters.graph_steps
        send(engine, rows, some_tokens(rng, shape, length), 2)
        with_prompt: list[float] = []
        while not engine.get_request(rows).generated_tokens:
            with_prompt.append(timed_step(engine))
        share = (counters.graph_steps - graphs) / (counters.steps - steps)
        while engine.has_unfinished_requests():
            engine.step_modern()
    found = [
        1e3 * seconds for seconds in (median(undisturbed), median(with_prompt), nearest_rank(sorted(with_prompt), 99))
    ]
    return Disturbed(chunk, *found, share, sum(with_prompt))


def table(lone: LongRow, lines: Sequence[Disturbed]) -> str:
    """Return the results as a Markdown table."""
    floor = " | " if lone.floor_ms is None else f"{lone.floor_ms:.3f} | {lone.floor_ms / lone.step_ms:.2f}"
    found = [
        "| history | prefill alone, s | step, ms | floor, ms | floor / step |",
        "|---:|---:|---:|---:|---:|",
        f"| {lone.history:,} | {lone.prefill_s:.2f} | {lone.step_ms:.3f} | {floor} |",
        "",
        "| prompt tokens per step | ms per token, undisturbed | during prefill: median | p99 | p99, times | prefill, s "
        "| relative | graphs, % |",
        "|" + "---:|" * 8,
    ]
    for one in lines:
        found.append(
            f"| {one.chunk:,} | {one.undisturbed_ms:.2f} | {one.median_ms:.2f} | {one.p99_ms:.2f} "
            f"| {one.p99_ms / one.undisturbed_ms:.2f} | {one.prefill_s:.2f} "
            f"| {one.prefill_s / lines[0].prefill_s:.2f} | {100 * one.graph_share:.0f} |"
        )
    return "\n".join(found)


def main() -> None:
    """Measure, print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape_arguments(parser)
    add_weights_arguments(parser)
    parser.add_argument("--chunks", type=int, nargs="+", metavar="N", help="default: 8192 4096 2048 1024 768 512")
    parser.add_argument("--graph-tokens", type=int, default=1024, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    length, shape = LENGTHS[arguments.shape], shape_of(parser, arguments, LIMITS)
    longest = length + max(shape.block_size, 256)
    shape = replace(shape, max_length=longest, prefill_graph_tokens=arguments.graph_tokens)
    chunks = arguments.chunks or CHUNKS.get(arguments.shape, (8192, 4096, 2048, 1024, 768, 512))
    rows = ROWS if arguments.shape != "tiny" else 4
    with quiet_libraries(), own_warnings_hidden():
        model = model_of(shape)
        lone = long_row(model, shape, length)
        lines = [disturbed(model, shape, rows, chunk, length) for chunk in chunks]
    print(table(lone, lines))
    if arguments.json:
        figures = {
            "machine": describe_machine(),
            "weights": shape.weights,
            "long_row": asdict(lone),
            "beside": [asdict(one) for one in lines],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
