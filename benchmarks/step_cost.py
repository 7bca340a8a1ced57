"""Measure decode steps of few and many requests, on the host and the GPU, and the maximum gain of drafts.

    PYTHONPATH=. python3 benchmarks/step_cost.py [--shape NAME] [--weights FORMAT ...] [--draft-states FORM ...]
        [--spread N] [--waiting N] [--no-drafts] [--record-routes] [--host-cache-gb G] [--json FILE]

Steps: requests decode together, without drafts. Their prompt lengths differ by up to 15 tokens, so that requests with
replayed states fold them in different steps, as under a real load. With `--spread`, lengths differ by up to N tokens,
so that requests reach the ends of KV blocks one by one. With `--waiting`, some requests wait in the queue until a
running request ends. The columns are:

- Wall time: mean over the 16 steps of a ring's period; each of them is the median of three steps at intervals of 16. It
  thus includes every fold, but not a step in which the host was delayed by other work. With `--spread`, it is the mean
  of all steps.
- Host work: wall time minus the time in which the host waits for tokens. Much of it overlaps with the GPU.
- GPU time: time of the last step's CUDA graphs, replayed back to back: kernels and the short pauses between them. With
  few requests, this step may not include a fold.
- Idle: wall time minus GPU time, in which the GPU waits for the host.
- Kernel time: measured with torch's profiler over the same number of steps, without pauses (`gpu_time`).
- Floor: the bytes of weights, states, KV and the experts used on average, at the speed of a plain copy in this run.
- "µs a row": least-squares slope of a time over the number of requests.

On a CPU, there are only the wall time and its slope.

Drafts: decode-only steps of 8 requests, without drafts, with three drafts that are always correct, and with three
drafts that are always wrong. The drafter knows the replies. In bf16, a verify step may round differently from a
single-token step, so the model gets weights with which each token is nearly certain (`sure_model`). The three cases
alternate; a line of the table shows the middle round.

Every mode in `--draft-states` is measured in turn with the same model. With `--host-cache-gb`, each mode is measured
without and with a host tier. With several formats in `--weights`, one model after the other is built, and the last
table has the ratios of their step times to those of the first format.
"""

import argparse
import gc
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from loads.recorded_drafts import RightDrafter, WrongDrafter
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
from loads.sure_model import make_sure
from measuring.ceilings import floor_us
from measuring.gpu_time import GpuTimer, NoGpuTimer, gpu_seconds, gpu_timer, noted_waits
from measuring.machine import describe_machine
from measuring.model_floors import step_bytes
from turn_latency import rotated, some_tokens

from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries
from megatron_mamba_cache.step.logits import Draws

ROWS = (1, 8, 64, 128, 256)
PERIOD = 16
"""Steps after which all replayed requests have folded once: the default ring."""
NUM_STEPS = 3 * PERIOD
NUM_WARMING = 5
DRAFT_ROWS = 8
NUM_DRAFTS = 3
NUM_REPLY = 256
NUM_ROUNDS = 3
LIMITS = {
    "8b": {"state_gb": 8.0, "kv_gb": 8.0},
    "nano3": {"state_gb": 8.0, "kv_gb": 4.0},
    "super": {"state_gb": 8.0, "kv_gb": 4.0},
    "qwen36-27b": {"state_gb": 8.0, "kv_gb": 8.0},
    "qwen36-35b": {"state_gb": 8.0, "kv_gb": 4.0},
    "qwen3-next": {"state_gb": 8.0, "kv_gb": 4.0},
    "small": {"state_gb": 0.5},
}
"""Live states take the memory; cached ones are not looked up."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Times of a decode step in milliseconds; only wall time on a CPU, and no `replay_ms` without CUDA graphs."""

    num_rows: int
    wall_ms: float
    host_ms: float | None = None
    replay_ms: float | None = None
    kernels_ms: float | None = None
    floor_ms: float | None = None

    @property
    def idle_share(self) -> float | None:
        """Fraction of the step in which the GPU is idle; without CUDA graphs, this includes pauses between kernels."""
        gpu_ms = self.kernels_ms if self.replay_ms is None else self.replay_ms
        return None if gpu_ms is None else max(0.0, 1 - gpu_ms / self.wall_ms)


@dataclass(frozen=True, slots=True)
class Line:
    """Linear fit `at_0 + slope * rows` by least squares."""

    at_0: float
    slope: float

    @staticmethod
    def through(xs: Sequence[float], ys: Sequence[float]) -> "Line":
        """Fit the line to two or more points."""
        slope, at_0 = np.polyfit(xs, ys, 1)
        return Line(float(at_0), float(slope))


@dataclass(frozen=True, slots=True)
class DraftSpeed:
    """Speed of decode steps with one drafter; `accepted` is the fraction of its draft tokens that were accepted."""

    tokens_per_s: float
    tokens_per_step: float
    accepted: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one model in one mode of draft states; `weight_bytes` is the size of its parameters."""

    weights: str
    weight_bytes: int
    mode: str
    costs: list[StepCost]
    drafts: dict[str, DraftSpeed]


@dataclass(frozen=True, slots=True)
class Recording:
    """Replies of the requests, and the speed of their steps."""

    replies: dict[int, list[int]]
    speed: DraftSpeed


def step_costs(
    model: Any,
    shape: ServedShape,
    rows: Sequence[int],
    num_prompt: int,
    spread: int | None = None,
    num_waiting: int = 0,
) -> list[StepCost]:
    """Measure decode steps for each number of requests; in the largest case, `num_waiting` more requests wait."""
    shape = replace(shape, max_requests=max(rows), max_tokens=max(shape.max_tokens, max(rows)))
    with serving_engine(model, shape, MODES["full"]) as engine:
        return [
            step_cost(model, engine, shape, num_rows, num_prompt, spread, num_waiting if num_rows == max(rows) else 0)
            for num_rows in rows
        ]


def step_cost(
    model: Any,
    engine: Any,
    shape: ServedShape,
    num_rows: int,
    num_prompt: int,
    spread: int | None = None,
    num_waiting: int = 0,
) -> StepCost:
    """Measure decode steps of requests whose prompts share no prefix and differ in length by up to `spread` tokens."""
    rng = random.Random(num_rows)
    # The first requests decode while the others are prefilled, so a step has room for fewer prompt tokens.
    longest = num_prompt + (PERIOD if spread is None else spread)
    num_prefills = num_rows // max(1, (shape.max_tokens - num_rows) // longest) + 1
    num_tokens = num_prefills + NUM_WARMING + 2 * NUM_STEPS + 2
    for index in range(num_rows + num_waiting):
        more = index % PERIOD if spread is None else rng.randrange(spread + 1)
        send(engine, 1000 * num_rows + index, some_tokens(rng, shape, num_prompt + more), num_tokens)
    while len(engine.waiting_request_ids) > num_waiting or any(
        running.is_prefilling for running in engine.context.running_requests
    ):
        engine.step_modern()
    for _ in range(NUM_WARMING):
        engine.step_modern()
    if len(engine.context.running_requests) != num_rows:
        raise RuntimeError(f"only {len(engine.context.running_requests)} of {num_rows} requests decode; raise --kv-gb")
    with noted_waits() as waits:
        times = [timed_step(engine) for _ in range(NUM_STEPS)]
    cost = StepCost(num_rows, 1e3 * (mean_of_periods(times) if spread is None else fmean(times)))
    if waits:
        cost = replace(cost, host_ms=1e3 * (median(times) - median(waits)), **gpu_times(engine))
    while engine.has_unfinished_requests():
        engine.step_modern()
    if waits:
        cost = replace(cost, floor_ms=floor_us(step_bytes(model, engine, num_prompt, num_rows)) / 1e3)
    return cost


def mean_of_periods(seconds: Sequence[float]) -> float:
    """Return the mean over the steps of a period, each step's time being the median over all periods."""
    return fmean(median(seconds[first::PERIOD]) for first in range(PERIOD))


def gpu_times(engine: Any) -> dict[str, float | None]:
    """Return the GPU times of a decode step; the engine's tokens are meaningless afterwards."""
    timer = gpu_timer(NUM_STEPS)
    timer.start()
    while not timer.add_step(timed_step(engine)):
        pass
    kernels_ms = 1e3 * timer.result().busy_s / NUM_STEPS
    context = engine.context
    graph = context.graphs.fitting(context.running_requests) if context.graphs is not None else None
    if graph is None:
        return {"kernels_ms": kernels_ms}
    seconds = gpu_seconds(lambda: (graph.forward(), graph.verify(Draws.BEST)), NUM_STEPS)
    return {"kernels_ms": kernels_ms, "replay_ms": 1e3 * seconds}


def timed_step(engine: Any) -> float:
    """Run a step and return its seconds."""
    began = time.perf_counter()
    engine.step_modern()
    return time.perf_counter() - began


def draft_speeds(model: Any, shape: ServedShape, num_prompt: int, num_reply: int) -> dict[str, DraftSpeed]:
    """Measure the same prompts without drafts, with correct drafts and with wrong drafts.

    The model gets `sure_model` weights.
    """
    make_sure(model)
    shape = replace(shape, max_requests=DRAFT_ROWS, num_graphs=min(shape.num_graphs, 1))
    rng = random.Random(0)
    prompts = [some_tokens(rng, shape, num_prompt) for _ in range(DRAFT_ROWS)]
    replies = record(model, shape, prompts, num_reply, None).replies
    drafters = {
        "no drafts": None,
        "right drafts": RightDrafter(replies),
        "wrong drafts": WrongDrafter(replies, shape.vocab_size),
    }
    speeds: dict[str, list[DraftSpeed]] = {name: [] for name in drafters}
    for number in range(NUM_ROUNDS):
        for name in rotated(list(drafters), number):
            speeds[name].append(record(model, shape, prompts, num_reply, drafters[name]).speed)
    return {name: middle(found) for name, found in speeds.items()}


def middle(speeds: Sequence[DraftSpeed]) -> DraftSpeed:
    """Return the median of an odd number of runs, by speed."""
    return sorted(speeds, key=lambda speed: speed.tokens_per_s)[len(speeds) // 2]


def record(
    model: Any, shape: ServedShape, prompts: Sequence[Sequence[int]], num_reply: int, drafter: RightDrafter | None
) -> Recording:
    """Serve the prompts concurrently and time the decode-only steps."""
    num_drafts = NUM_DRAFTS if drafter else 0
    with serving_engine(model, shape, MODES["full"], num_drafts, drafter) as engine:
        return record_on(engine, prompts, num_reply)


def record_on(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    num_reply: int,
    first_id: int = 0,
    timer: GpuTimer | NoGpuTimer | None = None,
) -> Recording:
    """Serve the prompts concurrently and time the decode-only steps; request ids start at `first_id`.

    Args:
        timer: Profiles steps, after the first few ones.
    """
    timer = timer or NoGpuTimer()
    for index, prompt in enumerate(prompts):
        send(engine, first_id + index, prompt, num_reply)
    while engine.waiting_request_ids or not engine.context.is_decode_only():
        engine.step_modern()
    counters = engine.context.counters
    before, drafted = counters.decode_rows + counters.accepted_tokens, counters.draft_tokens
    accepted, seconds, num_steps = counters.accepted_tokens, 0.0, 0
    replies: dict[int, list[int]] = {}
    while engine.has_unfinished_requests():
        if num_steps == NUM_WARMING:
            timer.start()
        began = time.perf_counter()
        records = engine.step_modern()["finished_request_records"]
        seconds += time.perf_counter() - began
        num_steps += 1
        if timer.add_step(time.perf_counter() - began):
            timer.stop()
        replies |= {request.request_id - first_id: list(request.generated_tokens) for request in map(_merged, records)}
    num_tokens = counters.decode_rows + counters.accepted_tokens - before
    drafted, accepted = counters.draft_tokens - drafted, counters.accepted_tokens - accepted
    return Recording(replies, DraftSpeed(num_tokens / seconds, num_tokens / num_steps, accepted / max(drafted, 1)))


def _merged(record: Any) -> Any:
    return record.merge()


def ratio_table(found: Sequence[Measured]) -> str:
    """Return the step times relative to those of the first format in the same mode; empty for one format."""
    first = {one.mode: one for one in reversed(found)}
    others = [one for one in found if one.weights != first[one.mode].weights]
    if not others:
        return ""
    heads = [f"{one.weights} / {first[one.mode].weights}, {one.mode}" for one in others]
    lines = [f"| requests | {' | '.join(heads)} |", "|" + "---:|" * (1 + len(heads))]
    for number, cost in enumerate(others[0].costs):
        ratios = (one.costs[number].wall_ms / first[one.mode].costs[number].wall_ms for one in others)
        lines.append(f"| {cost.num_rows} | {' | '.join(f'{ratio:.3f}' for ratio in ratios)} |")
    return "\n".join(lines)


def table(costs: Sequence[StepCost], drafts: dict[str, DraftSpeed]) -> str:
    """Return Markdown tables, without columns that this machine lacks and without drafts if they were not measured."""
    heads = ["requests", "step, ms"]
    has_gpu = costs[0].kernels_ms is not None
    if has_gpu:
        heads += ["host's work, ms", "GPU's replay, ms", "of that kernels, ms", "GPU idle, %"]
        heads += ["floor, ms", "of the floor"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---:|" * len(heads)]
    for cost in costs:
        cells = [f"{cost.num_rows}", f"{cost.wall_ms:.3f}"]
        if has_gpu:
            replay = "" if cost.replay_ms is None else f"{cost.replay_ms:.3f}"
            cells += [f"{cost.host_ms:.3f}", replay, f"{cost.kernels_ms:.3f}", f"{100 * cost.idle_share:.1f}"]
            cells += [f"{cost.floor_ms:.3f}", f"{cost.floor_ms / cost.wall_ms:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        *(f"{name}: {line.at_0:.3f} ms and {1e3 * line.slope:.2f} µs a row." for name, line in lines_of(costs).items()),
    ]
    if not drafts:
        return "\n".join(lines)
    lines += [
        "",
        f"| {DRAFT_ROWS} requests | tokens/s | relative to no drafts | tokens per step | accepted, % |",
        "|---|---:|---:|---:|---:|",
    ]
    plain = drafts["no drafts"].tokens_per_s
    for name, speed in drafts.items():
        share = f"{100 * speed.accepted:.1f}" if name != "no drafts" else ""
        pace = f"{speed.tokens_per_s:,.1f} | {speed.tokens_per_s / plain:.3f} | {speed.tokens_per_step:.2f}"
        lines.append(f"| {name} | {pace} | {share} |")
    return "\n".join(lines)


def lines_of(costs: Sequence[StepCost]) -> dict[str, Line]:
    """Return how wall time and host work grow with the number of requests, in milliseconds; {} for one number."""
    rows = [cost.num_rows for cost in costs]
    grown = {"A step": [cost.wall_ms for cost in costs]}
    if costs[0].host_ms is not None:
        grown["The host's work"] = [cost.host_ms for cost in costs]
    return {name: Line.through(rows, values) for name, values in grown.items()} if len(costs) > 1 else {}


def main() -> None:
    """Measure, print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape_arguments(parser)
    add_weights_arguments(parser, "+")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), metavar="N", help="default: 1 8 64 128 256")
    parser.add_argument(
        "--draft-states", nargs="+", choices=("auto", "replay", "window"), default=["auto"], metavar="FORM"
    )
    parser.add_argument("--spread", type=int, metavar="N", help="maximum difference of prompt lengths, in tokens")
    parser.add_argument(
        "--waiting", type=int, default=0, metavar="N", help="requests that wait for a running request to end"
    )
    parser.add_argument("--no-drafts", action="store_true", help="measure steps only")
    parser.add_argument(
        "--host-cache-gb", type=float, metavar="G", help="GiB of host memory; steps with a host tier are also measured"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    shape = shape_of(parser, arguments, LIMITS)
    if arguments.host_cache_gb is not None and shape.cache_gb is None:
        parser.error("--host-cache-gb needs --cache-gb")
    shapes = {form: replace(shape, draft_states=form) for form in arguments.draft_states}
    if arguments.host_cache_gb is not None:
        host = {"host_cache_gb": arguments.host_cache_gb}
        shapes = {
            f"{form}{tier}": replace(one, **added)
            for form, one in shapes.items()
            for tier, added in (("", {}), (" with a host tier", host))
        }
    found: list[Measured] = []
    with quiet_libraries(), own_warnings_hidden():
        for weights in arguments.weights:
            found += measured({mode: replace(one, weights=weights) for mode, one in shapes.items()}, arguments)
    for one in found:
        size = f"Weights: {one.weights}, {one.weight_bytes / 1e9:.2f} GB"
        print(f"{size}. Draft states: {one.mode}.\n\n{table(one.costs, one.drafts)}\n")
    if ratios := ratio_table(found):
        print(f"Ratio of step times:\n\n{ratios}\n")
    if arguments.json:
        figures: dict[str, Any] = {weights: {} for weights in arguments.weights}
        for one in found:
            figures[one.weights][one.mode] = {"weight_bytes": one.weight_bytes} | figures_of(one.costs, one.drafts)
        arguments.json.write_text(json.dumps({"machine": describe_machine(), "weights": figures}, indent=2) + "\n")


def measured(shapes: dict[str, ServedShape], arguments: argparse.Namespace) -> list[Measured]:
    """Build one model, measure it in each mode of draft states, and free it.

    Args:
        shapes: Of one model, by the name of the mode.
    """
    shape = next(iter(shapes.values()))
    model = model_of(shape)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    num_prompt = shape.block_size * 9 // 8  # so that no block ends in the measured steps
    costs = [
        step_costs(model, one, arguments.rows, num_prompt, arguments.spread, arguments.waiting)
        for one in shapes.values()
    ]
    drafts = [{} if arguments.no_drafts else draft_speeds(model, one, num_prompt, NUM_REPLY) for one in shapes.values()]
    del model
    free_memory()
    return [Measured(shape.weights, num_bytes, *one) for one in zip(shapes, costs, drafts, strict=True)]


def free_memory() -> None:
    """Return the memory of deleted models to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def figures_of(costs: Sequence[StepCost], drafts: dict[str, DraftSpeed]) -> dict[str, Any]:
    """Return the measurements of one draft-state mode as JSON types."""
    return {
        "steps": [asdict(cost) | {"idle_share": cost.idle_share} for cost in costs],
        "growth, ms": {name: asdict(line) for name, line in lines_of(costs).items()},
        "drafts": {name: asdict(speed) for name, speed in drafts.items()},
    }


if __name__ == "__main__":
    main()
