"""How many prompt tokens does the cache save under each eviction rule, for each load and memory size?

    PYTHONPATH=. python benchmarks/hit_rates.py [--output FILE.md] [--plot FILE.png] [--json] [--trace FILE.jsonl]

No model and no GPU: synthetic tokens go through the real cache (`served_load.py`). Memory is that of an 8B hybrid in
bf16: a KV block of 256 tokens takes 4 MiB, a state slot 53 MB. Besides what running requests hold, the cache has a
multiple of the working set: the most blocks and states that an unlimited cache held at any one time and that were used
again later. That is what an ideal rule that knows the future would need.
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

from loads.conversation_load import LOADS, Conversation, conversations, read_trace
from loads.served_load import Observer, ServedLoad, Server
from loads.working_set import WorkingSet, WorkingSetObserver

from megatron_mamba_cache.metrics import CacheCounters
from megatron_mamba_cache.policy.admission import AdmissionRules
from megatron_mamba_cache.policy.boundaries import BoundaryRule
from megatron_mamba_cache.policy.decode_rules import DecodeRules
from megatron_mamba_cache.policy.eviction_rules import EVICTION_RULES
from megatron_mamba_cache.policy.kv_block_pool import KVBlockPool
from megatron_mamba_cache.policy.prefix_cache import CacheIdentity, PrefixCache
from megatron_mamba_cache.policy.slot_pool import SlotPool

COMMAND = "PYTHONPATH=. python benchmarks/hit_rates.py --output benchmarks/results/hit_rates.md"
BLOCK_SIZE = 256
BLOCK_BYTES, SLOT_BYTES = 4 * 2**20, 53 * 10**6
SERVER = Server()
UNLIMITED = 60_000
RULES = ("lru", "cost")
MEMORIES = ((2, 2), (1, 1), (1 / 2, 1 / 2), (1 / 4, 1 / 4), (1 / 8, 1 / 8), (1, 1 / 8), (1 / 8, 1))
"""Multiples of the working set: of KV blocks, of state slots."""

DESIGNS = """\
## What else was tried

Shares of the unlimited cache's savings, seed 0, at one working set and at an eighth of it, and the latter over LRU's.
Prototypes, which looked at every entry for each eviction; the first three also told resumed conversations apart.

| design | mixed | system prompts | long conversations | few-shot | repository |
|---|---|---|---|---|---|
| states by cost, KV blocks by LRU | 0.91, 0.34, 1.36x | 0.95, 0.69, 1.22x | 0.95, 0.34, 1.73x | 0.94, 0.53, 1.11x \
| 0.97, 0.69, 2.01x |
| states by cost, KV blocks by the worth of the state on them | 0.65, 0.33, 1.32x | 0.91, 0.74, 1.31x \
| 0.76, 0.24, 1.22x | 0.98, 0.61, 1.29x | 0.95, 0.71, 2.08x |
| both by cost, blocks without a state first | 0.92, 0.38, 1.54x | 0.94, 0.81, 1.43x | 0.94, 0.35, 1.78x \
| 0.98, 0.62, 1.32x | 0.97, 0.76, 2.22x |
| states by cost, KV blocks by hits: what is built | 0.91, 0.36, 1.46x | 0.95, 0.78, 1.38x | 0.95, 0.34, 1.72x \
| 0.98, 0.60, 1.28x | 0.98, 0.74, 2.16x |

A KV block saves the same tokens for its size wherever it lies, so that the worth of the state on it misleads. Blocks
without a state on them are worth less, but the block pool would have to follow every eviction of a state to know.
Telling the end of a conversation that was resumed before from any other end, the cost to the power 0.7, or 16
counted hits instead of 8, moved no figure by more than 0.03. An end worth a quarter of a hit instead of a half gives
mixed 0.90 and 0.37, worth a whole hit 0.91 and 0.35.
"""


@dataclass(frozen=True, slots=True)
class Work:
    """One load, given by name or as the path of a trace, made from one seed."""

    load: str
    seed: int

    def sessions(self) -> list[Conversation]:
        """Return its conversations."""
        if self.load in LOADS:
            return conversations(LOADS[self.load], self.seed, SERVER.vocab_size)
        return read_trace(Path(self.load), SERVER.vocab_size, self.seed)


@dataclass(frozen=True, slots=True)
class Bound:
    """What an unlimited cache saves, and how large the working set is."""

    prompt_tokens: int
    saved_tokens: int
    working_set: WorkingSet


@dataclass(frozen=True, slots=True)
class Figure:
    """What one rule saved on one load in one memory size; `kv` and `states` are multiples of the working set."""

    load: str
    seed: int
    rule: str
    kv: float
    states: float
    num_blocks: int
    num_slots: int
    prompt_tokens: int
    saved_tokens: int
    bound_tokens: int


def main() -> None:
    """Measure, then print the figures as a table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="default: all")
    parser.add_argument("--trace", type=Path, help="a trace instead of the loads; see conversation_load.read_trace")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--plot", type=Path, help="also draw the figures; needs matplotlib")
    arguments = parser.parse_args()
    if arguments.plot:
        _require_matplotlib(parser)
    loads = [str(arguments.trace)] if arguments.trace else arguments.loads
    figures = measure([Work(load, seed) for load in loads for seed in range(arguments.seeds)], arguments.processes)
    if arguments.output:
        arguments.output.write_text(table(figures))
    if arguments.plot:
        plot(figures, arguments.plot)
    print(json.dumps(document(figures), indent=2) if arguments.json else table(figures))


def measure(works: Sequence[Work], num_processes: int) -> list[Figure]:
    """Serve every load in every memory size under every rule."""
    runs = [(work, memory, rule) for work in works for memory in MEMORIES for rule in RULES]
    figures = []
    with ProcessPoolExecutor(num_processes) as processes:
        running = [processes.submit(serve, *run) for run in runs]
        for number, finished in enumerate(as_completed(running), start=1):
            figures.append(finished.result())
            _show_progress(number, len(runs))
    return sorted(figures, key=lambda figure: (figure.load, figure.seed, -figure.states, -figure.kv, figure.rule))


@cache
def bound_of(work: Work) -> Bound:
    """Serve a load from an unlimited cache."""
    observer = WorkingSetObserver()
    served = ServedLoad(make_cache(UNLIMITED, UNLIMITED, "lru"), SERVER, work.sessions(), observer)
    served.run()
    return Bound(served.tally.prompt_tokens, served.tally.skipped_tokens, observer.working_set())


def serve(work: Work, memory: tuple[float, float], rule: str) -> Figure:
    """Serve a load in a multiple of its working set."""
    bound, (kv, states) = bound_of(work), memory
    num_blocks = bound.working_set.running_blocks + round(kv * bound.working_set.cached_blocks)
    num_slots = SERVER.max_requests + round(states * bound.working_set.cached_states)
    served = ServedLoad(make_cache(num_blocks, num_slots, rule), SERVER, work.sessions(), Observer())
    served.run()
    saved = served.tally.skipped_tokens
    return Figure(
        work.load, work.seed, rule, kv, states, num_blocks, num_slots, bound.prompt_tokens, saved, bound.saved_tokens
    )


def make_cache(num_blocks: int, num_slots: int, rule: str) -> PrefixCache:
    """Return an empty cache with an engine's default settings."""
    slots = SlotPool(num_slots, EVICTION_RULES[rule].state_worth)
    kv = KVBlockPool(num_blocks, EVICTION_RULES[rule].block_worth, slots.drop, block_size=BLOCK_SIZE)
    return PrefixCache(
        kv,
        slots,
        AdmissionRules(BoundaryRule(BLOCK_SIZE), align_prefill_chunks=True, chunked_prefill=True),
        CacheIdentity("model", "0"),
        CacheCounters(),
        decode=DecodeRules("rolling", SERVER.max_requests),
    )


def document(figures: Sequence[Figure]) -> dict[str, object]:
    """Return the figures with the Python that made them."""
    return {"python": platform.python_version(), "figures": [asdict(figure) for figure in figures]}


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as Markdown, seeds averaged; the ratio is also given for the worst seed."""
    lines = ["# Tokens saved under each eviction rule", "", f"    {COMMAND}", ""]
    seeds = len({figure.seed for figure in figures})
    lines += [f"Python {platform.python_version()}, {seeds} seeds. {_flat(__doc__)}", ""]
    lines += ["Saved: share of what an unlimited cache saves; where that is nothing, there is nothing to save.", ""]
    lines += ["| load | KV, states: x working set | blocks + slots, GB | hit rate, unlimited | lru | cost |"]
    lines[-1] += " cost / lru, mean (worst seed) |"
    lines += ["|---|---|---:|---:|---:|---:|---:|"]
    lines += [_row(load, *memory, figures) for load in dict.fromkeys(f.load for f in figures) for memory in MEMORIES]
    return "\n".join([*lines, "", *_targets(figures), "", DESIGNS])


def plot(figures: Sequence[Figure], file: Path) -> None:
    """Plot what both rules save over memory, one panel for each load with something to save."""
    from matplotlib.figure import Figure as Picture
    from matplotlib.ticker import NullLocator

    loads = [load for load in dict.fromkeys(f.load for f in figures) if any(f.saved_tokens for f in _of(figures, load))]
    picture = Picture(figsize=(3.2 * len(loads), 3.2), layout="constrained")
    panels = picture.subplots(1, len(loads), sharey=True, squeeze=False)[0]
    sizes = [kv for kv, states in MEMORIES if kv == states]
    for panel, load in zip(panels, loads, strict=True):
        for rule in RULES:
            panel.plot(sizes, [_saved(_pick(figures, load, size, size, rule)) for size in sizes], "o-", label=rule)
        panel.set(title=load, xscale="log", xlabel="memory / working set", ylim=(0, 1.02))
        panel.set_xticks(sizes, [f"{size:g}" for size in sizes])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("tokens saved / unlimited")
    panels[0].legend()
    picture.savefig(file, dpi=120)


def _row(load: str, kv: float, states: float, figures: Sequence[Figure]) -> str:
    lru, cost = (_pick(figures, load, kv, states, rule) for rule in RULES)
    gb = [mean(f.num_blocks for f in lru) * BLOCK_BYTES / 1e9, mean(f.num_slots for f in lru) * SLOT_BYTES / 1e9]
    unlimited = mean(f.bound_tokens / f.prompt_tokens for f in lru)
    ratios = list(_ratios(lru, cost))
    ratio = f"{mean(ratios):.2f} ({min(ratios):.2f})" if ratios else "nothing to save"
    return (
        f"| {load} | {kv:g}, {states:g} | {gb[0]:.1f} + {gb[1]:.1f} | {unlimited:.3f} | {_saved(lru):.3f} | "
        f"{_saved(cost):.3f} | {ratio} |"
    )


def _targets(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield each target beside the measured value, means over the seeds."""
    loads = [load for load in dict.fromkeys(f.load for f in figures) if any(f.saved_tokens for f in _of(figures, load))]
    yield "Aims, and what the cost-aware rule reached:"
    yield ""
    for size in (1, 2):
        reached = ", ".join(f"{load} {_saved(_pick(figures, load, size, size, 'cost')):.3f}" for load in loads)
        yield f"- 0.95 of the unlimited cache's savings where the working set fits; in {size} x of it: {reached};"
    if "mixed" in loads:
        ratios = list(_ratios(*(_pick(figures, "mixed", 1 / 8, 1 / 8, rule) for rule in RULES)))
        yield f"- 1.2 times LRU's savings of mixed at an eighth: {mean(ratios):.2f}, worst seed {min(ratios):.2f};"
    pairs = [[_pick(figures, load, *memory, rule) for rule in RULES] for load in loads for memory in MEMORIES]
    worst = min((ratio for pair in pairs for ratio in _ratios(*pair)), default=1.0)
    yield f"- never below 0.98 of LRU's: {worst:.3f} at worst, of all loads, memories and seeds."


def _of(figures: Sequence[Figure], load: str) -> list[Figure]:
    return [f for f in figures if f.load == load]


def _pick(figures: Sequence[Figure], load: str, kv: float, states: float, rule: str) -> list[Figure]:
    return [f for f in figures if (f.load, f.kv, f.states, f.rule) == (load, kv, states, rule)]


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
