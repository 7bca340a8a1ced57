"""Measure the decoding speed of one, two or more GPUs that share a model.

    PYTHONPATH=. python3 benchmarks/parallel_decode.py [--shape NAME] [--ranks 1 2 4]
        [--share tensors experts both] [--prompt-blocks 1 16] [--json FILE]

With "tensors" (tensor parallelism), the GPUs share all tensors and decode all requests together. With "experts" (expert
parallelism), they share the experts, and each GPU decodes some of the requests. With "both", pairs of GPUs share
tensors and decode some of the requests, and all pairs share the experts.

The script starts a process per GPU for the largest number of ranks, or uses the processes that torchrun has started.
Numbers of ranks are measured in turn in the same run; processes beyond the current number wait. Requests of equal
length decode together, without drafts. The time of a step is the median after some warmup steps, measured on the first
rank. Prompts have a number of KV blocks plus an eighth of a block, so that no block ends in the measured steps. Without
enough GPUs, ranks are processes on the CPU, and the times only show that the script runs.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from loads.serving_engine import MODES, ServedShape, add_shape_arguments, model_of, send, serving_engine, shape_of
from measuring.machine import describe_machine
from megatron.core import parallel_state
from step_cost import LIMITS, NUM_STEPS, NUM_WARMING, timed_step
from turn_latency import some_tokens

from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries
from megatron_mamba_cache.mcore.model_ranks import initialize_several_processes

SHARED = ("tensors", "experts", "both")


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Time of decode steps on some ranks; `graph_share` is the fraction of steps that replayed CUDA graphs."""

    num_ranks: int
    shared: str
    num_rows: int
    num_prompt: int
    step_ms: float
    tokens_per_s: float
    graph_share: float


def measure(
    num_ranks: int, shared: str, shape: ServedShape, num_rows: int, prompt_lens: Sequence[int]
) -> list[DecodeSpeed]:
    """Return the first rank's measurement for each prompt length.

    All processes must call this function; on ranks other than the first, it returns an empty list.
    """
    num_tensor_ranks = {"tensors": num_ranks, "experts": 1, "both": min(2, num_ranks)}[shared]
    num_expert_ranks = num_ranks // num_tensor_ranks
    if num_expert_ranks * num_tensor_ranks != num_ranks:
        raise ValueError(f"the number of ranks must be even to form pairs, found {num_ranks}")
    initialize_several_processes(num_tensor_ranks, 1, num_expert_ranks)
    try:
        speeds = []
        if dist.get_rank() < num_ranks:
            own_rows = num_rows // num_expert_ranks
            shape = replace(shape, max_requests=own_rows, max_tokens=max(shape.max_tokens, own_rows))
            model = model_of(shape)
            for num_prompt in prompt_lens:
                with serving_engine(model, shape, MODES["full"]) as engine:
                    step_ms, graph_share = decode_step(engine, shape, own_rows, num_prompt)
                pace = num_rows / step_ms * 1e3
                speeds.append(DecodeSpeed(num_ranks, shared, num_rows, num_prompt, step_ms, pace, graph_share))
        dist.barrier()
        return speeds
    finally:
        parallel_state.destroy_model_parallel()


def decode_step(engine: Any, shape: ServedShape, num_rows: int, num_prompt: int) -> tuple[float, float]:
    """Return the milliseconds of a decode step, and the fraction of decode steps that ran as CUDA graphs."""
    rng = random.Random(1000 * num_rows + parallel_state.get_data_parallel_rank())
    num_prefills = num_rows // max(1, (shape.max_tokens - num_rows) // num_prompt) + 1
    for index in range(num_rows):
        num_tokens = num_prefills + NUM_WARMING + NUM_STEPS + 2
        send(engine, index, some_tokens(rng, shape, num_prompt), num_tokens)
    while engine.waiting_request_ids or not engine.context.is_decode_only():
        engine.step_modern()
    counters = engine.context.counters
    graphs_before = counters.graph_steps
    times = [timed_step(engine) for _ in range(NUM_WARMING + NUM_STEPS)][NUM_WARMING:]
    if len(engine.context.running_requests) != num_rows:
        raise RuntimeError(f"only {len(engine.context.running_requests)} of {num_rows} requests decode; raise --kv-gb")
    graph_share = (counters.graph_steps - graphs_before) / (NUM_WARMING + NUM_STEPS)
    while engine.has_unfinished_requests():
        engine.step_modern()
    return 1e3 * median(times), graph_share


def table(speeds: Sequence[DecodeSpeed]) -> str:
    """Return the results as a Markdown table."""
    heads = "GPUs | parallelism | requests | prompt tokens | step, ms | tokens/s | speedup over fewest GPUs | graphs, %"
    lines = [f"| {heads} |", "|" + "---:|" * 8]
    for speed in speeds:
        fewest = next(other for other in speeds if other.num_prompt == speed.num_prompt)
        share = speed.tokens_per_s / fewest.tokens_per_s
        pace = f"{speed.step_ms:.3f} | {speed.tokens_per_s:,.1f} | {share:.3f}"
        of = (
            f"{speed.num_ranks} | {speed.shared if speed.num_ranks > 1 else ''} | {speed.num_rows} | {speed.num_prompt}"
        )
        lines.append(f"| {of} | {pace} | {100 * speed.graph_share:.0f} |")
    return "\n".join(lines)


def start_ranks(num_ranks: int) -> int:
    """Run this script once per rank, as torchrun does; return the first nonzero exit status, or 0."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    cards = {} if torch.cuda.device_count() >= num_ranks else {"CUDA_VISIBLE_DEVICES": ""}
    launch = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={"OMP_NUM_THREADS": "1", **os.environ, **cards, **launch, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num_ranks)
    ]
    return next((status for status in [rank.wait() for rank in ranks] if status), 0)


def main() -> int:
    """Measure, print Markdown and write JSON, on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape_arguments(parser)
    parser.add_argument(
        "--ranks", nargs="+", type=int, metavar="N", help="default: 1, 2 and 4, up to the number of GPUs"
    )
    parser.add_argument("--share", nargs="+", choices=SHARED, default=["tensors"], help="default: tensors")
    parser.add_argument(
        "--rows", type=int, default=64, metavar="N", help="number of decoding requests; default: %(default)s"
    )
    parser.add_argument(
        "--prompt-blocks", nargs="+", type=int, default=[1], metavar="N", help="prompt lengths in KV blocks; default: 1"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    num_cards = torch.cuda.device_count()
    sizes = arguments.ranks or [size for size in (1, 2, 4) if size <= max(2, num_cards)]
    if "RANK" not in os.environ:
        return start_ranks(max(sizes))
    if num_cards:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    shape = shape_of(parser, arguments, LIMITS)
    with quiet_libraries(), own_warnings_hidden():
        prompt_lens = [count * shape.block_size + shape.block_size // 8 for count in arguments.prompt_blocks]
        ways = [
            (size, shared) for size in sizes for shared in arguments.share if size > 1 or shared == arguments.share[0]
        ]
        speeds = [speed for way in ways for speed in measure(*way, shape, arguments.rows, prompt_lens)]
    if dist.get_rank() == 0:
        print(table(speeds))
        if arguments.json:
            figures = {"machine": describe_machine(), "decode": [asdict(speed) for speed in speeds]}
            arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
