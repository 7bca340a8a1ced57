"""Measure how many prompt tokens per second an engine processes, by the format of the weights.

    PYTHONPATH=. python3 benchmarks/prefill.py [--shape NAME] [--weights FORMAT ...] [--activation-dtype bf16] [--mtp]
        [--prompts N] [--length N] [--graph-tokens N] [--json FILE]

Prompts of one length, which share no prefix, are processed together in steps of at most 8,192 tokens, with a cache.
Each reply has one token. The time is the median of several such batches, from the first prompt to the last token. The
floor is the time of the FLOPs of all matmuls at the speed of a large bf16 matmul in the same run. With `--mtp`, each
model is measured again with a random MTP head, whose keys and values prompts then have too. Steps of prompts are
captured as CUDA graphs only with `--graph-tokens 8192`, because each engine then takes up to a minute to start.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from loads.known_head import random_head
from loads.serving_engine import (
    LARGE_SHAPES,
    MODES,
    ServedShape,
    add_shape_arguments,
    add_weights_arguments,
    model_of,
    serving_engine,
    shape_of,
)
from measuring.ceilings import matmul_tflops
from measuring.machine import describe_machine
from measuring.model_floors import prompt_flops
from step_cost import free_memory
from turn_latency import run, some_tokens

from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries
from megatron_mamba_cache.models.drafting.mtp_drafter import MTPDrafter

NUM_ROUNDS = 5
LIMITS = {name: {"state_gb": 6.0, "kv_gb": 6.0} for name in LARGE_SHAPES}


@dataclass(frozen=True, slots=True)
class Prefill:
    """Seconds of each batch of prompts, ascending; `floor_s` is None on a CPU."""

    weights: str
    has_head: bool
    weight_bytes: int
    num_tokens: int
    seconds: list[float]
    floor_s: float | None

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens per second: the median over the batches."""
        return self.num_tokens / median(self.seconds)


def prefill(shape: ServedShape, num_prompts: int, length: int, *, measures_head: bool = False) -> list[Prefill]:
    """Build the model, measure batches of prompts and free the model.

    Args:
        measures_head: If True, measure again with an MTP head.

    Raises:
        RuntimeError: If a prompt hit the cache.
    """
    model = model_of(shape)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    num_flops = num_prompts * prompt_flops(model, length)
    floor_s = num_flops / matmul_tflops() / 1e12 if torch.cuda.is_available() else None
    found = []
    for has_head in (False, True)[: 1 + measures_head]:
        drafter = MTPDrafter(model, random_head(shape.fields, model.config.params_dtype)) if has_head else None
        with serving_engine(model, shape, MODES["full"], int(has_head), drafter) as engine:
            seconds = _seconds(engine, shape, num_prompts, length)
        found.append(Prefill(shape.weights, has_head, num_bytes, num_prompts * length, seconds, floor_s))
    del model, drafter
    free_memory()
    return found


def _seconds(engine: Any, shape: ServedShape, num_prompts: int, length: int) -> list[float]:
    rng, seconds = random.Random(0), []
    for number in range(-1, NUM_ROUNDS):  # the first round is a warmup
        ids = range(num_prompts * (number + 1), num_prompts * (number + 2))
        prompts = {request_id: some_tokens(rng, shape, length) for request_id in ids}
        began = time.perf_counter()
        run(engine, prompts, 1)
        if number >= 0:
            seconds.append(time.perf_counter() - began)
    if engine.context.counters.prompt_tokens_skipped:
        raise RuntimeError("prompts that share no text must not hit the cache, but one did")
    return sorted(seconds)


def table(found: Sequence[Prefill]) -> str:
    """Return the results as a Markdown table; speeds are relative to the first line."""
    lines = [
        f"| weights | GB | s | fastest | slowest | tokens/s | / {found[0].weights} | floor / time |",
        "|---|" + "---:|" * 7,
    ]
    for one in found:
        times = " | ".join(f"{seconds:.3f}" for seconds in (median(one.seconds), one.seconds[0], one.seconds[-1]))
        floor = "" if one.floor_s is None else f"{one.floor_s / median(one.seconds):.2f}"
        speed = f"{one.tokens_per_s:,.0f} | {one.tokens_per_s / found[0].tokens_per_s:.3f}"
        name = f"{one.weights}{', MTP head' * one.has_head}"
        lines.append(f"| {name} | {one.weight_bytes / 1e9:.2f} | {times} | {speed} | {floor} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape_arguments(parser)
    add_weights_arguments(parser, "+")
    parser.add_argument("--mtp", action="store_true", help="also measure with an MTP head")
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--length", type=int, default=4096, metavar="N", help="tokens of each prompt; default: %(default)s"
    )
    parser.add_argument(
        "--graph-tokens", type=int, default=0, metavar="N", help="prompt tokens of the largest CUDA graph; default: 0"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    shape = replace(shape_of(parser, arguments, LIMITS), prefill_graph_tokens=arguments.graph_tokens)
    with quiet_libraries(), own_warnings_hidden():
        found: list[Prefill] = []
        for weights in arguments.weights:
            served = replace(shape, weights=weights)
            found += prefill(served, arguments.prompts, arguments.length, measures_head=arguments.mtp)
            print(*found[-1 - arguments.mtp :], sep="\n", flush=True)
    print(f"{arguments.prompts} prompts of {arguments.length:,} tokens:\n\n{table(found)}")
    if arguments.json:
        figures: dict[str, Any] = {"machine": describe_machine(), "activation_dtype": shape.activation_dtype}
        figures["prefill"] = [asdict(one) | {"tokens_per_s": one.tokens_per_s} for one in found]
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
