"""Compare copies of whole slots with plain copies of the same bytes and with loops over slots.

    PYTHONPATH=. python3 benchmarks/slot_copies.py [--json FILE] [--sweep]

Each time is the median of one launch inside a CUDA graph of many launches, on random data. Successive launches use
different slots, so that none are in the L2 cache. Pools have 64 source slots and 64 target slots. A plain copy is
measured up to 384 MiB; the times of larger copies are extrapolated.
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
BYTES_PER_US = 4e6  # approximate speed of a copy, from which the number of repetitions in a graph is computed
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
        """Speed relative to the plain copy."""
        return self.memcpy_us / self.us


def slot_numbers(count: int, device: str) -> list[Tensor]:
    """Return lists of `count` source slots, cycling through all sources; each target slot is NUM_SOURCES higher."""
    return list(torch.arange(NUM_SOURCES, dtype=torch.int32, device=device).split(count))


class Bench:
    """State pools of one model."""

    def __init__(self, model: SlotModel) -> None:
        self.model = model
        lead = (model.num_layers, 2 * NUM_SOURCES)
        conv = torch.empty(*lead, 3, model.conv_dim, dtype=torch.bfloat16, device="cuda").normal_()
        self.pools = (
            conv,
            torch.empty(*lead, model.num_heads, 128, 64, dtype=model.ssm_dtype, device="cuda").normal_(),
        )

    def copies(self, count: int, tiling: CopyTiling = TILING) -> list[Launch]:
        """Return launches of our op."""
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
        """Return copies of all slots at once by advanced indexing."""

        def copy(src: Tensor, dst: Tensor) -> None:
            for pool in self.pools:
                pool[:, dst] = pool[:, src]

        lists = [src.long() for src in slot_numbers(count, "cuda")]
        return [lambda src=src, dst=src + NUM_SOURCES: copy(src, dst) for src in lists]

    def memcpy_us(self, count: int) -> float:
        """Return the time in microseconds of a plain copy of the same number of bytes."""
        return memcpy_us(self.pools[1], count * self.model.slot_bytes)

    def check(self) -> None:
        """Copy some slots once, and compare them with their sources.

        Raises:
            RuntimeError: If a copied slot differs from its source.
        """
        self.copies(16)[1]()
        slots = slice(16, 32)
        targets = slice(16 + NUM_SOURCES, 32 + NUM_SOURCES)
        if not all(torch.equal(pool[:, targets], pool[:, slots]) for pool in self.pools):
            raise RuntimeError(f"{self.model.name}: copied slots must equal their sources, but they differ")


def measure(bench: Bench, counts: Sequence[int] = COUNTS) -> list[Figure]:
    """Measure every way to copy for every number of slots, and a plain copy of the same bytes."""
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
    """Return a Markdown table with a line per model and number of slots, and a column per way to copy."""
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
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
