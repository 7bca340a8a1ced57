"""Measure the phases of a start without compiled kernels, and of later starts.

    PYTHONPATH=. python3 benchmarks/first_start.py [--shape NAME] [--starts N] [--json FILE]

Each start is a separate process. It builds a model with random weights and an engine with CUDA graphs, warms the engine
up, and serves prompts of several lengths. All starts share one folder for kernels that Triton and FlashInfer compile.
The folder is empty at first, so the first start compiles all kernels. Building an engine includes the compilation of
kernels and the capture of CUDA graphs. All starts must generate the same tokens.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loads.serving_engine import MODES, ServedShape, add_shape_arguments, config_of, model_of, shape_of
from measuring.machine import describe_machine
from turn_latency import run, some_tokens

from megatron_mamba_cache import build_engine
from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries

LENGTHS = (5, 40, 70, 300, 800, 1500, 3000)
NUM_REPLY = 24
LIMITS = {
    "8b": {"state_gb": 4.0, "kv_gb": 4.0},
    "nano3": {"state_gb": 3.0, "kv_gb": 1.0},
    "super": {"state_gb": 3.0, "kv_gb": 1.0},
}
FOLDERS = ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds of one start; compilation and graph capture are included in the times of the engine and the warmup."""

    model_s: float
    engine_s: float
    warmup_s: float
    compile_s: float
    capture_s: float
    num_kernels: int
    num_graphs: int
    graph_bytes: int
    tokens: list[list[int]]


def start(shape: ServedShape) -> Start:
    """Start in this process, which has not compiled any kernel yet."""
    began = time.perf_counter()
    model = model_of(shape)
    built = time.perf_counter()
    engine = build_engine(model, config_of(shape, MODES["full"]))
    ready = time.perf_counter()
    engine.warmup()
    warm = time.perf_counter()
    before = engine.context.snapshot()
    rng = random.Random(0)
    lengths = [length for length in LENGTHS if length + NUM_REPLY <= shape.max_length]
    tokens = run(engine, {index: some_tokens(rng, shape, length) for index, length in enumerate(lengths)}, NUM_REPLY)
    engine.close()
    return Start(
        built - began,
        ready - built,
        warm - ready,
        before.compile_seconds,
        before.capture_seconds,
        before.num_compiled_kernels,
        before.num_graphs,
        before.graph_bytes,
        tokens,
    )


def starts(arguments: Sequence[str], count: int) -> list[Start]:
    """Start `count` processes one after another, with these arguments of this script and a shared folder for kernels.

    Raises:
        RuntimeError: If the tokens of two starts differ.
        subprocess.CalledProcessError: If a start fails.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | dict.fromkeys(FOLDERS, folder)
        for _ in range(count):
            figures = Path(folder) / "start.json"
            command = [sys.executable, __file__, *arguments, "--here", "--json", str(figures)]
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            found.append(Start(**json.loads(figures.read_text())))
    if any(one.tokens != found[0].tokens for one in found):
        raise RuntimeError("all starts must generate the same tokens, but they differ")
    return found


def table(found: Sequence[Start]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| start | model, s | engine, s | warmup, s | Triton compilation, s | kernels | graph capture, s | graphs |"
    ]
    lines += ["|---|" + "---:|" * 7]
    for number, one in enumerate(found):
        name = "later" if number else "first"
        seconds = f"{one.model_s:.1f} | {one.engine_s:.1f} | {one.warmup_s:.1f} | {one.compile_s:.1f}"
        lines.append(f"| {name} | {seconds} | {one.num_kernels} | {one.capture_s:.1f} | {one.num_graphs} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    add_shape_arguments(parser)
    parser.add_argument("--starts", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--here", action="store_true", help="start once in this process, with the default folders for kernels"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    shape = shape_of(parser, arguments, LIMITS)
    document: dict[str, Any]
    if arguments.here:
        with quiet_libraries(), own_warnings_hidden():
            found = [start(shape)]
        document = asdict(found[0])
    else:
        found = starts(sys.argv[1:], arguments.starts)
        document = {"machine": describe_machine(), "starts": [asdict(one) for one in found]}
    print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
