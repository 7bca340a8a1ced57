"""Measure the tokens per decode step with drafts, the time per token, and the cost of useless drafts.

    PYTHONPATH=. python benchmarks/speculation.py [--device cpu|cuda] [--json] [--output FILE.md]

The benchmark uses the shipped model in fp32, with at most four drafts per step.

Useful drafts come from prompt lookup on two editing workloads: "sessions of the command" (an assistant has read one
file and writes others) and "rewriting" (it rewrites a file with one name changed). Runs with and without drafts
alternate. Times are medians over runs of the sum of decode-only steps.

Useless drafts come from a drafter that knows the reply and always proposes other tokens. An engine with these drafts
and an engine without drafts alternate step by step, so that other load on the machine affects both. Times are medians
over repetitions.

On a CPU, times are CPU times, which other processes hardly affect; on a GPU, they are wall times.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.command_line.arguments import select_device
from megatron_mamba_cache.command_line.built_in_prompts import editing_lines
from megatron_mamba_cache.command_line.commands import EDITING, GREEDY
from megatron_mamba_cache.command_line.flag_sources import UsageError
from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL, ModelDirectory, ModelFormat
from megatron_mamba_cache.command_line.prompts import PromptLine
from megatron_mamba_cache.command_line.quiet import quiet_libraries
from megatron_mamba_cache.command_line.sizing import default_settings

NUM_DRAFTS = 4
REPLY_TOKENS = 64
REPETITIONS = 3
USELESS_REPLY_TOKENS = 256
USELESS_PROMPT_TOKENS = 128
USELESS_REPETITIONS = 3
USELESS_BATCHES = (1, 8)
SAMPLINGS = {"greedy": GREEDY, "sampled": EDITING}


@dataclass(frozen=True, slots=True)
class UsefulFigure:
    """Results of one workload; times are in milliseconds per generated token, over decode-only steps."""

    workload: str
    sampling: str
    tokens_per_step: float
    acceptance_at: list[float]
    ms_without: float
    ms_with: float
    same_tokens: bool


@dataclass(frozen=True, slots=True)
class UselessFigure:
    """Results of one batch size; times are in milliseconds per step, over all steps of a run."""

    num_requests: int
    num_steps: int
    drafted_share: float  # draft tokens per generated token
    ms_without: float
    ms_with: float
    ratio: float  # median over the repetitions


@dataclass(slots=True)
class StepClock:
    """Replacement for an engine's step method that adds up the times of decode-only steps."""

    engine: Any
    step: Callable[[], Any]
    now: Callable[[], float]
    seconds: float = 0.0
    num_tokens: int = 0

    def __call__(self) -> Any:
        """Run one step."""
        counters = self.engine.context.counters
        prefilled, tokens = counters.prefill_tokens_computed, _decoded(counters)
        began = self.now()
        result = self.step()
        if counters.prefill_tokens_computed == prefilled:
            self.seconds += self.now() - began
            self.num_tokens += _decoded(counters) - tokens
        return result


@dataclass(slots=True)
class Subject:
    """The model, the settings of its engines, and the clock that times their steps."""

    model: Any
    settings: dict[str, Any]
    now: Callable[[], float]

    def config(self, num_drafts: int) -> CacheConfig:
        """Return the settings of an engine with this number of drafts."""
        return CacheConfig(**self.settings, num_speculative_tokens=num_drafts)

    def engine(self, num_drafts: int, drafter: Any = None) -> Any:
        """Build an engine with these numbers of drafts and this drafter."""
        from megatron_mamba_cache import build_engine

        config = self.config(num_drafts)
        return build_engine(self.model.model, config, drafter=drafter, tokenizer=self.model.tokenizer)


def main() -> None:
    """Measure, then print the results as a table or as JSON."""
    parser = argparse.ArgumentParser(description="Measure the gain and the cost of drafts.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    try:
        select_device(arguments.device)
    except UsageError as error:
        parser.error(str(error))
    with quiet_libraries():
        subject = _subject(arguments.device, process_time if arguments.device == "cpu" else perf_counter)
        useful = [
            useful_drafts(subject, workload, lines, sampling)
            for workload, lines in _workloads().items()
            for sampling in SAMPLINGS
        ]
        useless = [useless_drafts(subject, num_requests) for num_requests in USELESS_BATCHES]
    text = table(useful, useless, clock="processor" if arguments.device == "cpu" else "wall")
    if arguments.output:
        arguments.output.write_text(text)
    found = {"useful": [asdict(figure) for figure in useful], "useless": [asdict(figure) for figure in useless]}
    print(json.dumps(found, indent=2) if arguments.json else text)


def useful_drafts(subject: Subject, workload: str, lines: Sequence[PromptLine], sampling: str) -> UsefulFigure:
    """Serve the prompts with and without prompt lookup, in turn."""
    ms: dict[int, list[float]] = {0: [], NUM_DRAFTS: []}
    tokens, counters = {}, {}
    for _ in range(REPETITIONS):
        for num_drafts in ms:
            result, clock = timed_run(subject, subject.engine(num_drafts), lines, SAMPLINGS[sampling], REPLY_TOKENS)
            ms[num_drafts].append(1e3 * clock.seconds / clock.num_tokens)
            tokens[num_drafts] = [record.generated_tokens for record in result.records]
            counters[num_drafts] = result.cache.counters
    return UsefulFigure(
        workload,
        sampling,
        counters[NUM_DRAFTS].tokens_per_decode_row,
        counters[NUM_DRAFTS].acceptance_at,
        ms_without=median(ms[0]),
        ms_with=median(ms[NUM_DRAFTS]),
        same_tokens=tokens[0] == tokens[NUM_DRAFTS],
    )


def useless_drafts(subject: Subject, num_requests: int) -> UselessFigure:
    """Serve the same requests with two engines, one with wrong drafts, alternating step by step."""
    from loads.recorded_drafts import WrongDrafter

    tokenizer = subject.model.tokenizer
    prompts = [tokenizer.tokenize(line.prompt)[-USELESS_PROMPT_TOKENS:] for line in editing_lines()[:num_requests]]
    replies = _lockstep([subject.engine(0)], prompts, subject.now)[0].replies
    ratios, ms = [], ([], [])
    for repetition in range(USELESS_REPETITIONS):
        drafter = WrongDrafter(replies, subject.model.model.vocab_size)
        engines = [subject.engine(0), subject.engine(NUM_DRAFTS, drafter)]
        turns = _lockstep(engines, prompts, subject.now, swaps=bool(repetition % 2))
        if any(turn.replies != replies for turn in turns) or engines[1].context.counters.accepted_tokens:
            sys.exit("the drafts were not useless")
        seconds = [turn.seconds for turn in turns]
        ratios.append(seconds[1] / seconds[0])
        for times, total, turn in zip(ms, seconds, turns, strict=True):
            times.append(1e3 * total / turn.num_steps)
    drafted = engines[1].context.counters.draft_tokens / (num_requests * USELESS_REPLY_TOKENS)
    return UselessFigure(num_requests, turns[1].num_steps, drafted, median(ms[0]), median(ms[1]), median(ratios))


@dataclass(slots=True)
class Lockstep:
    """Progress of one of the alternating engines."""

    seconds: float = 0.0
    num_steps: int = 0
    replies: dict[int, list[int]] = field(default_factory=dict)


def _lockstep(
    engines: Sequence[Any], prompts: Sequence[Sequence[int]], now: Callable[[], float], *, swaps: bool = False
) -> list[Lockstep]:
    """Serve the prompts greedily on all engines, alternating step by step; the last engine goes first if `swaps`."""
    from megatron.core.inference.sampling_params import SamplingParams

    for engine in engines:
        for request_id, prompt in enumerate(prompts):
            limit = SamplingParams(num_tokens_to_generate=USELESS_REPLY_TOKENS, top_k=1, termination_id=-1)
            engine.add_request(request_id, list(prompt), limit)
    turns = [Lockstep() for _ in engines]
    pairs = list(zip(engines, turns, strict=True))
    while any(engine.has_unfinished_requests() for engine in engines):
        for engine, turn in reversed(pairs) if swaps else pairs:
            began = now()
            records = engine.step_modern()["finished_request_records"]
            turn.seconds += now() - began
            turn.num_steps += 1
            turn.replies |= {request.request_id: request.generated_tokens for request in map(_merge, records)}
    return turns


def table(useful: Sequence[UsefulFigure], useless: Sequence[UselessFigure], *, clock: str) -> str:
    """Return the results as a Markdown table."""
    from measuring.machine import describe_machine

    command = f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')} PYTHONPATH=. python {' '.join(sys.argv)}"
    lines = ["# Gain and cost of drafts", "", f"    {command}", "", describe_machine(), ""]
    lines += [f"Shipped model in fp32, up to {NUM_DRAFTS} drafts per step. Times are {clock} times.", ""]
    lines += [f"Prompt lookup, replies of {REPLY_TOKENS} tokens; medians of {REPETITIONS} runs, decode steps only:", ""]
    lines += ["| workload | tokens | tokens per step | accepted by position, % | ms per token: K=0 | K=4 | same text |"]
    lines += ["|---|---|---:|---|---:|---:|---|"]
    lines += [_useful_row(figure) for figure in useful]
    lines += ["", f"Drafts that are always rejected, replies of {USELESS_REPLY_TOKENS} tokens, all steps of a run;"]
    lines += [f"medians of {USELESS_REPETITIONS} runs, in which the steps of the two engines alternate:", ""]
    lines += ["| requests | steps | drafts a token | ms a step: K=0 | K=4 | ratio |", "|---:|---:|---:|---:|---:|---:|"]
    lines += [
        f"| {figure.num_requests} | {figure.num_steps} | {figure.drafted_share:.3f} | {figure.ms_without:.2f} | "
        f"{figure.ms_with:.2f} | {figure.ratio:.3f} |"
        for figure in useless
    ]
    return "\n".join(lines) + "\n"


def _useful_row(figure: UsefulFigure) -> str:
    shares = ", ".join(f"{100 * share:.0f}" for share in figure.acceptance_at)
    same = "yes" if figure.same_tokens else "no"
    return (
        f"| {figure.workload} | {figure.sampling} | {figure.tokens_per_step:.2f} | {shares} | "
        f"{figure.ms_without:.2f} | {figure.ms_with:.2f} | {same} |"
    )


def timed_run(
    subject: Subject, engine: Any, lines: Sequence[PromptLine], sampling: Mapping[str, float], num_tokens: int
) -> tuple[Any, StepClock]:
    """Serve the prompts with an engine; return the result and the clock of its decode-only steps."""
    from megatron_mamba_cache.command_line.request_runner import RequestRunner, SamplingFlags

    engine.step_modern = clock = StepClock(engine, engine.step_modern, subject.now)
    flags = SamplingFlags(num_tokens, sampling["temperature"], int(sampling["top_k"]), sampling["top_p"])
    return RequestRunner(engine, subject.model.tokenizer, flags, lambda _: None).run(lines), clock


def _decoded(counters: Any) -> int:
    return int(counters.decode_rows + counters.accepted_tokens)


def _merge(record: Any) -> Any:
    return record.merge()


def _subject(device: str, now: Callable[[], float]) -> Subject:
    from megatron_mamba_cache.command_line.ready_model import ready_model
    from megatron_mamba_cache.mcore.model_reading import model_shape_of

    model = ready_model(ModelDirectory(SHIPPED_MODEL, ModelFormat.HUGGING_FACE), "fp32", device)
    settings = default_settings(model_shape_of(model.model), model.model.max_sequence_length)
    return Subject(model, settings, now)


def _workloads() -> dict[str, list[PromptLine]]:
    from loads.rewriting_prompts import rewriting_lines

    return {"sessions of the command": editing_lines(), "rewriting": rewriting_lines()}


if __name__ == "__main__":
    main()
