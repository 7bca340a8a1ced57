"""Measure the prompt tokens of recorded loads that a memory budget saves, and the maximum that it could save.

    PYTHONPATH=. python benchmarks/recorded_hit_rates.py --trace FILE ... [--models NAME ...] [--cache-gb G ...]

The benchmark needs neither a model nor a GPU: recorded requests use the real cache one after another
(`planning/plan.py`). The columns are fractions of all prompt tokens, including those of requests that are too long for
the memory:

- cost, lru: one budget, divided into slabs, under each eviction rule;
- best split: the best of nine fixed splits of the same budget, with 0.1 to 0.9 of it for KV blocks, each under the
  better rule; it is known only after all splits have been replayed on the load;
- unlimited: the same cache without a memory limit, which evicts nothing;
- bound: upper bound for any cache of this size, even with knowledge of the future (`loads/future_bound.py`); needs
  scipy;
- way: savings of "cost" above the best split, relative to those of the bound;
- free: fraction of the budget that is free at the end, in unused and in partly used slabs;
- before: the best split of an earlier run.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from loads.future_bound import future_bound
from loads.recorded_texts import RecordedPart, texts_of
from loads.sized_cache import BLOCK_SIZE, MODELS, RULES
from loads.split_space import SplitSpace
from measuring.load_reports import append, command, document

from megatron_mamba_cache.planning.plan import replay

SCRIPT = "benchmarks/recorded_hit_rates.py"
MAX_TOKENS = 8192
"""Tokens of a step."""
KV_SHARES = tuple(tenths / 10 for tenths in range(1, 10))
NO_SCIPY = "no bound without scipy: pip install scipy"


@dataclass(frozen=True, slots=True)
class Case:
    """Part of a recorded load, the sizes of a model, and a budget."""

    part: RecordedPart
    model: str
    cache_gb: float

    @property
    def budget(self) -> int:
        """Memory budget in bytes."""
        return int(self.cache_gb * 2**30)


@dataclass(frozen=True, slots=True)
class Run:
    """One replay of a case. If `kv_share` is None, the memory is divided into slabs."""

    case: Case
    rule: str
    kv_share: float | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """Results of a case, as fractions of its prompt tokens; `kv_share` and `free` are fractions of the budget.

    Args:
        kv_share, split_rule: Share for KV blocks and eviction rule of the best split.
        bound: Upper bound on the savings; None without scipy.
        before: Savings of the best split in an earlier run; None if that run does not have the case.
    """

    load: str
    model: str
    cache_gb: float
    cost: float
    lru: float
    best_split: float
    kv_share: float
    split_rule: str
    unlimited: float
    bound: float | None
    free: float
    before: float | None

    @property
    def way(self) -> float | None:
        """Position of the cost rule between the best split (0) and the bound (1); None if these are equal."""
        if self.bound is None or self.bound <= self.best_split:
            return None
        return (self.cost - self.best_split) / (self.bound - self.best_split)

    def as_json(self) -> dict[str, object]:
        """Return all fields and the position as JSON types."""
        return {**asdict(self), "way": self.way}


@dataclass(frozen=True, slots=True)
class Replayed:
    """Fraction of the prompt tokens that were skipped, and fraction of the budget that was free at the end."""

    share: float
    free: float


def main() -> None:
    """Measure, then print the results as a table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trace", type=Path, nargs="+", required=True, help="recorded load; see planning/recorded_load.py"
    )
    parser.add_argument("--first-sessions", type=int, help="number of sessions to use; default: all")
    parser.add_argument("--skip-sessions", type=int, default=0, help="number of sessions to skip first")
    parser.add_argument("--then", type=Path, help="follow the first half of each load by the first half of this one")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--cache-gb", type=float, nargs="+", default=[10, 20, 40, 60], help="GiB; default: 10 20 40 60")
    parser.add_argument(
        "--split-rules",
        nargs="+",
        choices=RULES,
        default=list(RULES),
        help="eviction rules of the splits; default: all",
    )
    parser.add_argument("--before", type=Path, help="earlier --json output; its best splits become a column")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--append", type=Path, help="also append the table to this file")
    arguments = parser.parse_args()
    parts = [
        RecordedPart(path, arguments.first_sessions, arguments.skip_sessions, arguments.then)
        for path in arguments.trace
    ]
    cases = [Case(part, model, gb) for part in parts for model in arguments.models for gb in arguments.cache_gb]
    before = json.loads(arguments.before.read_text()) if arguments.before else {}
    figures = measure(cases, arguments.split_rules, splits_of(before), arguments.processes)
    text = table(figures, command(SCRIPT, sys.argv[1:]), before.get("source"))
    if arguments.append:
        append(text, arguments.append, "Prompt tokens saved on recorded loads", __doc__)
    print(json.dumps(document([figure.as_json() for figure in figures]), indent=2) if arguments.json else text)


def measure(
    cases: Sequence[Case],
    split_rules: Sequence[str],
    before: Mapping[tuple[str, str, float], float],
    num_processes: int,
) -> list[Figure]:
    """Replay every case with slabs and with splits, and compute its bound.

    Slabs are replayed under all eviction rules, and splits under `split_rules`.
    """
    runs = [Run(case, rule) for case in cases for rule in RULES]
    runs += [Run(case, rule, kv_share) for case in cases for rule in split_rules for kv_share in KV_SHARES]
    parts = list(dict.fromkeys(case.part for case in cases))
    with ProcessPoolExecutor(num_processes) as processes:
        replayed = {}
        for number, (run, result) in enumerate(zip(runs, processes.map(replay_run, runs), strict=True), start=1):
            replayed[run] = result
            print(f"\r{number} of {len(runs)} replays", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        unlimited = dict(zip(parts, processes.map(unlimited_share, parts), strict=True))
        bounds = dict(zip(cases, processes.map(bound_share, cases), strict=True))
    return [_figure(case, replayed, unlimited[case.part], bounds[case], before) for case in cases]


def replay_run(run: Run) -> Replayed:
    """Replay one case under one eviction rule, with slabs or with a split."""
    case, sizes = run.case, MODELS[run.case.model]
    texts = texts_of(case.part)
    if run.kv_share is not None:
        split = sizes.split(case.budget, run.kv_share)
        return Replayed(replay(texts, sizes.make_cache(split, run.rule, 1), MAX_TOKENS).share, 0.0)
    slabs = sizes.slabs(case.budget)
    share = replay(texts, sizes.make_cache(slabs, run.rule, 1), MAX_TOKENS).share
    return Replayed(share, sizes.free_bytes(slabs) / case.budget)


def unlimited_share(part: RecordedPart) -> float:
    """Return the fraction of the prompt tokens that a cache with room for all texts saves."""
    texts = texts_of(part)
    most = len({key for text in texts for key in text.keys}) + max(len(text.keys) for text in texts) + 2
    sizes = next(iter(MODELS.values()))  # any sizes give the same result, because nothing is evicted
    return replay(texts, sizes.make_cache(SplitSpace(most, most), "lru", 1), MAX_TOKENS).share


def bound_share(case: Case) -> float | None:
    """Return an upper bound on the fraction of prompt tokens that a cache of this size saves; None without scipy."""
    if find_spec("scipy") is None:
        return None
    texts, sizes = texts_of(case.part), MODELS[case.model]
    most = future_bound(texts, case.budget, BLOCK_SIZE, sizes.block_bytes, sizes.state_bytes)
    return most / sum(text.prompt_len for text in texts)


def splits_of(before: Mapping[str, object]) -> dict[tuple[str, str, float], float]:
    """Return the savings of the best splits in an earlier run's JSON, by load, model and GiB."""
    figures = before.get("figures", [])
    assert isinstance(figures, list)
    return {(figure["load"], figure["model"], figure["cache_gb"]): figure["best_split"] for figure in figures}


def table(figures: Sequence[Figure], made_by: str, source: object = None) -> str:
    """Return the results as Markdown tables, one per load.

    Args:
        made_by: Command of this run.
        source: Description of the earlier run, if there is one.
    """
    lines = []
    for load in dict.fromkeys(figure.load for figure in figures):
        lines += [f"## {load}", "", f"    {made_by}", "", f"Python {platform.python_version()}."]
        lines[-1] += f" Before: {source}." if source else ""
        lines += ["", "| model | GiB | cost | lru | best split (KV, rule) | unlimited | bound | way | free |"]
        lines[-1] += " before |" if source else ""
        lines += ["|---|---:|---:|---:|---|---:|---:|---:|---:|" + ("---:|" if source else "")]
        lines += [_row(figure, has_before=bool(source)) for figure in figures if figure.load == load]
        lines += [""]
    lines += [_unusable(figures), ""]
    if any(figure.bound is None for figure in figures):
        lines += [NO_SCIPY, ""]
    return "\n".join(lines)


def _figure(
    case: Case,
    replayed: Mapping[Run, Replayed],
    unlimited: float,
    bound: float | None,
    before: Mapping[tuple[str, str, float], float],
) -> Figure:
    splits = [run for run in replayed if run.case == case and run.kv_share is not None]
    best = max(splits, key=lambda run: replayed[run].share)
    assert best.kv_share is not None
    cost = replayed[Run(case, "cost")]
    return Figure(
        load=case.part.name,
        model=case.model,
        cache_gb=case.cache_gb,
        cost=cost.share,
        lru=replayed[Run(case, "lru")].share,
        best_split=replayed[best].share,
        kv_share=best.kv_share,
        split_rule=best.rule,
        unlimited=unlimited,
        bound=bound,
        free=cost.free,
        before=before.get((case.part.name, case.model, case.cache_gb)),
    )


def _row(figure: Figure, *, has_before: bool) -> str:
    split = f"{figure.best_split:.3f} ({figure.kv_share:g}, {figure.split_rule})"
    row = f"| {figure.model} | {figure.cache_gb:g} | {figure.cost:.3f} | {figure.lru:.3f} | {split} "
    row += (
        f"| {figure.unlimited:.3f} | {_optional(figure.bound)} | {_optional(figure.way, '.0%')} | {figure.free:.1%} |"
    )
    return f"{row} {_optional(figure.before)} |" if has_before else row


def _unusable(figures: Sequence[Figure]) -> str:
    """Describe the largest fractions of a budget that are wasted: padding of slabs, and free memory at the end."""
    paddings = {model: MODELS[model].padding for model in dict.fromkeys(figure.model for figure in figures)}
    padded = max(paddings, key=paddings.__getitem__)
    freest = max(figures, key=lambda figure: figure.free)
    return (
        f"Padding: at most {paddings[padded]:.1%} of a slab ({padded}), the end of one that holds KV blocks. Free at "
        f"the end: at most {freest.free:.1%} of a budget ({freest.load}, {freest.model}, {freest.cache_gb:g} GiB)."
    )


def _optional(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    main()
