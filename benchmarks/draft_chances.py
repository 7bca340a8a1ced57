"""Measure the gain of drafts by their accuracy, with a fixed number of drafts and with adaptive drafting.

    PYTHONPATH=. python3 benchmarks/draft_chances.py [--shape NAME] [--rows N ...] [--chances P ...] [--drafts K ...]
        [--mtp] [--json FILE]

The drafter knows each reply. Each of its draft tokens is correct with a given probability, independently of the others,
and drafting takes no time, as with prompt lookup. The model has random weights with which the next token is nearly
certain (see `loads/sure_model.py`). The prompts differ by up to one KV block. The same prompts are served concurrently
without drafts, with K drafts per request in every step, and with adaptive drafting. Decode steps are timed. `--shape
tiny` runs on a CPU.

With `--mtp`, a random MTP head of the model's sizes drafts before each step, and its drafts are replaced by these. "Of
bound" is then the speedup of "always", divided by the one that follows from bytes alone: the expected number of tokens
per step, times the bytes of a step without drafts, divided by those of a verify step and of the head's passes. On a
GPU, "GPU idle" is the idle fraction of some profiled steps of "always", in an extra run of the first chance.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loads.known_head import KnownHeadDrafter, random_head
from loads.recorded_drafts import ChanceDrafter
from loads.serving_engine import MODES, ServedShape, add_shape_arguments, model_of, serving_engine, shape_of
from loads.sure_model import make_sure
from measuring.gpu_time import gpu_timer
from measuring.machine import describe_machine
from measuring.model_floors import experts_bytes, step_bytes
from step_cost import DraftSpeed, Recording, record_on
from turn_latency import some_tokens

from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries

ROWS = (1, 8, 32)
CHANCES = (0.9, 0.7, 0.5, 0.3, 0.15, 0.0)
NUM_GRAPHS = 5
PROMPT, REPLY = 288, 160
NUM_PROFILED = 16
NUM_FIRST = 8
"""Tokens of the first replies of an engine, which are not timed."""
RUN_LENGTH = 10_000
"""Numbers of requests in a run; each has its own."""


@dataclass(frozen=True, slots=True)
class ChanceSpeeds:
    """Decoding speeds of some concurrent requests, for one number of drafts and one accuracy."""

    num_rows: int
    num_drafts: int
    chance: float
    without: DraftSpeed
    always: DraftSpeed
    adaptive: DraftSpeed
    most: float | None = None  # speedup that follows from bytes alone
    idle_share: float | None = None  # fraction of the steps of `always` in which the GPU is idle


@dataclass(frozen=True, slots=True)
class Drafted:
    """A model with `make_sure` weights, the head that drafts, or None, and the numbers of drafts to measure."""

    model: Any
    shape: ServedShape
    head: Any
    counts: Sequence[int]

    def drafter(self, known: ChanceDrafter) -> Any:
        """Return the drafter of an engine."""
        return known if self.head is None else KnownHeadDrafter(self.model, self.head, known)

    def most(self, engine: Any, drafter: Any, rows: int, num_drafts: int, chance: float) -> float | None:
        """Return the speedup that follows from bytes alone; None without a head."""
        if self.head is None:
            return None
        plain = step_bytes(self.model, engine, PROMPT + REPLY // 2, rows)
        listed = len(drafter.mtp_chain.short_list or range(self.model.vocab_size))
        verify = plain + experts_bytes(self.model, rows * (1 + num_drafts)) - experts_bytes(self.model, rows)
        of_head = sum(weight.nbytes for weight in self.head.parameters()) - experts_bytes(self.head)
        chain = num_drafts * (of_head + experts_bytes(self.head, rows) + listed * self.model.config.hidden_size * 2)
        return sum(chance**index for index in range(1 + num_drafts)) * plain / (verify + chain)


def chance_speeds(drafted: Drafted, row_counts: Sequence[int], chances: Sequence[float]) -> Iterator[ChanceSpeeds]:
    """Measure the model for each number of requests, and yield the results so far."""
    make_sure(drafted.model)
    for rows in row_counts:
        yield from _speeds(drafted, rows, chances)


def _speeds(drafted: Drafted, rows: int, chances: Sequence[float]) -> list[ChanceSpeeds]:
    model, shape = drafted.model, drafted.shape
    num_graphs = min(shape.num_graphs, NUM_GRAPHS)
    shape = replace(shape, max_requests=rows, num_graphs=num_graphs, prefill_graph_tokens=0)  # decode steps only
    rng = random.Random(rows)
    prompts = [some_tokens(rng, shape, PROMPT + rng.randrange(shape.block_size)) for _ in range(rows)]
    # Not timed, because the first engine of a process can be 2 % faster on a GPU than later ones.
    replies = _without_drafts(model, shape, prompts).replies
    found = []
    for num_drafts in drafted.counts:
        most: list[float | None] = []
        idle_share, speeds = None, {False: [], True: []}
        for adaptive in speeds:
            known, served = ChanceDrafter(shape.vocab_size, RUN_LENGTH), replace(shape, adaptive_drafts=adaptive)
            known.replies, known.chance = replies, chances[0]
            drafter = drafted.drafter(known)
            with serving_engine(model, served, MODES["full"], num_drafts, drafter) as engine:
                most = [drafted.most(engine, drafter, rows, num_drafts, chance) for chance in chances]
                record_on(engine, prompts, NUM_FIRST, RUN_LENGTH * len(chances))
                for number, known.chance in enumerate(chances):
                    run = record_on(engine, prompts, REPLY, RUN_LENGTH * number)
                    if run.replies != replies:
                        raise RuntimeError(f"drafts of accuracy {known.chance} changed one of {rows} replies")
                    speeds[adaptive].append(run.speed)
                if not adaptive:
                    known.chance, timer = chances[0], gpu_timer(NUM_PROFILED)
                    record_on(engine, prompts, REPLY, RUN_LENGTH * (len(chances) + 1), timer)
                    times = timer.result()
                    idle_share = None if times is None else times.idle_share
        found.append((num_drafts, *speeds.values(), most, idle_share))
    without = _without_drafts(model, shape, prompts).speed
    return [
        ChanceSpeeds(rows, num_drafts, chance, without, one, other, bound, idle_share)
        for num_drafts, always, adaptive, most, idle_share in found
        for chance, one, other, bound in zip(chances, always, adaptive, most, strict=True)
    ]


def _without_drafts(model: Any, shape: ServedShape, prompts: Sequence[Sequence[int]]) -> Recording:
    with serving_engine(model, shape, MODES["full"]) as engine:
        record_on(engine, prompts, REPLY)  # the GPU lowers its clock within the first second
        return record_on(engine, prompts, REPLY, RUN_LENGTH)


HEAD = """\
| requests | K | correct | plain, tokens/s | always | tokens/step | adaptive | tokens/step | of bound | GPU idle, % |
|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"""


def line_of(one: ChanceSpeeds) -> str:
    """Return a line of the Markdown table."""
    without = one.without.tokens_per_s
    cells = [
        f"{speed.tokens_per_s / without:.3f} | {speed.tokens_per_step:.2f}" for speed in (one.always, one.adaptive)
    ]
    share = "" if one.most is None else f"{one.always.tokens_per_s / without / one.most:.2f}"
    idle = "" if one.idle_share is None else f"{100 * one.idle_share:.1f}"
    case = f"{one.num_rows} | {one.num_drafts} | {one.chance:.0%}"
    return f"| {case} | {without:,.1f} | {' | '.join(cells)} | {share} | {idle} |"


def main() -> None:
    """Measure, print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape_arguments(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--chances", type=float, nargs="+", default=CHANCES, metavar="P", help="highest first; default: %(default)s"
    )
    parser.add_argument("--drafts", type=int, nargs="+", default=[4], metavar="K", help="default: 4")
    parser.add_argument("--mtp", action="store_true", help="let an MTP head draft, and replace its drafts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    shape = shape_of(parser, arguments, {})
    found = []
    with quiet_libraries(), own_warnings_hidden():
        model = model_of(shape)
        head = random_head(shape.fields, model.config.params_dtype) if arguments.mtp else None
        for one in chance_speeds(Drafted(model, shape, head, arguments.drafts), arguments.rows, arguments.chances):
            print(line_of(one) if found else f"{HEAD}\n{line_of(one)}", flush=True)
            found.append(one)
    if arguments.json:
        figures = {"machine": describe_machine(), "rows": [asdict(one) for one in found]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
