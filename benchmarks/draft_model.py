"""Measure the maximum gain of a draft model, and its cost if no draft is accepted.

    PYTHONPATH=. python3 benchmarks/draft_model.py [--shape NAME] [--draft-shape NAME] [--json FILE]

The model has random weights with which the next token is nearly certain. The correct draft model predicts the same
tokens, so that every draft is accepted; the wrong one has other random weights. Prompts are served concurrently without
drafts, with adaptive drafting by either draft model, and with drafts of the correct one in every step, both with CUDA
graphs and with eager forward passes. The runs alternate; a line of the table has the median run. `--shape tiny` runs on
a CPU.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from loads.serving_engine import MODES, SHAPES, ServedShape, add_shape_arguments, config_of, model_of, shape_of
from loads.sure_model import make_sure
from measuring.machine import describe_machine
from step_cost import DraftSpeed, middle, record
from turn_latency import rotated, some_tokens

from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries
from megatron_mamba_cache.models import DraftModelDrafter

ROWS = (1, 8, 32)
NUM_ROUNDS = 3
NUM_GRAPHS = 5
PROMPT, REPLY = 288, 128
DRAFT_MEMORY = {"state_gb": 2.0, "kv_gb": 1.0}


@dataclass(frozen=True, slots=True)
class RowSpeeds:
    """Decoding speeds of some concurrent requests, by name of the drafter."""

    num_rows: int
    speeds: dict[str, DraftSpeed]


def draft_model_speeds(
    model: Any, shape: ServedShape, draft_shape: ServedShape, row_counts: Sequence[int]
) -> list[RowSpeeds]:
    """Measure a model with two draft models of the same vocabulary: a correct one and a wrong one.

    The model and the correct draft model get `make_sure` weights.

    Raises:
        RuntimeError: If drafts of the correct draft model were rejected, or drafts of the wrong one were accepted.
    """
    make_sure(model)
    right, wrong = model_of(draft_shape), model_of(draft_shape)
    make_sure(right)
    return [_speeds(model, replace(shape, max_requests=rows), draft_shape, right, wrong, rows) for rows in row_counts]


def _speeds(model: Any, shape: ServedShape, draft_shape: ServedShape, right: Any, wrong: Any, rows: int) -> RowSpeeds:
    shape = replace(shape, num_graphs=min(shape.num_graphs, NUM_GRAPHS), prefill_graph_tokens=0)  # decode steps only
    num_graphs = min(draft_shape.num_graphs, NUM_GRAPHS)
    draft_shape = replace(draft_shape, max_requests=rows, num_graphs=num_graphs, prefill_graph_tokens=512)
    launched = replace(draft_shape, num_graphs=0)
    drafters: dict[str, Callable[[], Any]] = {
        "no drafts": lambda: None,
        "right drafts": lambda: DraftModelDrafter(right, config_of(draft_shape, MODES["full"])),
        "wrong drafts": lambda: DraftModelDrafter(wrong, config_of(draft_shape, MODES["full"])),
        "right drafts, always": lambda: DraftModelDrafter(right, config_of(draft_shape, MODES["full"])),
        "right drafts, always, without graphs": lambda: DraftModelDrafter(right, config_of(launched, MODES["full"])),
    }
    rng = random.Random(rows)
    prompts = [some_tokens(rng, shape, PROMPT) for _ in range(rows)]
    found: dict[str, list[DraftSpeed]] = {name: [] for name in drafters}
    for number in range(NUM_ROUNDS):
        for name in rotated(list(drafters), number):
            served = replace(shape, adaptive_drafts="always" not in name)
            found[name].append(record(model, served, prompts, REPLY, drafters[name]()).speed)
    speeds = {name: middle(runs) for name, runs in found.items()}
    if speeds["right drafts, always"].accepted < 0.9 or speeds["wrong drafts"].accepted > 0.1:
        raise RuntimeError(f"all correct drafts must be accepted and all wrong ones rejected, found {speeds}")
    return RowSpeeds(rows, speeds)


def table(found: Sequence[RowSpeeds]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| requests | drafter | tokens/s | relative to no drafts | tokens per step | accepted, % |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for one in found:
        without = one.speeds["no drafts"].tokens_per_s
        for name, speed in one.speeds.items():
            cells = f"{speed.tokens_per_s:,.1f} | {speed.tokens_per_s / without:.3f} | {speed.tokens_per_step:.2f}"
            lines.append(f"| {one.num_rows} | {name} | {cells} | {100 * speed.accepted:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape_arguments(parser)
    parser.add_argument("--draft-shape", choices=SHAPES, help="draft model; default: same shape as the model")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    shape = shape_of(parser, arguments, {})
    draft_shape = SHAPES[arguments.draft_shape or arguments.shape]
    if draft_shape.vocab_size != shape.vocab_size:
        parser.error(f"--draft-shape {arguments.draft_shape} has another vocabulary than --shape {arguments.shape}")
    with quiet_libraries(), own_warnings_hidden():
        model = model_of(shape)
        found = draft_model_speeds(model, shape, replace(draft_shape, **DRAFT_MEMORY), arguments.rows)
    print(table(found))
    if arguments.json:
        figures = {"machine": describe_machine(), "rows": [asdict(one) for one in found]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
