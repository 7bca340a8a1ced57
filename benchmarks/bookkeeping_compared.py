"""Compare the bookkeeping of requests with a commit from before KV blocks and states shared memory.

    PYTHONPATH=. python benchmarks/bookkeeping_compared.py TREE [--sizes N ...] [--output FILE.md]

TREE is a checkout of such a commit, for example 47ea3e0. The benchmark is pure Python on one CPU core and needs neither
a GPU nor Megatron. The pools of that commit and of this one serve the same requests in turn in one process, so that
other work on the machine affects all of them. This commit's pools are measured with a fixed split of memory and with
slabs.

Every pool is full of texts of the same length, last used in random order, each with a state at its end. In the pools of
the earlier commit, too, evicting a block evicts its state. Results are medians in µs:

- take: evict an old text to allocate blocks for a new text, a live slot, and a slot for the state at the end;
- keep: register the blocks, publish the state, mark both as used and release them, and release the live slot;
- hit: acquire the blocks, pin, unpin and use the state, and release the blocks;
- ratio: time relative to the earlier commit.
"""

import argparse
import platform
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from types import ModuleType
from typing import Any

from bookkeeping import BLOCK_SIZE, STATE_LEN, Setting, _cpu_name, _new_keys

from megatron_mamba_cache.policy.eviction_rules import EVICTION_RULES
from megatron_mamba_cache.policy.pools import CachePools

PACKAGE = "megatron_mamba_cache"
COMMAND = "PYTHONPATH=. python benchmarks/bookkeeping_compared.py TREE"
OPERATIONS = ("take", "keep", "hit")
TEXT_LENS = (1, 4, 32)
"""In blocks."""
RULES = ("lru", "cost")
NUM_BLOCKS_TIMED = 32_000
MOST_REQUESTS, LEAST_REQUESTS = 4_000, 1_000


@dataclass(frozen=True, slots=True)
class Side:
    """The pools of one commit and one kind of memory. `kv` and `slots` have the same methods in both commits."""

    name: str
    kv: Any
    slots: Any


@dataclass(frozen=True, slots=True)
class Case:
    """Contents of the pools, and the eviction rule."""

    num_blocks: int
    text_len: int
    rule: str

    @property
    def num_texts(self) -> int:
        """Number of texts that fill the pools."""
        return self.num_blocks // self.text_len

    @property
    def num_requests(self) -> int:
        """Number of requests to time."""
        return min(max(NUM_BLOCKS_TIMED // self.text_len, LEAST_REQUESTS), MOST_REQUESTS)


class Before:
    """Policy modules of the earlier commit, imported alongside those of this commit."""

    def __init__(self, tree: Path) -> None:
        self._modules = {name: _module_of(tree, name) for name in ("kv_block_pool", "slot_pool", "eviction_rules")}

    def pools(self, case: Case) -> Side:
        """Return empty pools in which evicting a block also evicts its state."""
        rule = self._modules["eviction_rules"].EVICTION_RULES[case.rule]
        slots = self._modules["slot_pool"].SlotPool(case.num_texts, rule.state_worth)
        num_blocks = case.num_texts * case.text_len
        kv = self._modules["kv_block_pool"].KVBlockPool(num_blocks, rule.block_worth, slots.drop, block_size=BLOCK_SIZE)
        return Side("before", kv, slots)


def main() -> None:
    """Measure, then print the results as a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, help="checkout of the earlier commit")
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[1_000, 100_000], help="pool sizes in blocks; default: %(default)s"
    )
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    before = Before(arguments.tree)
    cases = [Case(size, text_len, rule) for size in arguments.sizes for text_len in TEXT_LENS for rule in RULES]
    rows = [_row(case, measure([before.pools(case), *pools_now(case)], case)) for case in cases]
    if arguments.output:
        arguments.output.write_text(table(rows))
    print(table(rows))


def pools_now(case: Case) -> list[Side]:
    """Return empty pools of this commit: with a fixed split of memory, and with slabs."""
    sides = []
    for space in ("split", "slabs"):
        room = Setting(space, case.rule).room_for(case.num_texts * case.text_len, case.num_texts)
        pools = CachePools.over(room, EVICTION_RULES[case.rule](STATE_LEN), block_size=BLOCK_SIZE)
        sides.append(Side(space, pools.kv, pools.slots))
    return sides


def measure(sides: Sequence[Side], case: Case) -> dict[tuple[str, str], float]:
    """Return the median time of each operation of each side, by names of side and operation."""
    stamps = count(1)
    texts: dict[str, list[list[int]]] = {side.name: [] for side in sides}
    samples: dict[tuple[str, str], list[int]] = {(side.name, what): [] for side in sides for what in OPERATIONS}
    for number in range(case.num_texts - 1):  # one slot is the live slot of a request
        keys = _new_keys(stamps, case.text_len)
        for side in sides:
            texts[side.name].append(serve(side, keys, _num_tokens(number, case))[0])
    order = random.Random(0).sample(range(case.num_texts - 1), case.num_texts - 1)
    for number in order:
        for side in sides:
            hit(side, texts[side.name][number])
    for number in range(case.num_requests):
        keys = _new_keys(stamps, case.text_len)
        for turn in range(len(sides)):
            side = sides[(number + turn) % len(sides)]
            blocks, *durations = serve(side, keys, _num_tokens(number, case))
            for what, duration in zip(OPERATIONS, (*durations, hit(side, blocks)), strict=True):
                samples[side.name, what].append(duration)
    return {which: median(durations) / 1_000 for which, durations in samples.items()}


def serve(side: Side, keys: Sequence[Any], num_tokens: int) -> tuple[list[int], int, int]:
    """Serve a request with its own text; return its blocks and the nanoseconds of "take" and "keep"."""
    kv, slots, parent = side.kv, side.slots, None
    start = perf_counter_ns()
    blocks = kv.allocate(len(keys))
    live = slots.take_live()
    (slot,) = slots.reserve()
    taken = perf_counter_ns()
    for block, key in zip(blocks, keys, strict=True):
        parent = kv.register(block, key, parent)
    slots.publish(slot, blocks[-1], num_tokens)
    slots.touch_path(blocks)
    kv.release(blocks)
    slots.release_live(live)
    return blocks, taken - start, perf_counter_ns() - taken


def hit(side: Side, blocks: Sequence[int]) -> int:
    """Serve a request whose text is cached; return the nanoseconds. It allocates neither a live slot nor new blocks."""
    kv, slots = side.kv, side.slots
    start = perf_counter_ns()
    kv.acquire(blocks)
    slots.pin(blocks[-1])
    slots.unpin(blocks[-1])
    slots.touch_path(blocks)
    kv.release(blocks)
    return perf_counter_ns() - start


def table(rows: Sequence[str]) -> str:
    """Return the results as a Markdown table."""
    lines = ["## Beside pools that evict for themselves", "", f"    {COMMAND}", ""]
    lines += [f"Python {platform.python_version()}, {_cpu_name()}. {_meaning()}", ""]
    heads = [f"{what}: before | split (ratio) | slabs (ratio)" for what in OPERATIONS]
    lines += [f"| blocks | blocks a text | rule | {' | '.join(heads)} |", f"|---:|---:|---|{'---:|' * 9}"]
    return "\n".join([*lines, *rows, ""])


def _row(case: Case, medians: Mapping[tuple[str, str], float]) -> str:
    cells = []
    for what in OPERATIONS:
        before = medians["before", what]
        cells.append(f"{before:.1f}")
        cells += [f"{medians[side, what]:.1f} ({medians[side, what] / before:.2f})" for side in ("split", "slabs")]
    return f"| {case.num_blocks:,} | {case.text_len} | {case.rule} | {' | '.join(cells)} |"


def _meaning() -> str:
    return __doc__.split("\n\n", 2)[2].strip()


def _num_tokens(number: int, case: Case) -> int:
    """Return the number of tokens up to the state of a text; texts of one block have different numbers."""
    return BLOCK_SIZE * (case.text_len if case.text_len > 1 else 1 + number % 16)


def _module_of(tree: Path, name: str) -> ModuleType:
    """Import a policy module from another checkout, alongside that of this one."""
    ours = {loaded: sys.modules.pop(loaded) for loaded in list(sys.modules) if loaded.split(".")[0] == PACKAGE}
    sys.path.insert(0, str(tree))
    try:
        return import_module(f"{PACKAGE}.policy.{name}")
    finally:
        sys.path.remove(str(tree))
        for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == PACKAGE]:
            del sys.modules[loaded]
        sys.modules.update(ours)


if __name__ == "__main__":
    main()
