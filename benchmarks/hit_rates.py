"""Measure the prompt tokens that the cache saves under each eviction rule, for each load and memory size.

    PYTHONPATH=. python benchmarks/hit_rates.py [--output FILE.md] [--plot FILE.png] [--json] [--cache-gb G ...]

The benchmark needs neither a model nor a GPU: requests with synthetic tokens use the real cache (`served_load.py`). KV
blocks and states share one memory budget, divided into slabs, with the sizes of an 8B hybrid model in bf16: a KV block
of 256 tokens takes 4 MiB, and a state takes 103 MB. Up to 16 running requests use the same budget. The working set is
the peak memory of an unlimited cache, counting only the blocks of running requests, and the blocks and states that were
used again later.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import mean

from loads.conversation_load import LOADS, Conversation, conversations
from loads.served_load import Observer, ServedLoad, Server
from loads.sized_cache import MODELS
from loads.split_space import SplitSpace
from loads.working_set import WorkingSetObserver

from megatron_mamba_cache.policy.index_pools import CacheSpace
from megatron_mamba_cache.policy.prefix_cache import PrefixCache

COMMAND = "PYTHONPATH=. python benchmarks/hit_rates.py"
SIZES = MODELS["8b"]
SERVER = Server()
UNLIMITED = 60_000
RULES = ("lru", "cost")
CACHE_GB = (4.0, 8.0, 16.0, 32.0, 64.0)
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Work:
    """A load, given by its name and a seed."""

    load: str
    seed: int

    def sessions(self) -> list[Conversation]:
        """Return the conversations of the load."""
        return conversations(LOADS[self.load], self.seed, SERVER.vocab_size)


@dataclass(frozen=True, slots=True)
class Bound:
    """Tokens saved by an unlimited cache, and the bytes of the working set."""

    prompt_tokens: int
    saved_tokens: int
    working_set: int


@dataclass(frozen=True, slots=True)
class Figure:
    """Tokens saved by one eviction rule, for one load and budget."""

    load: str
    seed: int
    rule: str
    cache_gb: float
    prompt_tokens: int
    saved_tokens: int
    bound_tokens: int
    working_set: int


def main() -> None:
    """Measure, then print the results as a table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="default: all")
    parser.add_argument(
        "--cache-gb", nargs="+", type=float, default=list(CACHE_GB), help="memory sizes in GiB; default: 4 to 64"
    )
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--plot", type=Path, help="also draw a plot; needs matplotlib")
    arguments = parser.parse_args()
    if arguments.plot:
        _require_matplotlib(parser)
    works = [Work(load, seed) for load in arguments.loads for seed in range(arguments.seeds)]
    figures = measure(works, arguments.cache_gb, arguments.processes)
    if arguments.output:
        arguments.output.write_text(table(figures, arguments.plot))
    if arguments.plot:
        plot(figures, arguments.plot)
    print(json.dumps(document(figures), indent=2) if arguments.json else table(figures, arguments.plot))


def measure(works: Sequence[Work], budgets: Sequence[float], num_processes: int) -> list[Figure]:
    """Serve every load with every budget (in GiB) under every eviction rule."""
    runs = [(work, gb, rule) for work in works for gb in budgets for rule in RULES]
    figures = []
    with ProcessPoolExecutor(num_processes) as processes:
        running = [processes.submit(serve, *run) for run in runs]
        for number, finished in enumerate(as_completed(running), start=1):
            figures.append(finished.result())
            _show_progress(number, len(runs))
    return sorted(figures, key=lambda figure: (figure.load, figure.seed, figure.cache_gb, figure.rule))


@cache
def bound_of(work: Work) -> Bound:
    """Serve a load from an unlimited cache."""
    observer = WorkingSetObserver()
    served = ServedLoad(make_cache(SplitSpace(UNLIMITED, UNLIMITED), "lru"), SERVER, work.sessions(), observer)
    served.run()
    held = observer.working_set()
    num_bytes = (held.running_blocks + held.cached_blocks) * SIZES.block_bytes + held.cached_states * SIZES.state_bytes
    return Bound(served.tally.prompt_tokens, served.tally.skipped_tokens, num_bytes)


def serve(work: Work, cache_gb: float, rule: str) -> Figure:
    """Serve a load from a cache with a budget."""
    bound = bound_of(work)
    served = ServedLoad(make_cache(SIZES.slabs(int(cache_gb * GIB)), rule), SERVER, work.sessions(), Observer())
    served.run()
    saved = served.tally.skipped_tokens
    return Figure(
        work.load, work.seed, rule, cache_gb, bound.prompt_tokens, saved, bound.saved_tokens, bound.working_set
    )


def make_cache(space: CacheSpace, rule: str) -> PrefixCache:
    """Return an empty cache for the requests of the simulated server."""
    return SIZES.make_cache(space, rule, SERVER.max_requests)


def document(figures: Sequence[Figure]) -> dict[str, object]:
    """Return the results and the Python version as JSON types."""
    return {"python": platform.python_version(), "figures": [asdict(figure) for figure in figures]}


def table(figures: Sequence[Figure], picture: Path | None = None) -> str:
    """Return the means over the seeds as a Markdown table; the ratio is also given for the worst seed."""
    seeds = len({figure.seed for figure in figures})
    command = f"{COMMAND} --seeds {seeds}{f' --plot benchmarks/results/{picture.name}' if picture else ''}"
    lines = ["# Tokens saved under each eviction rule", "", f"    {command}", ""]
    lines += [f"Python {platform.python_version()}, {seeds} seeds. {_flat(__doc__)}", ""]
    lines += [
        "Saved tokens are a fraction of what an unlimited cache saves; if no prompt hits, there is nothing to save.",
        "",
    ]
    lines += [f"![Tokens saved as memory shrinks]({picture.name})", ""] if picture else []
    lines += ["| load | GiB | working set, GiB | hit rate, unlimited | lru | cost | cost / lru, mean (worst seed) |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    lines += [_row(load, gb, figures) for load in _loads(figures) for gb in _budgets(figures)]
    return "\n".join([*lines, "", *_targets(figures)])


def plot(figures: Sequence[Figure], file: Path) -> None:
    """Plot the tokens saved under both rules by memory size, with one panel for each load that can hit the cache."""
    from matplotlib.figure import Figure as Picture
    from matplotlib.ticker import NullLocator

    loads, budgets = _loads_with_hits(figures), _budgets(figures)
    picture = Picture(figsize=(3.2 * len(loads), 3.2), layout="constrained")
    panels = picture.subplots(1, len(loads), sharey=True, squeeze=False)[0]
    for panel, load in zip(panels, loads, strict=True):
        for rule in RULES:
            panel.plot(budgets, [_saved(_pick(figures, load, gb, rule)) for gb in budgets], "o-", label=rule)
        panel.axvline(_working_set(figures, load), color="grey", linestyle=":", label="working set")
        panel.set(title=load, xscale="log", xlabel="memory, GiB", ylim=(0, 1.02))
        panel.set_xticks(budgets, [f"{gb:g}" for gb in budgets])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("tokens saved / unlimited")
    panels[0].legend()
    picture.savefig(file, dpi=120)


def _row(load: str, cache_gb: float, figures: Sequence[Figure]) -> str:
    lru, cost = (_pick(figures, load, cache_gb, rule) for rule in RULES)
    unlimited = mean(f.bound_tokens / f.prompt_tokens for f in lru)
    ratios = list(_ratios(lru, cost))
    ratio = f"{mean(ratios):.2f} ({min(ratios):.2f})" if ratios else "nothing to save"
    return (
        f"| {load} | {cache_gb:g} | {_working_set(figures, load):.1f} | {unlimited:.3f} | {_saved(lru):.3f} | "
        f"{_saved(cost):.3f} | {ratio} |"
    )


def _targets(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield each goal with the measured value, both as text; values are means over the seeds."""
    loads, budgets = _loads_with_hits(figures), _budgets(figures)
    yield "Goals, and the results of the cost-aware rule:"
    yield ""
    fitting = {load: [gb for gb in budgets if gb >= _working_set(figures, load)] for load in loads}
    reached = [
        f"{load} {_saved(_pick(figures, load, min(fits), 'cost')):.3f} of {min(fits):g} GiB"
        for load, fits in fitting.items()
        if fits
    ]
    aim = "at least 0.95 of the unlimited cache's savings if the working set fits; in the smallest such budget"
    yield f"- {aim}: {', '.join(reached)};"
    pairs = [[_pick(figures, load, gb, rule) for rule in RULES] for load in loads for gb in budgets]
    worst = min((ratio for pair in pairs for ratio in _ratios(*pair)), default=1.0)
    yield f"- at least 0.98 of LRU's savings: {worst:.3f} in the worst case over all loads, budgets and seeds."


def _loads(figures: Sequence[Figure]) -> list[str]:
    return list(dict.fromkeys(figure.load for figure in figures))


def _loads_with_hits(figures: Sequence[Figure]) -> list[str]:
    return list(dict.fromkeys(figure.load for figure in figures if figure.bound_tokens))


def _budgets(figures: Sequence[Figure]) -> list[float]:
    return sorted({figure.cache_gb for figure in figures})


def _working_set(figures: Sequence[Figure], load: str) -> float:
    """Return the working set of a load in GiB."""
    return mean(figure.working_set for figure in figures if figure.load == load) / GIB


def _pick(figures: Sequence[Figure], load: str, cache_gb: float, rule: str) -> list[Figure]:
    return [f for f in figures if (f.load, f.cache_gb, f.rule) == (load, cache_gb, rule)]


def _saved(figures: Sequence[Figure]) -> float:
    return mean(f.saved_tokens / f.bound_tokens if f.bound_tokens else 0.0 for f in figures)


def _ratios(lru: Sequence[Figure], cost: Sequence[Figure]) -> Iterator[float]:
    for slow, fast in zip(lru, cost, strict=True):
        if slow.saved_tokens:
            yield fast.saved_tokens / slow.saved_tokens


def _flat(text: str) -> str:
    return " ".join(text.split("\n\n", 2)[2].split())


def _show_progress(number: int, total: int) -> None:
    filled = 40 * number // total
    end = "\n" if number == total else ""
    print(f"\r[{'#' * filled}{'.' * (40 - filled)}] {number}/{total}", end=end, file=sys.stderr, flush=True)


def _require_matplotlib(parser: argparse.ArgumentParser) -> None:
    try:
        import matplotlib
    except ImportError:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")


if __name__ == "__main__":
    main()
