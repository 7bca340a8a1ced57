"""Compare whole-slot copies with plain copies of the same bytes and with loops over slots.

    PYTHONPATH=. python3 benchmarks/slot_copies.py [--json FILE] [--sweep]

Each figure is the median time of a launch inside a CUDA graph of many, on random data; successive launches use
different slots, so that none are in the L2 cache. Pools hold 64 source and 64 target slots. A memcpy is measured up to
384 MiB and scaled by bytes beyond that.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from measuring.graph_timing import MEMCPY_NOTE, Launch, launch_us, memcpy_us
from measuring.machine import describe_machine
from measuring.slot_sizes import MODELS, SlotModel
from torch import Tensor

from megatron_mamba_cache.recurrences.slot_copies import TILING, copy_slots
from megatron_mamba_cache.recurrences.slot_tiles import CopyTiling

NUM_SOURCES = 64
COUNTS = (1, 4, 16, 64)
BYTES_PER_US = 4e6  # about what a copy reads and writes, to choose how often a graph repeats it
FANCY_SLOWDOWN = 9
TILINGS = (
    TILING,
    CopyTiling(tile_len=2048, num_warps=8, programs_per_sm=2),
    CopyTiling(tile_len=4096, num_warps=8, programs_per_sm=1),
    CopyTiling(tile_len=4096, num_warps=8, programs_per_sm=2),
    CopyTiling(tile_len=8192, num_warps=16, programs_per_sm=1),
    CopyTiling(tile_len=2048, num_warps=8, programs_per_sm=4),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One way to copy `slots` slots of a model; times in microseconds."""

    model: str
    slots: int
    way: str
    us: float
    memcpy_us: float

    @property
    def ratio(self) -> float:
        """Return the speed relative to the memcpy."""
        return self.memcpy_us / self.us


def slot_numbers(count: int, device: str) -> list[Tensor]:
    """Return lists of `count` source slots, cycling through all; targets have numbers NUM_SOURCES higher."""
    return list(torch.arange(NUM_SOURCES, dtype=torch.int32, device=device).split(count))


class Bench:
    """The pools of one model."""

    def __init__(self, model: SlotModel) -> None:
        self.model = model
        lead = (model.num_layers, 2 * NUM_SOURCES)
        conv = torch.empty(*lead, 3, model.conv_dim, dtype=torch.bfloat16, device="cuda").normal_()
        self.pools = (
            conv,
            torch.empty(*lead, model.num_heads, 128, 64, dtype=model.ssm_dtype, device="cuda").normal_(),
        )

    def copies(self, count: int, tiling: CopyTiling = TILING) -> list[Launch]:
        """Return the op's copies."""
        lists = [(src, src + NUM_SOURCES) for src in slot_numbers(count, "cuda")]
        return [lambda src=src, dst=dst: copy_slots(self.pools, self.pools, src, dst, tiling) for src, dst in lists]

    def request_copies(self, count: int) -> list[Launch]:
        """Return copies in a loop over requests and state types."""

        def copy(slots: Sequence[int]) -> None:
            for slot in slots:
                for pool in self.pools:
                    pool[:, slot + NUM_SOURCES].copy_(pool[:, slot])

        return [partial(copy, src.tolist()) for src in slot_numbers(count, "cpu")]

    def fancy_copies(self, count: int) -> list[Launch]:
        """Return copies by advanced indexing with all slots at once."""

        def copy(src: Tensor, dst: Tensor) -> None:
            for pool in self.pools:
                pool[:, dst] = pool[:, src]

        lists = [src.long() for src in slot_numbers(count, "cuda")]
        return [lambda src=src, dst=src + NUM_SOURCES: copy(src, dst) for src in lists]

    def memcpy_us(self, count: int) -> float:
        """Return the time of a plain copy of the same number of bytes."""
        return memcpy_us(self.pools[1], count * self.model.slot_bytes)

    def check(self) -> None:
        """Copy some slots once.

        Raises:
            RuntimeError: If the result is wrong.
        """
        self.copies(16)[1]()
        slots = slice(16, 32)
        targets = slice(16 + NUM_SOURCES, 32 + NUM_SOURCES)
        if not all(torch.equal(pool[:, targets], pool[:, slots]) for pool in self.pools):
            raise RuntimeError(f"{self.model.name}: slots were not copied")


def measure(bench: Bench, counts: Sequence[int] = COUNTS) -> list[Figure]:
    """Measure every way at every count, and a memcpy of the same bytes."""
    figures = []
    for count in counts:
        expected_us = 2 * count * bench.model.slot_bytes / BYTES_PER_US
        plain_us = bench.memcpy_us(count)
        ways = {"copy_slots": bench.copies, "copy_ a request": bench.request_copies}
        times = {way: launch_us(launches(count), expected_us) for way, launches in ways.items()}
        times["fancy indexing"] = launch_us(bench.fancy_copies(count), FANCY_SLOWDOWN * expected_us)
        figures += [Figure(bench.model.name, count, way, us, plain_us) for way, us in times.items()]
    return figures


def sweep(bench: Bench) -> list[Figure]:
    """Measure the copy with every tiling."""
    figures = []
    for count in COUNTS:
        expected_us = 2 * count * bench.model.slot_bytes / BYTES_PER_US
        plain_us = bench.memcpy_us(count)
        for tiling in TILINGS:
            way = f"{tiling.tile_len}, {tiling.num_warps}, {tiling.programs_per_sm}"
            us = launch_us(bench.copies(count, tiling), expected_us)
            figures.append(Figure(bench.model.name, count, way, us, plain_us))
    return figures


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as Markdown: a line per model and count, a column per way."""
    ways = list(dict.fromkeys(figure.way for figure in figures))
    found = {(figure.model, figure.slots, figure.way): figure for figure in figures}
    lines = ["| model, slots | memcpy, µs | " + " | ".join(f"{way}: µs, of memcpy" for way in ways) + " |"]
    lines.append("|---|" + "---:|" * (1 + len(ways)))
    for model, slots in dict.fromkeys((figure.model, figure.slots) for figure in figures):
        cells = [f"{found[model, slots, way].us:,.1f}, {found[model, slots, way].ratio:.3f}" for way in ways]
        plain_us = found[model, slots, ways[0]].memcpy_us
        lines.append(f"| {model}, {slots} | {plain_us:,.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, then print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description="Measure whole-slot copies against a memcpy of the same bytes.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to FILE")
    parser.add_argument("--sweep", action="store_true", help="compare tilings on the 8B bf16 states instead")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    figures: list[Figure] = []
    for model in MODELS[:1] if arguments.sweep else MODELS:
        bench = Bench(model)
        bench.check()
        figures += sweep(bench) if arguments.sweep else measure(bench)
        del bench
        torch.cuda.empty_cache()
    print(f"{table(figures)}\n\n{MEMCPY_NOTE}")
    if arguments.json:
        document = {"machine": describe_machine()}
        document["figures"] = [asdict(figure) | {"ratio": figure.ratio} for figure in figures]
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
