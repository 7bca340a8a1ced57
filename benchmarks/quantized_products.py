"""How close do products of few tokens with quantized weights come to the bytes' floor?

    PYTHONPATH=. python3 benchmarks/quantized_products.py [--shapes NAME ...] [--tokens N ...] [--sweep] [--json FILE]

Each time is the median of a product inside a CUDA graph of many, whose weights take turns, so that they are not in the
L2 cache. Weights and tokens are random. The floor is the bytes of codes, scales, tokens and results at the rate of a
plain copy, measured in the same run; fractions are floor / time. Peers: `torch._scaled_mm` with a scale per tensor,
whose tokens are quantized before, and the product of bf16 weights, as a fraction of the same floor.

With `--sweep`, products with other tile sizes, best first.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import ceil
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring.ceilings import copy_us
from measuring.graph_timing import launch_us
from measuring.machine import describe_machine
from torch import Tensor

from megatron_mamba_cache.kernels.compilation import compiling_ahead
from megatron_mamba_cache.kernels.quantized.few_token_gemm import multiply_few_tokens, num_counters
from megatron_mamba_cache.kernels.quantized.few_token_tiles import (
    FewTokenTiles,
    Tiles,
    choose_tiles,
    split_token_tiles,
)
from megatron_mamba_cache.kernels.quantized.one_token_gemm import (
    OneTokenTiles,
    multiply_one_quantized_token,
    one_token_tiles,
)
from megatron_mamba_cache.kernels.quantized.quantized_matrix import QuantizedMatrix, packed

AnyTiles = Tiles | OneTokenTiles
TOKENS = (1, 8, 64)
COLD_BYTES = 2**28  # of weights that launches read between two uses of the same ones: several times the L2 cache
TOLERANCE = 0.01
BLOCK = 128
BEST_SHOWN = 6
ONE_TOKEN_TILES = (
    (4, 256, 1, 2), (4, 256, 2, 2), (4, 256, 3, 2), (2, 256, 2, 2), (2, 512, 2, 4), (4, 512, 1, 4), (4, 512, 2, 4),
    (8, 256, 1, 4), (8, 256, 2, 4), (4, 128, 2, 1), (2, 128, 3, 1),
)  # fmt: skip
"""Rows, pairs of words, iterations ahead and warps."""

SHAPES = {
    "8b-qkv": (6144, 4096),
    "8b-attention-out": (4096, 4096),
    "8b-mamba-in": (18560, 4096),
    "8b-mamba-out": (4096, 8192),
    "8b-mlp-up": (21504, 4096),
    "8b-mlp-down": (4096, 21504),
    "27b-qkv": (14336, 5120),
    "27b-attention-out": (5120, 6144),
    "27b-delta-in": (16384, 5120),
    "27b-gate-up": (34816, 5120),
    "27b-down": (5120, 17408),
}
"""Rows and columns of the dense weights of NemotronH 8B and Qwen3.6-27B."""
SWEPT = ("8b-attention-out", "8b-mamba-out", "27b-gate-up", "27b-down")


@dataclass(frozen=True, slots=True)
class Figure:
    """Times of a product in microseconds, its floor, and its greatest error as a share of the mean result."""

    shape: str
    form: str
    tokens: int
    floor_us: float
    product_us: float
    scaled_mm_us: float
    bf16_us: float
    error: float


class Bench:
    """Products with weights of one shape."""

    def __init__(self, name: str, form: str) -> None:
        torch.manual_seed(0)
        self.name, self.form = name, form
        self.rows, self.columns = SHAPES[name]
        count = 1 + ceil(COLD_BYTES / (self.rows * self.columns))
        self.weights = [self._random() for _ in range(count)]
        self.counters = torch.zeros(num_counters(self.weights[0]), dtype=torch.int32, device="cuda")

    def _random(self) -> QuantizedMatrix:
        codes = torch.randn(self.rows, self.columns, device="cuda").mul_(64).to(torch.float8_e4m3fn)
        words = packed(codes.view(torch.uint8), 8)
        if self.form == "row":
            return QuantizedMatrix(words, 8, factors=torch.rand(self.rows, device="cuda").mul_(1e-3))
        grid = ceil(self.rows / BLOCK), ceil(self.columns / BLOCK)
        return QuantizedMatrix(words, 8, torch.rand(grid, device="cuda").mul_(1e-3), None, BLOCK, BLOCK)

    def tokens(self, count: int) -> Tensor:
        """Return random tokens."""
        return torch.randn(count, self.columns, device="cuda").bfloat16()

    def floor_us(self, count: int) -> float:
        """Return the time of a copy of all bytes that a product moves."""
        return copy_us(self.weights[0].nbytes + 2 * count * (self.rows + self.columns))

    def multiply(self, x: Tensor, weight: QuantizedMatrix, tiles: AnyTiles | None = None) -> Tensor:
        """Return the product with a weight; a single token has its own kernel unless tiles are for another one."""
        if isinstance(tiles, OneTokenTiles) or (tiles is None and len(x) == 1):
            return multiply_one_quantized_token(x, weight, tiles=tiles)
        return multiply_few_tokens(x, weight, self.counters, tiles=tiles)

    def run(self, x: Tensor, tiles: AnyTiles | None = None) -> list[Callable[[], Tensor]]:
        """Return the product with each weight."""
        return [
            lambda weight=weight: self.multiply(x, weight, tiles)  # type: ignore[misc]
            for weight in self.weights
        ]

    def error(self, x: Tensor, tiles: AnyTiles | None = None) -> float:
        """Return the greatest error of the product with the first weight as a share of the mean result."""
        expected = F.linear(x.double(), self.weights[0].dequantized(torch.float64))
        found = self.multiply(x, self.weights[0], tiles)
        return float((found.double() - expected).abs().max() / expected.abs().mean())

    def measure(self, count: int) -> Figure:
        """Measure the product and its peers."""
        x, floor = self.tokens(count), self.floor_us(count)
        error = self.error(x)
        least = 1 if count <= 16 else 17 if count <= 32 else 33  # of the range in which bits do not depend on it
        starts = range(min(count, 16)) if least == 1 else range(count - least + 1)
        together = multiply_few_tokens(x, self.weights[0], self.counters)
        alone = [multiply_few_tokens(x[first : first + least], self.weights[0], self.counters) for first in starts]
        if not all(torch.equal(one, together[first : first + least]) for first, one in zip(starts, alone, strict=True)):
            raise RuntimeError(f"{self.name}: a token's bits depend on other tokens")
        time = launch_us(self.run(x), floor)
        return Figure(self.name, self.form, count, floor, time, self._scaled_mm_us(x, floor), self._bf16_us(x), error)

    def _scaled_mm_us(self, x: Tensor, expected: float) -> float:
        padded = x.new_zeros(ceil(len(x) / 16) * 16, self.columns)
        padded[: len(x)] = x
        given, one = padded.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
        weights = [weight.words.view(torch.float8_e4m3fn).t() for weight in self.weights]  # the order does not matter
        return launch_us(
            [
                lambda weight=weight: torch._scaled_mm(given, weight, one, one, out_dtype=torch.bfloat16)  # type: ignore[misc]
                for weight in weights
            ],
            expected,
        )

    def _bf16_us(self, x: Tensor) -> float:
        count = 1 + ceil(COLD_BYTES / (2 * self.rows * self.columns))
        weights = [torch.randn(self.rows, self.columns, device="cuda").bfloat16() for _ in range(count)]
        return launch_us(
            [lambda weight=weight: F.linear(x, weight) for weight in weights],  # type: ignore[misc]
            2 * self.floor_us(len(x)),
        )


def candidates(weight: QuantizedMatrix, count: int) -> Iterator[AnyTiles]:
    """Yield tile sizes of all kernels that are worth a measurement for a number of tokens."""
    if count == 1:
        yield from map(OneTokenTiles, *zip(*ONE_TOKEN_TILES, strict=True))
        return
    tokens = 16 if count <= 16 else 32 if count <= 32 else 64
    for outputs, programs in product((128, 256), (132, 128, 120, 96)):
        if programs <= ceil(weight.shape[0] / outputs) * ceil(weight.shape[1] / BLOCK):
            yield split_token_tiles(tokens, outputs, programs, programs)
    widths = ((64, 4), (128, 8)) if tokens == 16 else ((128, 4), (128, 8), (256, 8))
    loads = ((False, 0), (True, 0))
    for (outputs, warps), stages, parts, (boxes, lines) in product(widths, (3, 4), (1, 2, 4, 8), loads):
        stage_bytes = 128 * (outputs + 2 * tokens)
        if stages * stage_bytes <= 200 * 1024:
            yield FewTokenTiles(tokens, outputs, 64, parts, warps, stages, boxes, lines)


def chosen_tiles(weight: QuantizedMatrix, count: int) -> AnyTiles:
    """Return the tiles of the kernel that multiplies a number of tokens."""
    return one_token_tiles(weight) if count == 1 else choose_tiles(weight, count)


def sweep(bench: Bench, count: int) -> list[tuple[float, AnyTiles]]:
    """Return the time of a product with each tile sizes, the best first."""
    x, found = bench.tokens(count), []
    with compiling_ahead(torch.device("cuda", torch.cuda.current_device())):
        for tiles in candidates(bench.weights[0], count):
            bench.run(x, tiles)[0]()
    for tiles in candidates(bench.weights[0], count):
        bench.counters.zero_()
        try:
            if bench.error(x, tiles) < TOLERANCE * 10:
                found.append((launch_us(bench.run(x, tiles), bench.floor_us(count)), tiles))
            else:
                print(f"{bench.name}, {count} tokens: wrong with {tiles}")
        except Exception as error:
            print(f"{bench.name}, {count} tokens: {type(error).__name__} with {tiles}: {str(error)[:100]}")
    return sorted(found, key=lambda pair: pair[0])


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "| shape | scales | tokens | floor, µs | product, µs | of the floor | `_scaled_mm` | bf16 weights | error |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in figures:
        shares = (one.floor_us / us for us in (one.product_us, one.scaled_mm_us, one.bf16_us))
        cells = [one.shape, one.form, f"{one.tokens}", f"{one.floor_us:.1f}", f"{one.product_us:.1f}"]
        lines.append(f"| {' | '.join([*cells, *(f'{share:.2f}' for share in shares), f'{one.error:.4f}'])} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, then print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: all, or a few with --sweep")
    parser.add_argument("--forms", nargs="+", choices=("row", "block"), default=["block", "row"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="N")
    parser.add_argument("--sweep", action="store_true", help="measure other tile sizes too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    figures: list[Figure] = []
    swept: list[dict[str, object]] = []
    for name, form in product(arguments.shapes or SHAPES, arguments.forms):
        bench = Bench(name, form)
        figures += [bench.measure(count) for count in arguments.tokens]
        for count in arguments.tokens if arguments.sweep and (arguments.shapes or name in SWEPT) else ():
            best = sweep(bench, count)
            swept += [{"shape": name, "form": form, "tokens": count, "us": us} | asdict(tiles) for us, tiles in best]
            floor = bench.floor_us(count)
            print(f"{name}, {form}, {count} tokens; chosen: {chosen_tiles(bench.weights[0], count)}")
            for us, tiles in best[:BEST_SHOWN]:
                print(f"  {us:6.1f} µs, {floor / us:.2f}: {tiles}", flush=True)
        del bench
        torch.cuda.empty_cache()
    print(table(figures))
    if arguments.json:
        document = {"machine": describe_machine(), "figures": [asdict(one) for one in figures], "sweep": swept}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
