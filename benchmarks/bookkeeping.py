"""Measure the time of the cache's bookkeeping operations, and how it grows with the size of the pools.

    PYTHONPATH=. python benchmarks/bookkeeping.py [--json] [--output FILE.md]

The benchmark is pure Python on one CPU core and needs neither a GPU nor Megatron. Each value is the lowest median of
three rounds, because other work on a shared machine only adds time.
"""

import argparse
import json
import platform
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import numpy as np
from loads.split_space import SplitSpace

from megatron_mamba_cache.policy.block_hashing import CacheSalt, block_keys
from megatron_mamba_cache.policy.eviction_rules import EVICTION_RULES
from megatron_mamba_cache.policy.identifiers import BlockId, BlockKey
from megatron_mamba_cache.policy.index_pools import CacheSpace
from megatron_mamba_cache.policy.kv_block_pool import KVBlockPool
from megatron_mamba_cache.policy.pools import CachePools
from megatron_mamba_cache.policy.slabs import SlabSpace

COMMAND = "PYTHONPATH=. python benchmarks/bookkeeping.py"
PROMPT_TOKENS = 131_072
CHAIN_DEPTH = 32
BLOCK_SIZE = 256
BLOCKS_PER_SLAB = 24
"""Number of blocks in a slab of an 8B hybrid model; a slab can also hold one state."""
STATE_LEN = 6_287.0
SPACES = ("split", "slabs")
NUM_ROUNDS = 3
BLOCK_SIZES = (256, 64, 16)
MATCHES = """\
A prompt is hashed when the scheduler first tries to admit the request, so the first attempt costs the time of hash and
match. Until the next cache flush, later attempts only match the hashes.
"""
EVICTIONS = """\
An eviction removes a state together with the blocks that only this state could resume. In the earlier version, the
pools of blocks and of slots evicted separately. The earlier time of an eviction is therefore the sum of both: the
allocation of a block, and its share of the allocation of a slot. The first allocation evicts the whole chain, and the
next ones find free blocks. Times with slabs are shown next to earlier times with a fixed split of memory.

A request's life: allocate blocks for its text, a live slot, and a slot for the state at its end, all from full pools
that evict; register the blocks and publish the state; mark both as used and release them.
"""
LIMITS = """\
The number of operations does not depend on the size of the pools. If a time grows by more than 1.5 times, CPU cache
misses are the cause. If unrelated blocks are evicted in random order ("chains of 1"), each eviction causes misses for
the key, its hash, and two slots of the dictionary at 100,000 entries. The last line shows the time of this part alone.
"""
POOL_SIZES = (1_000, 10_000, 50_000, 100_000)
SLOT_POOL_SIZES = (1_000, 100_000)


@dataclass(frozen=True, slots=True)
class Setting:
    """Kind of memory under the pools, and the eviction rule."""

    space: str
    rule: str

    @property
    def suffix(self) -> str:
        """Suffix of an operation's name in this setting."""
        return ("" if self.rule == "lru" else f", {self.rule}-aware") + ("" if self.space == "split" else ", slabs")

    def room_for(self, num_blocks: int, num_states: int) -> CacheSpace:
        """Return a space that `num_blocks` blocks and `num_states` states fill."""
        if self.space == "split":
            return SplitSpace(num_blocks, num_states)
        return SlabSpace(-(-num_blocks // BLOCKS_PER_SLAB) + num_states, BLOCKS_PER_SLAB, 1)


@dataclass(frozen=True, slots=True)
class Figure:
    """Median time of one operation at one pool size."""

    operation: str
    size: int
    microseconds: float


def main() -> None:
    """Measure, then print the results as a table or as JSON."""
    parser = argparse.ArgumentParser(description="Measure the cost of the cache's bookkeeping.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--before", type=Path, help="an earlier --json output of the same machine")
    arguments = parser.parse_args()
    before = costs_of(json.loads(arguments.before.read_text())) if arguments.before else {}
    figures = best_of([measure() for _ in range(NUM_ROUNDS)])
    if arguments.output:
        arguments.output.write_text(table(figures, before, arguments.before))
    print(json.dumps(document(figures), indent=2) if arguments.json else table(figures, before, arguments.before))


def measure() -> list[Figure]:
    """Return the times of every operation at every pool size."""
    figures = []
    for block_size in BLOCK_SIZES:
        figures += hash_and_match(block_size)
    for space in SPACES:
        figures += _of_space(space)
    figures += [bare_key_removal(size) for size in POOL_SIZES]
    return figures


def best_of(rounds: list[list[Figure]]) -> list[Figure]:
    """Return the lowest time of each operation and pool size."""
    return [min(figures, key=lambda figure: figure.microseconds) for figures in zip(*rounds, strict=True)]


def hash_and_match(block_size: int) -> list[Figure]:
    """Time the hashes of a 128k-token prompt, and its match in a pool that contains all its blocks."""
    root = CacheSalt("model", "weights", epoch=0).root()
    tokens = np.random.default_rng(0).integers(0, 128_000, PROMPT_TOKENS)
    keys = block_keys(root, tokens, block_size)
    pool = CachePools.over(SplitSpace(len(keys), 1), EVICTION_RULES["lru"](STATE_LEN), block_size=block_size).kv
    _register(pool, pool.allocate(len(keys)), keys)
    hashing = _median_us(lambda: block_keys(root, tokens, block_size), repeats=51)
    matching = _median_us(lambda: pool.longest_match(keys), repeats=51)
    return [
        Figure(f"hash a 128k-token prompt, block {block_size}", len(keys), hashing),
        Figure(f"match it, block {block_size}", len(keys), matching),
    ]


def evicting_allocation(num_blocks: int, setting: Setting, depth: int = CHAIN_DEPTH) -> Figure:
    """Time `allocate(1)` in full pools of chains that were last used in random order.

    The first allocation evicts a whole chain with its state, and the next ones find free blocks. A sample is therefore
    the mean over as many allocations as a chain has blocks. With slabs, it includes the slot for the state of the new
    chain, whose allocation may evict; with a split, this slot is free after the eviction.
    """
    us = median(_new_chains_us(num_blocks, setting, depth))
    return Figure(f"allocate(1) and slot, evicting, chains of {depth}{setting.suffix}", num_blocks, us)


def chain_eviction(num_blocks: int, setting: Setting, depth: int) -> Figure:
    """Time the `allocate(1)` that evicts a chain."""
    longest = [max(calls) for calls in _new_chains(num_blocks, setting, depth)]
    return Figure(
        f"the allocate(1) that evicts a chain of {depth}{setting.suffix}", num_blocks, median(longest) / 1_000
    )


def chain_round_trip(num_blocks: int, setting: Setting) -> Figure:
    """Time acquiring and releasing a chain of 32 blocks in full pools."""
    pools, chains = _full_pools(num_blocks, CHAIN_DEPTH, setting)
    order = iter(random.Random(1).choices(chains, k=2_000))

    def round_trip() -> None:
        chain = next(order)
        pools.kv.acquire(chain)
        pools.kv.release(chain)

    us = _median_us(round_trip, repeats=2_000)
    return Figure(f"acquire + release {CHAIN_DEPTH} blocks{setting.suffix}", num_blocks, us)


def hit_round_trip(num_blocks: int, setting: Setting) -> Figure:
    """Time all calls for a hit at the end of a chain of 32 blocks, and for its release."""
    pools, chains = _full_pools(num_blocks, CHAIN_DEPTH, setting)
    order = iter(random.Random(1).choices(chains, k=2_000))

    def round_trip() -> None:
        chain = next(order)
        pools.kv.acquire(chain)
        pools.slots.pin(chain[-1])
        pools.slots.unpin(chain[-1])
        pools.slots.touch_path(chain)
        pools.kv.release(chain)

    us = _median_us(round_trip, repeats=2_000)
    return Figure(f"the same, and pin, unpin and touch their state{setting.suffix}", num_blocks, us)


def whole_life(num_blocks: int, setting: Setting, depth: int) -> Figure:
    """Time all calls for a request with its own text, in full pools of texts that were last used in random order."""
    pools, _ = _full_pools(num_blocks, depth, setting)
    samples, stamps = [], count(10**9)
    for number in range(max(4_000 // depth, 300)):
        keys = _new_keys(stamps, depth)
        start = perf_counter_ns()
        blocks = pools.kv.allocate(depth)
        live = pools.slots.take_live()
        _cache_chain(pools, blocks, keys, _tokens(number, depth))
        pools.slots.touch_path(blocks)
        pools.kv.release(blocks)
        pools.slots.release_live(live)
        samples.append(perf_counter_ns() - start)
    return Figure(f"a request's life, {depth} blocks{setting.suffix}", num_blocks, median(samples) / 1_000)


def evicting_take_live(num_slots: int, setting: Setting) -> Figure:
    """Time `take_live` when every slot has a cached state at the end of its own block, last used in random order."""
    pools, _ = _full_pools(num_slots, 1, setting)
    stamps, samples = count(10**9), []
    for number in range(4_000):
        start = perf_counter_ns()
        slot = pools.slots.take_live()
        samples.append(perf_counter_ns() - start)
        pools.slots.release_live(slot)
        chain = pools.kv.allocate(1)
        _cache_chain(pools, chain, _new_keys(stamps, 1), _tokens(number, 1))
        pools.kv.release(chain)
    return Figure(f"take_live, evicting{setting.suffix}", num_slots, median(samples) / 1_000)


def bare_key_removal(num_keys: int) -> Figure:
    """Time the removal of a key from a plain dictionary, in random order; each eviction removes one."""
    keys = _new_keys(count(1), num_keys)
    block_of = {key: block for block, key in enumerate(keys)}
    stamps, samples = count(10**9), []
    order = random.Random(0).sample(range(num_keys), num_keys) * (4_000 // num_keys or 1)
    for block in order[:4_000]:
        start = perf_counter_ns()
        del block_of[keys[block]]
        samples.append(perf_counter_ns() - start)
        (keys[block],) = _new_keys(stamps, 1)
        block_of[keys[block]] = block
    return Figure("a key's removal from a bare dict", num_keys, median(samples) / 1_000)


def document(figures: list[Figure]) -> dict[str, object]:
    """Return the results with the machine and the growth of each time."""
    return {
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "figures": [asdict(figure) for figure in figures],
        "cost at 100,000 / cost at 1,000": _growth(figures),
    }


def costs_of(before: Mapping[str, Any]) -> dict[tuple[str, int], float]:
    """Return the times in an earlier document, in microseconds by operation and size."""
    return {(figure["operation"], figure["size"]): figure["microseconds"] for figure in before["figures"]}


def table(figures: list[Figure], before: Mapping[tuple[str, int], float], file: Path | None = None) -> str:
    """Return the document as Markdown: times next to earlier ones from `file`, and slabs next to a split."""
    lines = ["# What bookkeeping costs", "", f"    {COMMAND}{f' --before {file.name}' if file else ''}", ""]
    lines += [
        f"Python {platform.python_version()}, {_cpu_name()}, one core. Medians, the lowest of {NUM_ROUNDS} rounds."
    ]
    lines += [""]
    lines += ["| operation | blocks or slots | µs | before, µs | ratio |", "|---|---:|---:|---:|---:|"]
    lines += [_row(figure, before) for figure in figures]
    lines += ["", EVICTIONS]
    lines += [MATCHES, "| 128k-token prompt, block | match alone, µs | hash and match, µs |", "|---:|---:|---:|"]
    prompts = figures[: 2 * len(BLOCK_SIZES)]
    for hashing, matching in zip(prompts[::2], prompts[1::2], strict=True):
        both = hashing.microseconds + matching.microseconds
        lines.append(f"| {PROMPT_TOKENS // matching.size} | {matching.microseconds:,.1f} | {both:,.1f} |")
    lines += ["", "| operation | cost at 100,000 / cost at 1,000 |", "|---|---:|"]
    lines += [f"| {operation} | {ratio:.2f} |" for operation, ratio in _growth(figures).items()]
    return "\n".join([*lines, "", LIMITS])


def _row(figure: Figure, before: Mapping[tuple[str, int], float]) -> str:
    row = f"| {figure.operation} | {figure.size:,} | {figure.microseconds:,.1f} |"
    cost = _cost_before(figure, before)
    return f"{row} - | - |" if cost is None else f"{row} {cost:,.1f} | {figure.microseconds / cost:.2f} |"


def _cost_before(figure: Figure, before: Mapping[tuple[str, int], float]) -> float | None:
    """Return the earlier time of an operation; an eviction's is that of a block plus its share of a state's."""
    name, size = figure.operation.removesuffix(", slabs"), figure.size
    suffix = ", cost-aware" if name.endswith(", cost-aware") else ""
    state = before.get((f"take_live, evicting{suffix}", size))
    if name.startswith("take_live"):
        block, num_states = before.get((f"allocate(1), evicting, chains of 1{suffix}", size)), 1.0
    elif name.startswith("allocate(1)"):
        block = before.get((name.replace(" and slot", ""), size))
        num_states = 1 / int(name.removesuffix(suffix).rpartition(" ")[2])
    else:
        return before.get((name, size))
    return None if block is None or state is None else block + num_states * state


def _growth(figures: list[Figure]) -> dict[str, float]:
    cost = {(figure.operation, figure.size): figure.microseconds for figure in figures}
    return {name: cost[name, 100_000] / cost[name, 1_000] for name, size in cost if size == 100_000}


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _of_space(space: str) -> list[Figure]:
    lru, cost = Setting(space, "lru"), Setting(space, "cost")
    figures = []
    for depth in (CHAIN_DEPTH, 500, 1):
        figures += [evicting_allocation(size, lru, depth) for size in POOL_SIZES]
    figures += [chain_eviction(size, lru, 500) for size in POOL_SIZES]
    figures += [chain_round_trip(size, lru) for size in POOL_SIZES]
    figures += [hit_round_trip(size, lru) for size in POOL_SIZES]
    figures += [evicting_take_live(size, lru) for size in SLOT_POOL_SIZES]
    figures += [whole_life(size, lru, depth) for depth in (1, CHAIN_DEPTH) for size in SLOT_POOL_SIZES]
    figures += [evicting_allocation(size, cost, depth) for depth in (CHAIN_DEPTH, 1) for size in POOL_SIZES]
    figures += [chain_round_trip(size, cost) for size in POOL_SIZES]
    figures += [hit_round_trip(size, cost) for size in POOL_SIZES]
    figures += [evicting_take_live(size, cost) for size in SLOT_POOL_SIZES]
    figures += [whole_life(size, cost, depth) for depth in (1, CHAIN_DEPTH) for size in SLOT_POOL_SIZES]
    return figures


def _median_us(operation: Callable[[], object], repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        start = perf_counter_ns()
        operation()
        samples.append(perf_counter_ns() - start)
    return median(samples) / 1_000


def _new_keys(stamps: "count[int]", depth: int) -> list[BlockKey]:
    # Keys have 256 random bits like real keys, so that the entries of the hash map are equally scattered in memory.
    return [
        BlockKey(next(stamps) * 0x9E3779B97F4A7C15F39CC0605CEDC8341082276BF3A27251F86C6A11D0C18E95)
        for _ in range(depth)
    ]


def _full_pools(num_blocks: int, depth: int, setting: Setting) -> tuple[CachePools, list[list[BlockId]]]:
    """Return pools that are full of cached chains, each with a state at its end, and the chains."""
    depths = [min(depth, num_blocks - start) for start in range(0, num_blocks, depth)]
    rule = EVICTION_RULES[setting.rule](STATE_LEN)
    pools = CachePools.over(setting.room_for(num_blocks, len(depths)), rule, block_size=BLOCK_SIZE)
    stamps = count(1)
    chains = []
    for number, chain_depth in enumerate(depths):
        chains.append(pools.kv.allocate(chain_depth))
        _cache_chain(pools, chains[-1], _new_keys(stamps, chain_depth), _tokens(number, chain_depth))
    random.Random(0).shuffle(chains)
    for chain in chains:
        pools.slots.touch_path(chain[-1:])
        pools.kv.release(chain)
    return pools, chains


def _cache_chain(pools: CachePools, blocks: list[BlockId], keys: list[BlockKey], num_tokens: int) -> None:
    """Register referenced blocks as a chain, and publish a state at its end."""
    _register(pools.kv, blocks, keys)
    (slot,) = pools.slots.reserve()
    pools.slots.publish(slot, blocks[-1], num_tokens)


def _register(pool: KVBlockPool, blocks: list[BlockId], keys: list[BlockKey]) -> None:
    parent = None
    for block, key in zip(blocks, keys, strict=True):
        parent = pool.register(block, key, parent)


def _tokens(number: int, depth: int) -> int:
    """Return the number of tokens up to a chain's state; chains of one block have different numbers."""
    return BLOCK_SIZE * (depth if depth > 1 else 1 + number % 16)


def _new_chains_us(num_blocks: int, setting: Setting, depth: int) -> list[float]:
    return [sum(calls) / depth / 1_000 for calls in _new_chains(num_blocks, setting, depth)]


def _new_chains(num_blocks: int, setting: Setting, depth: int) -> Iterator[list[int]]:
    """Yield the nanoseconds of each call that can evict, for each of many new chains in full pools."""
    pools, _ = _full_pools(num_blocks, depth, setting)
    stamps = count(10**9)
    for number in range(max(4_000 // depth, 40)):
        blocks, calls = [], []
        for _ in range(depth):
            start = perf_counter_ns()
            (block,) = pools.kv.allocate(1)
            calls.append(perf_counter_ns() - start)
            blocks.append(block)
        _register(pools.kv, blocks, _new_keys(stamps, depth))
        start = perf_counter_ns()
        (slot,) = pools.slots.reserve()
        calls.append(perf_counter_ns() - start)
        pools.slots.publish(slot, blocks[-1], _tokens(number, depth))
        pools.kv.release(blocks)  # the pools are full again, with a chain of the same length
        yield calls


if __name__ == "__main__":
    main()
