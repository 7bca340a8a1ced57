"""Measure the drafts of the shipped model's MTP head next to other drafters, on code that it was not trained on.

    PYTHONPATH=. python benchmarks/mtp_drafts.py [--model DIR] [--drafts K ...] [--rows N] [--files N] [--json]

Each prompt is the beginning of a file of Python's standard library that was held out from training; the reply goes on
in the file. Every step verifies the same number of drafts (`adaptive_drafts=False`), except with the drafter "auto".
The random number with which a token is sampled depends on seed and position only, so drafts do not change the text.
Engines with and without drafts take turns; a time is the median over the runs of the sum of decode-only steps, drafting
included. The times are processor times of the shipped model in fp32 on a CPU, which other processes hardly affect.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from speculation import SAMPLINGS, Subject, timed_run

from megatron_mamba_cache.command_line.arguments import select_device
from megatron_mamba_cache.command_line.commands import DRAFTERS
from megatron_mamba_cache.command_line.model_choice import SHIPPED_MODEL, ModelDirectory, ModelFormat
from megatron_mamba_cache.command_line.prompts import PromptLine
from megatron_mamba_cache.command_line.quiet import quiet_libraries
from megatron_mamba_cache.command_line.sizing import default_settings

DRAFTS = (1, 2, 3, 4, 5)
PROMPT_TOKENS, REPLY_TOKENS = 384, 96
REPETITIONS = 3
NONE, LOOKUP, AUTO = "none", "prompt-lookup", "auto"


@dataclass(frozen=True, slots=True)
class DraftFigure:
    """Results of a drafter; `ms` are milliseconds of decode-only steps per generated token."""

    sampling: str
    drafter: str
    num_drafts: int
    tokens_per_step: float
    acceptance_at: list[float]  # share of drafts at each position that are accepted with all before them
    ms: float
    speedup: float  # times without drafts, per token, divided by these
    same_tokens: bool


def main() -> None:
    """Measure, then print the results as a table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL, help="directory; default: the shipped model")
    drafters = [name for name in DRAFTERS if name != "draft-model"]
    parser.add_argument("--drafters", choices=drafters, nargs="+", default=drafters, help="default: all")
    parser.add_argument("--drafts", type=int, nargs="+", default=DRAFTS, metavar="K", help="default: 1 to 5")
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="requests at once (default: 1)")
    parser.add_argument("--files", type=int, default=12, metavar="N", help="number of prompts (default: 12)")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    kinds = [(NONE, 0), *((drafter, count) for drafter in arguments.drafters for count in arguments.drafts)]
    select_device("cpu")
    with quiet_libraries():
        subject = _subject(arguments.model, arguments.rows)
        lines = _lines(subject.model.tokenizer, arguments.files)
        figures = [
            figure
            for sampling in SAMPLINGS
            for figure in measured(subject, lines, sampling, kinds, arguments.repetitions)
        ]
    found = [asdict(figure) for figure in figures]
    print(json.dumps(found, indent=2) if arguments.json else table(figures, len(lines), arguments.rows))


def measured(
    subject: Subject, lines: Sequence[PromptLine], sampling: str, kinds: Sequence[tuple[str, int]], repetitions: int
) -> list[DraftFigure]:
    """Serve the prompts with each drafter and number of drafts, in turn; the first must be without drafts."""
    ms: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    tokens, counters = {}, {}
    for _ in range(repetitions):
        for kind in kinds:
            engine = _engine(subject, *kind)
            result, clock = timed_run(subject, engine, lines, SAMPLINGS[sampling], REPLY_TOKENS)
            ms[kind].append(1e3 * clock.seconds / clock.num_tokens)
            tokens[kind], counters[kind] = [one.generated_tokens for one in result.records], result.cache.counters
    usual = median(ms[kinds[0]])
    return [
        DraftFigure(
            sampling,
            *kind,
            counters[kind].tokens_per_decode_row,
            counters[kind].acceptance_at[: kind[1]],
            ms=median(times),
            speedup=usual / median(times),
            same_tokens=tokens[kind] == tokens[kinds[0]],
        )
        for kind, times in ms.items()
    ]


def table(figures: Sequence[DraftFigure], num_files: int, num_rows: int) -> str:
    """Return the results as a Markdown table."""
    from measuring.machine import describe_machine

    command = f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')} PYTHONPATH=. python {' '.join(sys.argv)}"
    lines = [f"    {command}", "", describe_machine(), ""]
    lines += [f"{num_files} prompts of {PROMPT_TOKENS} tokens, {num_rows} at once, replies of {REPLY_TOKENS}:", ""]
    lines += [
        "| tokens | drafter | K | accepted by position, % | tokens per step | ms per token | speedup | same text |"
    ]
    lines += ["|---|---|---:|---|---:|---:|---:|---|"]
    lines += [
        f"| {figure.sampling} | {figure.drafter} | {figure.num_drafts} | "
        f"{', '.join(f'{100 * share:.0f}' for share in figure.acceptance_at)} | {figure.tokens_per_step:.2f} | "
        f"{figure.ms:.2f} | {figure.speedup:.2f} | {'yes' if figure.same_tokens else 'no'} |"
        for figure in figures
    ]
    return "\n".join(lines)


def _engine(subject: Subject, name: str, num_drafts: int) -> Any:
    from megatron_mamba_cache.command_line.ready_model import drafter_maker

    subject = replace(subject, settings=subject.settings | {"adaptive_drafts": name == AUTO})
    if name in (NONE, LOOKUP):
        return subject.engine(num_drafts)
    flags = argparse.Namespace(drafter=name, draft_hf_model=None)
    return subject.engine(num_drafts, drafter_maker(flags, subject.model, lambda *_: {})(subject.config(num_drafts)))


def _lines(tokenizer: Any, num_files: int) -> list[PromptLine]:
    """Return the beginnings of held-out files that are long enough for prompt and reply."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    from measure_bits_per_byte import installed_library, library_part

    texts = [tokenizer.tokenize(source.document) for source in library_part(installed_library(), "held-out")]
    long = [text for text in texts if len(text) >= PROMPT_TOKENS + REPLY_TOKENS][:num_files]
    return [PromptLine(number, tuple(text[:PROMPT_TOKENS])) for number, text in enumerate(long)]


def _subject(directory: Path, num_rows: int) -> Subject:
    from megatron_mamba_cache.command_line.ready_model import WeightFlags, ready_model
    from megatron_mamba_cache.mcore.model_reading import model_shape_of

    stored = ModelDirectory(directory, ModelFormat.HUGGING_FACE)
    model = ready_model(stored, "fp32", "cpu", WeightFlags(mtp="required"))
    settings = default_settings(model_shape_of(model.model), model.model.max_sequence_length)
    return Subject(model, settings | {"max_requests": num_rows}, process_time)


if __name__ == "__main__":
    main()
