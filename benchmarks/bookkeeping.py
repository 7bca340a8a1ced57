"""What does the cache's bookkeeping cost, and does the cost grow with the size of the pools?

    PYTHONPATH=. python benchmarks/bookkeeping.py [--json] [--output benchmarks/results/bookkeeping.md]

Pure Python on one CPU core: no GPU and no Megatron. Each figure is a median, the lowest of three rounds: other work on
a shared machine can only add time.
"""

import argparse
import json
import platform
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import numpy as np

from megatron_mamba_cache.policy.block_hashing import CacheSalt, block_keys
from megatron_mamba_cache.policy.eviction_rules import EVICTION_RULES
from megatron_mamba_cache.policy.identifiers import BlockId, BlockKey
from megatron_mamba_cache.policy.kv_block_pool import KVBlockPool
from megatron_mamba_cache.policy.slot_pool import SlotPool

COMMAND = "PYTHONPATH=. python benchmarks/bookkeeping.py --output benchmarks/results/bookkeeping.md"
PROMPT_TOKENS = 131_072
CHAIN_DEPTH = 32
NUM_ROUNDS = 3
BLOCK_SIZES = (256, 64, 16)
MATCHES = """\
Matching alone looks up keys that are there already. A prompt's first try for admission hashes it too and costs both;
its later tries, until the next flush, only match.
"""
LIMITS = """\
The number of operations does not grow; where more than 1.5 times the cost is shown, the CPU's caches are the limit.
Blocks that are unrelated and leave in random order ("chains of 1") each have a key of their own to forget: the key, its
hash, and two places of the dictionary's table, none of which is in the cache any more at 100,000 entries. The last line
is what that takes alone, half of what such an allocation costs more at 100,000; its number, its references, its depth
and its place in the eviction queue take the rest, a miss each. Evicted in the order of their ids, without the shuffle,
the same allocation costs 1.2 times as much at 100,000 as at 1,000.

Other layouts of a block were tried for it, with these ratios: depth and number in one integer, 2.0; key and parent side
by side in one list, 2.1; one object a block, held by the eviction queue itself, 1.7 to 1.9 as a prototype, and two
objects a block more for the garbage collector to walk. Columns in arrays instead of lists, and memory from malloc with
huge pages, changed nothing. To look the next eight up in the dictionary at once takes as long as one by one: the median
fell to 1.3, the mean rose.
"""
POOL_SIZES = (1_000, 10_000, 50_000, 100_000)
SLOT_POOL_SIZES = (1_000, 100_000)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured median."""

    operation: str
    size: int
    microseconds: float


def main() -> None:
    """Measure, then print the figures as a table or as JSON."""
    parser = argparse.ArgumentParser(description="Measure the cost of the cache's bookkeeping.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    figures = best_of([measure() for _ in range(NUM_ROUNDS)])
    if arguments.output:
        arguments.output.write_text(table(figures))
    print(json.dumps(document(figures), indent=2) if arguments.json else table(figures))


def measure() -> list[Figure]:
    """Return every figure, operation by operation and size by size."""
    figures = []
    for block_size in BLOCK_SIZES:
        figures += hash_and_match(block_size)
    for operation in (evicting_allocation, deep_evicting_allocation, flat_evicting_allocation, chain_round_trip):
        figures += [operation(size) for size in POOL_SIZES]
    figures += [evicting_take_live(size) for size in SLOT_POOL_SIZES]
    figures += [evicting_allocation(size, "cost") for size in POOL_SIZES]
    figures += [chain_round_trip(size, "cost") for size in POOL_SIZES]
    figures += [evicting_take_live(size, "cost") for size in SLOT_POOL_SIZES]
    figures += [bare_key_removal(size) for size in POOL_SIZES]
    return figures


def best_of(rounds: list[list[Figure]]) -> list[Figure]:
    """Return the lowest figure of each operation and size."""
    return [min(figures, key=lambda figure: figure.microseconds) for figures in zip(*rounds, strict=True)]


def hash_and_match(block_size: int) -> list[Figure]:
    """Time the keys of a 128k-token prompt, and its match in a pool that holds all its blocks."""
    root = CacheSalt("model", "weights", epoch=0).root()
    tokens = np.random.default_rng(0).integers(0, 128_000, PROMPT_TOKENS)
    keys = block_keys(root, tokens, block_size)
    pool = KVBlockPool(len(keys))
    _hold_chain(pool, keys)
    hashing = _median_us(lambda: block_keys(root, tokens, block_size), repeats=51)
    matching = _median_us(lambda: pool.longest_match(keys), repeats=51)
    return [
        Figure(f"hash a 128k-token prompt, block {block_size}", len(keys), hashing),
        Figure(f"match it, block {block_size}", len(keys), matching),
    ]


def evicting_allocation(num_blocks: int, rule: str = "lru") -> Figure:
    """Time allocate(1) in a full pool of 32-block chains, last used in random order."""
    name = f"allocate(1), evicting, chains of {CHAIN_DEPTH}{_suffix(rule)}"
    return Figure(name, num_blocks, _allocation_us(num_blocks, CHAIN_DEPTH, rule))


def deep_evicting_allocation(num_blocks: int) -> Figure:
    """Time allocate(1) in a full pool of 500-block chains."""
    return Figure("allocate(1), evicting, chains of 500", num_blocks, _allocation_us(num_blocks, 500))


def flat_evicting_allocation(num_blocks: int) -> Figure:
    """Time allocate(1) in a full pool of unrelated blocks, where every block is in the eviction queue."""
    return Figure("allocate(1), evicting, chains of 1", num_blocks, _allocation_us(num_blocks, 1))


def chain_round_trip(num_blocks: int, rule: str = "lru") -> Figure:
    """Time acquire + release of a 32-block chain in a full pool."""
    pool, chains = _full_pool(num_blocks, CHAIN_DEPTH, rule)
    order = iter(random.Random(1).choices(chains, k=2_000))

    def round_trip() -> None:
        chain = next(order)
        pool.acquire(chain)
        pool.release(chain)

    return Figure(
        f"acquire + release {CHAIN_DEPTH} blocks{_suffix(rule)}", num_blocks, _median_us(round_trip, repeats=2_000)
    )


def evicting_take_live(num_slots: int, rule: str = "lru") -> Figure:
    """Time take_live when every slot holds a cached state, last used in random order."""
    pool = SlotPool(num_slots, EVICTION_RULES[rule].state_worth)
    blocks = [BlockId(block) for block in range(num_slots)]
    for block, slot in zip(blocks, pool.reserve(num_slots), strict=True):
        pool.publish(slot, block, num_tokens=256 * (1 + block % 16))
    random.Random(0).shuffle(blocks)
    for block in blocks:
        pool.touch([block])
    samples = []
    for block in map(BlockId, range(num_slots, num_slots + 4_000)):
        start = perf_counter_ns()
        slot = pool.take_live()
        samples.append(perf_counter_ns() - start)
        pool.release_live(slot)
        (reserved,) = pool.reserve()
        pool.publish(reserved, block, num_tokens=256 * (1 + block % 16))
    return Figure(f"take_live, evicting{_suffix(rule)}", num_slots, median(samples) / 1_000)


def bare_key_removal(num_keys: int) -> Figure:
    """Time the removal of a key from a plain dictionary, in random order: a part of every eviction."""
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
    """Return the figures with the machine they were measured on and the growth of each cost."""
    return {
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "figures": [asdict(figure) for figure in figures],
        "cost at 100,000 / cost at 1,000": _growth(figures),
    }


def table(figures: list[Figure]) -> str:
    """Return the document as Markdown."""
    lines = ["# What bookkeeping costs", "", f"    {COMMAND}"]
    lines += [
        "",
        f"Python {platform.python_version()}, {_cpu_name()}, one core. Medians, the lowest of {NUM_ROUNDS} rounds.",
        "",
    ]
    lines += ["| operation | blocks or slots | µs |", "|---|---:|---:|"]
    lines += [f"| {figure.operation} | {figure.size:,} | {figure.microseconds:,.1f} |" for figure in figures]
    lines += ["", MATCHES, "| 128k-token prompt, block | match alone, µs | hash and match, µs |", "|---:|---:|---:|"]
    prompts = figures[: 2 * len(BLOCK_SIZES)]
    for hashing, matching in zip(prompts[::2], prompts[1::2], strict=True):
        both = hashing.microseconds + matching.microseconds
        lines.append(f"| {PROMPT_TOKENS // matching.size} | {matching.microseconds:,.1f} | {both:,.1f} |")
    lines += ["", "| operation | cost at 100,000 / cost at 1,000 |", "|---|---:|"]
    lines += [f"| {operation} | {ratio:.2f} |" for operation, ratio in _growth(figures).items()]
    return "\n".join([*lines, "", LIMITS])


def _growth(figures: list[Figure]) -> dict[str, float]:
    cost = {(figure.operation, figure.size): figure.microseconds for figure in figures}
    return {name: cost[name, 100_000] / cost[name, 1_000] for name, size in cost if size == 100_000}


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _median_us(operation: Callable[[], object], repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        start = perf_counter_ns()
        operation()
        samples.append(perf_counter_ns() - start)
    return median(samples) / 1_000


def _hold_chain(pool: KVBlockPool, keys: list[BlockKey]) -> list[BlockId]:
    blocks = pool.allocate(len(keys))
    parent = None
    for block, key in zip(blocks, keys, strict=True):
        parent = pool.register(block, key, parent)
    return blocks


def _new_keys(stamps: "count[int]", depth: int) -> list[BlockKey]:
    # Spread over 256 bits as real keys are, so that the hash map is as scattered in memory.
    return [
        BlockKey(next(stamps) * 0x9E3779B97F4A7C15F39CC0605CEDC8341082276BF3A27251F86C6A11D0C18E95)
        for _ in range(depth)
    ]


def _full_pool(num_blocks: int, depth: int, rule: str = "lru") -> tuple[KVBlockPool, list[list[BlockId]]]:
    """Return a pool with every block cached, and its chains."""
    pool = KVBlockPool(num_blocks, EVICTION_RULES[rule].block_worth)
    stamps = count(1)
    depths = [min(depth, num_blocks - start) for start in range(0, num_blocks, depth)]
    chains = [_hold_chain(pool, _new_keys(stamps, chain_depth)) for chain_depth in depths]
    random.Random(0).shuffle(chains)
    for chain in chains:
        pool.release(chain)
    return pool, chains


def _suffix(rule: str) -> str:
    return "" if rule == "lru" else f", {rule}-aware"


def _allocation_us(num_blocks: int, depth: int, rule: str = "lru") -> float:
    pool, _ = _full_pool(num_blocks, depth, rule)
    stamps = count(10**9)
    samples: list[int] = []
    while len(samples) < 4_000:
        blocks = []
        for _ in range(depth):
            start = perf_counter_ns()
            (block,) = pool.allocate(1)
            samples.append(perf_counter_ns() - start)
            blocks.append(block)
        parent = None
        for block, key in zip(blocks, _new_keys(stamps, depth), strict=True):
            parent = pool.register(block, key, parent)
        pool.release(blocks)  # full again, with as deep a chain
    return median(samples) / 1_000


if __name__ == "__main__":
    main()
