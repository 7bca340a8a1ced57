"""Measure steps that process new turns of chats while other requests decode.

    PYTHONPATH=. python3 benchmarks/mixed_steps.py [--shape NAME] [--prompts N] [--json FILE]

The engine has room for more requests than decode. Prompts of each length arrive, one or several at a time, and are
processed in a single step together with all decoding requests. A line of the table has the median time of this step for
one length, and its spread. The time of a step of the decoding requests alone is printed before the table.
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
from step_cost import timed_step
from turn_latency import some_tokens

from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries

LENGTHS = (40, 90, 150, 200, 256, 300, 380, 440, 512, 600, 700, 850, 980)
REPEATED = 7
NUM_ALONE = 30
LIMITS = {
    "8b": {"state_gb": 12.0, "kv_gb": 6.0},
    "nano3": {"state_gb": 3.0, "kv_gb": 1.0},
    "super": {"state_gb": 8.0, "kv_gb": 3.0},
    "granite-small": {"state_gb": 6.0, "kv_gb": 3.0},
    "granite-tiny": {"state_gb": 6.0, "kv_gb": 3.0},
    "bamba": {"state_gb": 6.0, "kv_gb": 3.0},
    "small": {"state_gb": 0.5, "kv_gb": 1.0},
}


@dataclass(frozen=True, slots=True)
class MixedSteps:
    """Milliseconds, ascending, of steps that process prompts of `length` tokens each while other requests decode."""

    length: int
    ms: Sequence[float]
    graph_share: float


def mixed_steps(
    model: Any, shape: ServedShape, rows: int, most_rows: int, prompts: int, lengths: Sequence[int]
) -> tuple[float, list[MixedSteps]]:
    """Return the median milliseconds of a decode step alone, and the times of steps with prompts of each length.

    Args:
        prompts: Number of prompts that arrive together.

    Raises:
        RuntimeError: If the prompts were not processed in a single step.
    """
    rng = random.Random(0)
    shape = replace(shape, max_requests=most_rows)
    schedule = [length for _ in range(REPEATED) for length in lengths]
    rng.shuffle(schedule)
    reply = 4 * len(schedule) + 2 * NUM_ALONE + rows + 16
    times: dict[int, list[float]] = {length: [] for length in lengths}
    in_graphs = dict.fromkeys(lengths, 0)
    with serving_engine(model, shape, MODES["full"]) as engine:
        for index in range(rows):
            send(engine, index, some_tokens(rng, shape, 50 + index), reply)
        while engine.waiting_request_ids or not engine.context.is_decode_only():
            engine.step_modern()
        alone = [timed_step(engine) for _ in range(2 * NUM_ALONE)][NUM_ALONE:]
        for number, length in enumerate(schedule):
            for prompt in range(prompts):
                send(engine, rows + prompts * number + prompt, some_tokens(rng, shape, length), 1)
            seconds, in_graph = prompt_step(engine)
            times[length].append(1e3 * seconds)
            in_graphs[length] += in_graph
            engine.step_modern()
            if len(engine.context.running_requests) != rows:
                raise RuntimeError(f"prompts of {length} tokens must be processed in one step in which no request ends")
        while engine.has_unfinished_requests():
            engine.step_modern()
    found = [MixedSteps(length, sorted(ms), in_graphs[length] / REPEATED) for length, ms in times.items()]
    return 1e3 * median(alone), found


def prompt_step(engine: Any) -> tuple[float, bool]:
    """Run steps until prompts are processed; return the seconds of that step, and True if it ran as a CUDA graph."""
    counters = engine.context.counters
    before = counters.prefill_tokens_computed
    while True:  # an overlapped step without the prompts can come first
        graphs, seconds = counters.graph_steps, timed_step(engine)
        if counters.prefill_tokens_computed > before:
            return seconds, counters.graph_steps > graphs


def table(rows: int, prompts: int, alone_ms: float, found: Sequence[MixedSteps]) -> str:
    """Return the results as a Markdown table."""
    tokens = "prompt tokens" if prompts == 1 else f"tokens of each of {prompts} prompts"
    lines = [
        f"A step of {rows} decoding requests alone takes {alone_ms:.2f} ms.",
        "",
        f"| {tokens} | step, ms | fastest | slowest | graphs, % |",
        "|---:|---:|---:|---:|---:|",
    ]
    for one in found:
        figures = f"{median(one.ms):.2f} | {one.ms[0]:.2f} | {one.ms[-1]:.2f} | {100 * one.graph_share:.0f}"
        lines.append(f"| {one.length:,} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape_arguments(parser)
    add_weights_arguments(parser)
    parser.add_argument(
        "--rows", type=int, default=32, metavar="N", help="number of decoding requests; default: %(default)s"
    )
    parser.add_argument(
        "--most-rows",
        type=int,
        default=64,
        metavar="N",
        help="maximum number of running requests; default: %(default)s",
    )
    parser.add_argument(
        "--prompts", type=int, default=1, metavar="N", help="prompts that arrive together; default: %(default)s"
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=LENGTHS,
        metavar="N",
        help="prompt lengths in tokens; default: %(default)s",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    shape = shape_of(parser, arguments, LIMITS)
    rows, most_rows, prompts = arguments.rows, arguments.most_rows, arguments.prompts
    if rows < 1 or prompts < 1 or rows + prompts > most_rows:
        parser.error(f"--rows and --prompts must be at least 1 each, and --most-rows = {most_rows} together at most")
    with quiet_libraries(), own_warnings_hidden():
        alone_ms, found = mixed_steps(model_of(shape), shape, rows, most_rows, prompts, arguments.lengths)
    print(table(rows, prompts, alone_ms, found))
    if arguments.json:
        figures = {
            "machine": describe_machine(),
            "weights": shape.weights,
            "alone_ms": alone_ms,
            "mixed": [asdict(one) for one in found],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
