"""Measure decode steps of requests with sampling, grammars, penalties or log-probabilities.

    PYTHONPATH=. python3 benchmarks/changed_rows.py [--shape NAME] [--rows N] [--kinds NAME ...] [--json FILE]

Requests decode together, without drafts. In each case none, one or all of them have a grammar, penalties or
log-probabilities. Their prompts differ by up to one KV block, so that they reach the ends of blocks one by one. The
kinds of sampling (greedy, from all tokens, and with top-k and top-p) are measured separately.

All cases run in turn on one engine. A line of the table shows the mean time of a step in the middle round, the share of
overlapped steps (launched before the preceding step's tokens were read), and the ratios to the first line and to plain
requests of the same kind. The grammar is a precompiled JSON schema whose documents do not end during the run; its
vocabulary has random words and the size of the model's vocabulary. The host time to compute a mask is measured
separately.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from loads.made_up_tokenizer import MadeUpTokenizer
from loads.serving_engine import MODES, ServedShape, add_shape_arguments, model_of, serving_engine, shape_of
from measuring.machine import describe_machine
from megatron.core.inference.sampling_params import SamplingParams
from step_cost import LIMITS, timed_step
from turn_latency import rotated, some_tokens

from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries
from megatron_mamba_cache.grammars.forms import json_grammar
from megatron_mamba_cache.mcore.request_spec import SPEC

NUM_ROWS = 64
NUM_STEPS = 24
NUM_WARMING = 5
NUM_ROUNDS = 3
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"top_k": 1},
    "sampled": {"temperature": 1.0},
    "top-k and top-p": {"temperature": 1.0, "top_k": 50, "top_p": 0.95},
}
PENALTIES = {"logits": {"frequency_penalty": 0.5, "presence_penalty": 0.2}}
LOG_PROBS = {"return_log_probs": True, "skip_prompt_log_probs": True}
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0},
            "kind": {"enum": ["a", "b"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Case:
    """The requests of a step.

    Args:
        sampling: Sampling settings of all requests.
        changed: Number of requests with the extra attributes; None: all.
    """

    sampling: dict[str, Any]
    attributes: dict[str, Any]
    changed: int | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of a decode step in one case.

    Args:
        ahead: Fraction of the steps that overlapped.
        of_first: Time relative to plain requests of the first kind.
        of_plain: Time relative to plain requests of the same kind.
    """

    case: str
    wall_ms: float
    ahead: float
    of_first: float
    of_plain: float


def cases(kinds: Sequence[str]) -> dict[str, Case]:
    """Return the cases of the given kinds of sampling by name."""
    grammar = {"grammar": json_grammar(SCHEMA).text}
    found = {}
    for kind in kinds:
        sampling = KINDS[kind]
        found |= {
            f"{kind}, plain": Case(sampling, {}),
            f"{kind}, one grammar": Case(sampling, grammar, 1),
            f"{kind}, all grammars": Case(sampling, grammar),
            f"{kind}, one with penalties": Case(sampling, PENALTIES, 1),
            f"{kind}, all penalties": Case(sampling, PENALTIES),
            f"{kind}, one with 5 log-probs": Case(sampling, LOG_PROBS | {"top_n_logprobs": 5}, 1),
            f"{kind}, all log-probs": Case(sampling, LOG_PROBS),
        }
    return found


def measured(engine: Any, case: Case, prompts: Sequence[list[int]], first_id: int) -> tuple[float, float]:
    """Return the mean time of a decode step in milliseconds, and the fraction of steps that overlapped."""
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(
            num_tokens_to_generate=len(prompts) + NUM_WARMING + NUM_STEPS + 2,
            termination_id=-1,
            **case.sampling,
        )
        if case.changed is None or index < case.changed:
            sampling.add_attributes({SPEC: case.attributes})
        engine.add_request(first_id + index, prompt, sampling, seed=index)
    while engine.waiting_request_ids or any(request.is_prefilling for request in engine.context.running_requests):
        engine.step_modern()
    for _ in range(NUM_WARMING):
        engine.step_modern()
    if len(engine.context.running_requests) != len(prompts):
        raise RuntimeError(f"only {len(engine.context.running_requests)} of {len(prompts)} decode; raise --kv-gb")
    steps = [(engine.context.overlapped_step is not None, timed_step(engine)) for _ in range(NUM_STEPS)]
    while engine.has_unfinished_requests():
        engine.step_modern()
    early, seconds = zip(*steps, strict=True)
    return 1e3 * fmean(seconds), fmean(early)


def costs(model: Any, shape: ServedShape, num_rows: int, kinds: Sequence[str] = tuple(KINDS)) -> list[Cost]:
    """Measure all cases of the given kinds of sampling."""
    shape = replace(shape, max_requests=num_rows, max_tokens=max(shape.max_tokens, num_rows))
    rng, named, block_size = random.Random(0), cases(kinds), shape.block_size
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in named}
    with serving_engine(model, shape, MODES["full"]) as engine:
        engine.context.grammars.read(MadeUpTokenizer(shape.vocab_size))
        for number in range(NUM_ROUNDS):
            for case_index, name in enumerate(rotated(list(named), number)):
                lengths = [block_size * 9 // 8 + rng.randrange(block_size) for _ in range(num_rows)]
                prompts = [some_tokens(rng, shape, length) for length in lengths]
                times[name].append(measured(engine, named[name], prompts, 10_000 * (number * len(named) + case_index)))
    middle = {name: sorted(found)[NUM_ROUNDS // 2] for name, found in times.items()}
    first, _ = middle[f"{kinds[0]}, plain"]
    return [
        Cost(name, ms, ahead, ms / first, ms / middle[f"{name.partition(',')[0]}, plain"][0])
        for name, (ms, ahead) in middle.items()
    ]


def mask_us(shape: ServedShape) -> dict[str, float]:
    """Return the host time of a mask in microseconds: the first mask of a grammar, and the median along a document."""
    from megatron_mamba_cache.grammars.compiler import Grammars

    tokenizer = MadeUpTokenizer(shape.vocab_size)
    grammars = Grammars(shape.vocab_size)
    grammars.read(tokenizer)
    text = json_grammar(SCHEMA).text
    began = time.perf_counter()
    grammars.matcher(text)
    first = time.perf_counter() - began
    matcher, times = grammars.matcher(text), []
    for token in tokenizer.tokenize('[{"name": "Ada and others", "age": 36, "kind": "b"}, {"name": "B"'):
        began = time.perf_counter()
        matcher.compute_bitmask()
        times.append(time.perf_counter() - began)
        matcher.consume_token(token)
    return {"first use, with the vocabulary": 1e6 * first, "median": 1e6 * median(times), "longest": 1e6 * max(times)}


def table(found: Sequence[Cost], masks: dict[str, float]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| requests | step, ms | overlapped, % | relative to the first line | relative to plain |",
        "|---|---:|---:|---:|---:|",
    ]
    for cost in found:
        times = f"{cost.of_first:.3f} | {cost.of_plain:.3f}"
        lines.append(f"| {cost.case} | {cost.wall_ms:.3f} | {100 * cost.ahead:.0f} | {times} |")
    summary = ", ".join(f"{name} {us:,.0f} µs" for name, us in masks.items())
    return "\n".join([*lines, "", f"Time of a mask on one thread: {summary}."])


def main() -> None:
    """Measure, print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape_arguments(parser)
    parser.add_argument("--rows", type=int, default=NUM_ROWS, metavar="N", help="default: %(default)s")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=[*KINDS], metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    shape = shape_of(parser, arguments, LIMITS)
    with quiet_libraries(), own_warnings_hidden():
        found = costs(model_of(shape), shape, arguments.rows, arguments.kinds)
    masks = mask_us(shape)
    print(table(found, masks))
    if arguments.json:
        figures = {"machine": describe_machine(), "steps": [asdict(cost) for cost in found], "masks_us": masks}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
