"""Compare the align copy with a plain copy of the same bytes, and measure its time when nothing is copied.

    PYTHONPATH=. python3 benchmarks/align_copy.py [--json FILE] [--sweep]

Each time is the median of one launch inside a CUDA graph of many launches, on random data. Successive launches copy
different slots, so that none are in the L2 cache. Pools have 64 source slots and 64 target slots. A plain copy is
measured up to 384 MiB; the times of larger copies are extrapolated.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from measuring.graph_timing import MEMCPY_NOTE, Launch, launch_us, memcpy_us
from measuring.machine import describe_machine
from measuring.slot_sizes import MODELS, WINDOW_LEN, SlotModel
from torch import Tensor

from megatron_mamba_cache.recurrences.align_copy import TILING, align_copy
from megatron_mamba_cache.recurrences.batches import AlignBatch
from megatron_mamba_cache.recurrences.moves import StateMove
from megatron_mamba_cache.recurrences.slot_tiles import CopyTiling

BLOCK_SIZE = 256
NUM_SOURCES = 64
CASES = ((1, 1), (8, 8), (64, 64), (256, 16), (64, 4), (256, 0), (64, 0), (1, 0))  # requests, copied states
SWEPT_CASES = ((1, 1), (8, 8), (64, 64), (256, 16), (256, 0))
TILINGS = (
    TILING,
    CopyTiling(tile_len=2048, num_warps=8, programs_per_sm=4),
    CopyTiling(tile_len=2048, num_warps=8, programs_per_sm=2),
    CopyTiling(tile_len=2048, num_warps=8, programs_per_sm=1),
    CopyTiling(tile_len=4096, num_warps=8, programs_per_sm=2),
    CopyTiling(tile_len=4096, num_warps=16, programs_per_sm=2),
    CopyTiling(tile_len=4096, num_warps=16, programs_per_sm=1),
    CopyTiling(tile_len=8192, num_warps=16, programs_per_sm=1),
    CopyTiling(tile_len=1024, num_warps=4, programs_per_sm=8),
    CopyTiling(tile_len=1024, num_warps=8, programs_per_sm=4),
    CopyTiling(tile_len=512, num_warps=4, programs_per_sm=8),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured case, with times in microseconds. Without copied states, there is no plain copy to compare with."""

    model: str
    rows: int
    copying: int
    tiling: CopyTiling
    us: float
    memcpy_us: float | None

    @property
    def ratio(self) -> float | None:
        """Speed relative to the plain copy."""
        return self.memcpy_us / self.us if self.memcpy_us else None


class Bench:
    """State pools of one model."""

    def __init__(self, model: SlotModel, num_drafts: int) -> None:
        self.model = model
        self.num_columns = 1 + num_drafts
        lead = (model.num_layers, 2 * NUM_SOURCES)
        conv_shape, ssm_shape = (WINDOW_LEN + num_drafts, model.conv_dim), (model.num_heads, 128, 64)
        self.conv = torch.empty(lead + conv_shape, dtype=torch.bfloat16, device="cuda").normal_()
        self.ssm = torch.empty(lead + ssm_shape, dtype=model.ssm_dtype, device="cuda").normal_()
        self.moves = [StateMove(self.conv, self.conv, WINDOW_LEN), StateMove(self.ssm, self.ssm)]

    def rotations(self, num_rows: int, num_copying: int) -> list[AlignBatch]:
        """Return steps that copy each source slot once, each to its own target."""
        count = NUM_SOURCES // num_copying if num_copying else 8
        return [self._step(num_rows, num_copying, number * num_copying) for number in range(count)]

    def launches(self, steps: Sequence[AlignBatch], tiling: CopyTiling) -> list[Launch]:
        """Return the align copy of each step."""
        return [lambda rows=rows: align_copy(self.moves, rows, BLOCK_SIZE, tiling) for rows in steps]

    def memcpy_us(self, num_copying: int) -> float:
        """Return the time in microseconds of a plain copy of `num_copying` states."""
        return memcpy_us(self.ssm, num_copying * self.model.slot_bytes)

    def check(self) -> None:
        """Copy 8 of 16 states and compare them with their sources.

        Raises:
            RuntimeError: If a copied state differs from its source.
        """
        rows = self.rotations(16, 8)[0]
        align_copy(self.moves, rows, BLOCK_SIZE)
        for row in range(0, 16, 2):
            target, source = int(rows.targets[row]), int(rows.columns[row, 0])
            window = self.conv[:, source, 1 : 1 + WINDOW_LEN]
            is_copied = torch.equal(self.conv[:, target, :WINDOW_LEN], window)
            if not is_copied or not torch.equal(self.ssm[:, target], self.ssm[:, source]):
                raise RuntimeError(f"{self.model.name}: slot {target} must be a copy of slot {source}, but it differs")

    def _step(self, num_rows: int, num_copying: int, first: int) -> AlignBatch:
        """Return requests of which every n-th reaches a block boundary with its first draft, and no other does."""
        row = torch.arange(num_rows, dtype=torch.int32, device="cuda")
        period = num_rows // num_copying if num_copying else num_rows + 1
        copies = (row % period == 0) & (row // period < num_copying) if num_copying else torch.zeros_like(row).bool()
        source = (first + row // period) % NUM_SOURCES
        packed = torch.full((num_rows, 2 + self.num_columns), 2, dtype=torch.int64, device="cuda")
        return AlignBatch(
            computed=torch.where(copies, BLOCK_SIZE - 2, 100).to(torch.int32),
            scheduled=torch.full_like(row, self.num_columns),
            drafts=torch.full_like(row, self.num_columns - 1),
            accepted=packed[:, 0],
            columns=source[:, None].repeat(1, self.num_columns),
            state_columns=torch.zeros_like(row),
            targets=NUM_SOURCES + source,
        )


def measure(bench: Bench, cases: Iterable[tuple[int, int]], tilings: Iterable[CopyTiling]) -> list[Figure]:
    """Measure every case with every tiling, and the plain copy of each case once."""
    figures = []
    for num_rows, num_copying in cases:
        expected_us = max(2.0, num_copying * bench.model.slot_bytes * 2 / 4e6)
        plain_us = bench.memcpy_us(num_copying) if num_copying else None
        steps = bench.rotations(num_rows, num_copying)
        for tiling in tilings:
            us = launch_us(bench.launches(steps, tiling), expected_us)
            figures.append(Figure(bench.model.name, num_rows, num_copying, tiling, us, plain_us))
    return figures


def after_small_op(bench: Bench, num_rows: int, num_copying: int) -> dict[str, float]:
    """Measure a small op that writes the accepted counts, alone and followed by the align copy."""
    steps = bench.rotations(num_rows, num_copying)
    twos = torch.full((num_rows,), 2, device="cuda")

    def verify(accepted: Tensor) -> None:
        torch.clamp(twos, max=2, out=accepted)

    copies = bench.launches(steps, TILING)
    small = [lambda accepted=rows.accepted: verify(accepted) for rows in steps]
    pairs = [lambda op=op, copy=copy: (op(), copy()) for op, copy in zip(small, copies, strict=True)]
    expected_us = max(4.0, num_copying * bench.model.slot_bytes * 2 / 4e6)
    return {"small op": launch_us(small, 2.0), "small op, then align copy": launch_us(pairs, expected_us)}


def table(figures: Sequence[Figure]) -> str:
    """Return a Markdown table with a line per case and a column per model."""
    models = list(dict.fromkeys(figure.model for figure in figures))
    by_case = {(figure.rows, figure.copying, figure.model): figure for figure in figures}
    lines = ["| rows / copying | " + " | ".join(f"{model}: µs, of memcpy" for model in models) + " |"]
    lines.append("|---|" + "---:|" * len(models))
    for rows, copying in dict.fromkeys((figure.rows, figure.copying) for figure in figures):
        cells = [_cell(by_case[rows, copying, model]) for model in models]
        lines.append(f"| {rows} / {copying} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sweep_table(figures: Sequence[Figure]) -> str:
    """Return a Markdown table of one model with a line per tiling and a column per case."""
    cases = list(dict.fromkeys((figure.rows, figure.copying) for figure in figures))
    found = {(figure.tiling, figure.rows, figure.copying): figure for figure in figures}
    lines = [f"{figures[0].model}:", "", "| tile, warps, programs an SM | "]
    lines[-1] += " | ".join(f"{rows} / {copying}" for rows, copying in cases) + " |"
    lines.append("|---|" + "---:|" * len(cases))
    for tiling in dict.fromkeys(figure.tiling for figure in figures):
        cells = [_cell(found[tiling, rows, copying]) for rows, copying in cases]
        name = f"{tiling.tile_len}, {tiling.num_warps}, {tiling.programs_per_sm}"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(figure: Figure) -> str:
    return f"{figure.us:,.2f}" if figure.ratio is None else f"{figure.us:,.1f}, {figure.ratio:.3f}"


def main() -> None:
    """Measure, then print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description="Measure the align copy against a memcpy of the same bytes.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    parser.add_argument("--sweep", action="store_true", help="compare tilings on the 8B bf16 states instead")
    parser.add_argument("--drafts", type=int, default=3, metavar="K", help="number of drafts per step; default: 3")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    figures: list[Figure] = []
    small_ops: dict[str, dict[str, float]] = {}
    for model in MODELS[:1] if arguments.sweep else MODELS:
        bench = Bench(model, arguments.drafts)
        bench.check()
        if arguments.sweep:
            figures += (found := measure(bench, SWEPT_CASES, TILINGS))
            print(sweep_table(found) + "\n")
        else:
            figures += measure(bench, CASES, [TILING])
        if model is MODELS[0]:
            small_ops = {
                f"{rows} / {copies}": after_small_op(bench, rows, copies) for rows, copies in ((64, 4), (256, 0))
            }
        del bench
        torch.cuda.empty_cache()
    if not arguments.sweep:
        print(table(figures) + f"\n\n{MEMCPY_NOTE}\n")
    for case, times in small_ops.items():
        print(f"{MODELS[0].name}, {case}: " + "; ".join(f"{name} {us:.2f} µs" for name, us in times.items()))
    if arguments.json:
        document = {"machine": describe_machine(), "small ops": small_ops}
        document["figures"] = [asdict(figure) | {"ratio": figure.ratio} for figure in figures]
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
