"""How close do products of routed experts with quantized weights come to the bytes' floor?

    PYTHONPATH=. python3 benchmarks/quantized_experts.py [--shapes NAME ...] [--forms FORM ...] [--tokens N ...]
        [--prompts N ...] [--json FILE]

Each time is the median of a product inside a CUDA graph of many, whose tokens differ, so that their experts are not in
the L2 cache. Weights and tokens are random, and all experts are equally likely. The floor is the bytes of codes and
scales of the experts that are hit, at the rate of a plain copy measured in the same run; fractions are floor / time.
"layer" is from the choice of experts to the weighted sum. For a few tokens with FP8, the second product is also summed.
The peer is the same layer with bf16 weights.

With `--prompts`, the layer also runs on that many prompt tokens: with FP8 activations if the weights are FP8, and with
the exact meaning of the weights. The floor is then the time of the FLOPs at the speed of a large bf16 GEMM.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from math import ceil
from pathlib import Path

import torch
from experts import SHAPES, LayerShape
from measuring.ceilings import copy_us, matmul_tflops
from measuring.graph_timing import launch_us
from measuring.machine import describe_machine
from torch import Tensor

from megatron_mamba_cache.kernels.experts.expert_order import order_by_expert
from megatron_mamba_cache.kernels.experts.pair_gemms import FEW_TOKENS
from megatron_mamba_cache.kernels.experts.prompt_experts import (
    QuantizedExperts,
    grouped_prompt_gemm,
    routed_prompt_experts,
)
from megatron_mamba_cache.kernels.experts.quantized_experts import (
    can_multiply_quantized,
    quantized_grouped_gemm,
    routed_quantized_experts,
)
from megatron_mamba_cache.kernels.experts.quantized_pairs import quantized_pair_gemm
from megatron_mamba_cache.kernels.experts.quantized_rows import can_multiply_pairs
from megatron_mamba_cache.kernels.experts.quantized_sums import quantized_summed_gemm
from megatron_mamba_cache.kernels.experts.reference_experts import ExpertOrder
from megatron_mamba_cache.kernels.experts.routed_experts import routed_experts
from megatron_mamba_cache.kernels.quantized.activations import ActivationScheme, quantize_activations
from megatron_mamba_cache.kernels.quantized.dequantize import dequantize
from megatron_mamba_cache.kernels.quantized.quantized_matrix import QuantizedMatrix, packed

TOKENS = (1, 8, 64, 256)
COLD_BYTES = 2**28  # of experts that launches read between two uses of the same ones: several times the L2 cache
MOST_BATCHES = 32
BLOCK = 128
FORMS = {"nano": ("row", "nvfp4"), "qwen36-35b": ("block", "row", "nvfp4", "mxfp4")}
"""Formats of weights by model: FP8 with a scale per row or per block of 128 x 128, NVFP4 and MXFP4."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Times of a layer's products in microseconds, with their floors, and the relative error of the layer."""

    shape: str
    form: str
    tokens: int
    experts_hit: float
    first_floor_us: float
    first_us: float
    second_floor_us: float
    second_us: float
    layer_us: float
    bf16_layer_us: float
    error: float


@dataclass(frozen=True, slots=True)
class PromptFigure:
    """Times of a layer with prompt tokens in microseconds; those of FP8 activations are None for FP4 weights."""

    shape: str
    form: str
    tokens: int
    floor_us: float
    bf16_us: float
    exact_us: float
    dequantize_us: float
    exact_error: float
    fp8_us: float | None = None
    quantize_us: float | None = None
    first_us: float | None = None
    second_us: float | None = None
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens, the experts that they choose, and the result of the first product."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    order: ExpertOrder
    inner: Tensor


class Bench:
    """A layer of experts with random quantized weights."""

    def __init__(self, name: str, form: str) -> None:
        torch.manual_seed(0)
        self.name, self.form, self.shape = name, form, SHAPES[name]
        width = self.shape.inner * (2 if self.shape.activation == "gated_silu" else 1)
        self.first = self._random(width, self.shape.hidden)
        self.second = self._random(self.shape.hidden, self.shape.inner)
        self.plain = [dequantize(weight) for weight in (self.first, self.second)]

    def _random(self, rows: int, columns: int) -> QuantizedMatrix:
        shape: LayerShape = self.shape
        if self.form == "nvfp4":
            codes = torch.randint(16, (shape.num_experts, rows, columns), dtype=torch.uint8, device="cuda")
            scales = torch.rand(shape.num_experts, rows, columns // 16, device="cuda").mul_(400)
            factors = torch.full((shape.num_experts, rows), 1 / (600 * columns**0.5), device="cuda")
            return QuantizedMatrix(packed(codes, 4), 4, scales.to(torch.float8_e4m3fn), factors, 1, 16)
        if self.form == "mxfp4":
            codes = torch.randint(16, (shape.num_experts, rows, columns), dtype=torch.uint8, device="cuda")
            grid = shape.num_experts, rows, columns // 32
            powers = torch.randint(119, 122, grid, dtype=torch.uint8, device="cuda").view(torch.float8_e8m0fnu)
            return QuantizedMatrix(packed(codes, 4), 4, powers, None, 1, 32)
        codes = torch.randn(shape.num_experts, rows, columns, device="cuda").mul_(64).to(torch.float8_e4m3fn)
        words, size = packed(codes.view(torch.uint8), 8), 1 / (64 * columns**0.5)
        if self.form == "row":
            factors = torch.rand(shape.num_experts, rows, device="cuda").add_(0.5).mul_(size)
            return QuantizedMatrix(words, 8, factors=factors)
        grid = shape.num_experts, ceil(rows / BLOCK), ceil(columns / BLOCK)
        scales = torch.rand(grid, device="cuda").add_(0.5).mul_(size)
        return QuantizedMatrix(words, 8, scales, None, BLOCK, BLOCK)

    def batch(self, count: int) -> Batch:
        """Return random tokens and their experts."""
        x = torch.randn(count, self.shape.hidden, device="cuda").bfloat16()
        scores = torch.rand(count, self.shape.num_experts, device="cuda")
        ids = scores.topk(self.shape.rule.top_k, dim=-1).indices.to(torch.int32)
        weights = torch.rand(ids.shape, device="cuda")
        order = order_by_expert(ids, self.shape.num_experts)
        return Batch(x, ids, weights, order, self._first(x, ids, order))

    def _takes_pairs(self, count: int) -> bool:
        return count <= FEW_TOKENS and can_multiply_pairs(self.first) and can_multiply_pairs(self.second)

    def _first(self, x: Tensor, ids: Tensor, order: ExpertOrder) -> Tensor:
        if self._takes_pairs(len(x)):
            return quantized_pair_gemm(x, self.first, ids, activation=self.shape.activation)[0]
        return quantized_grouped_gemm(x, self.first, order, top_k=ids.shape[1], activation=self.shape.activation)

    def _second(self, batch: Batch) -> Tensor:
        if self._takes_pairs(len(batch.x)):
            return quantized_summed_gemm(batch.inner, self.second, batch.ids, batch.weights)
        return quantized_grouped_gemm(batch.inner, self.second, batch.order)

    def _layer(self, batch: Batch) -> Tensor:
        return routed_quantized_experts(
            batch.x, batch.ids, batch.weights, self.first, self.second, self.shape.activation
        )

    def _bf16_layer(self, batch: Batch) -> Tensor:
        return routed_experts(batch.x, batch.ids, batch.weights, *self.plain, self.shape.activation)

    def _exact_layer(self, batch: Batch) -> Tensor:
        if can_multiply_quantized(batch.x, batch.ids.numel(), self.first, self.second):
            return self._layer(batch)
        plain = [dequantize(weight) for weight in (self.first, self.second)]
        return routed_experts(batch.x, batch.ids, batch.weights, *plain, self.shape.activation)

    def _quantized_layer(self, batch: Batch) -> Tensor:
        experts = QuantizedExperts(
            self.first, self.second, *(_scheme_of(weight) for weight in (self.first, self.second))
        )
        return routed_prompt_experts(batch.x, batch.ids, batch.weights, experts, self.shape.activation)

    def measure_prompts(self, count: int) -> PromptFigure:
        """Measure the layer with prompt tokens."""
        x = torch.randn(count, self.shape.hidden, device="cuda").bfloat16()
        scores = torch.rand(count, self.shape.num_experts, device="cuda")
        ids = scores.topk(self.shape.rule.top_k, dim=-1).indices.to(torch.int32)
        order = order_by_expert(ids, self.shape.num_experts)
        batch = Batch(x, ids, torch.rand(ids.shape, device="cuda"), order, x)
        num_flops = 2 * ids.numel() * (self.first[0].words.numel() + self.second[0].words.numel())
        floor = num_flops * (16 / self.first.code_bits) / matmul_tflops() / 1e6

        def time(run: Callable[[], object]) -> float:
            return launch_us([run], floor)

        times = [
            time(lambda: self._bf16_layer(batch)),
            time(lambda: self._exact_layer(batch)),
            time(lambda: [dequantize(weight) for weight in (self.first, self.second)]),
        ]
        exact_error = _error(self._exact_layer(batch), self._bf16_layer(batch))
        if self.form == "nvfp4":
            return PromptFigure(self.name, self.form, count, floor, *times, exact_error)
        scheme, activation = _scheme_of(self.first), self.shape.activation
        rows = quantize_activations(x, scheme, order.positions)
        inner = quantize_activations(
            grouped_prompt_gemm(rows, self.first, order, activation, x.dtype), _scheme_of(self.second)
        )
        of_fp8 = [
            time(lambda: self._quantized_layer(batch)),
            time(lambda: quantize_activations(x, scheme, order.positions)),
            time(lambda: grouped_prompt_gemm(rows, self.first, order, activation, x.dtype)),
            time(lambda: grouped_prompt_gemm(inner, self.second, order, "none", x.dtype)),
        ]
        error = _error(self._quantized_layer(batch), self._bf16_layer(batch))
        return PromptFigure(self.name, self.form, count, floor, *times, exact_error, *of_fp8, error)

    def measure(self, count: int) -> Figure:
        """Measure both products, the layer, and the layer with bf16 weights."""
        batches = [self.batch(count)]
        if not can_multiply_quantized(batches[0].x, batches[0].ids.numel(), self.first, self.second):
            raise RuntimeError(f"{self.name}: {count} tokens with {self.form} weights take no kernel for codes")
        hit = float(batches[0].ids.unique().numel())
        of_expert = self.first[0].nbytes + self.second[0].nbytes
        batches += [self.batch(count) for _ in range(min(MOST_BATCHES, ceil(COLD_BYTES / (hit * of_expert))))]
        hit = sum(float(batch.ids.unique().numel()) for batch in batches) / len(batches)
        floors = [copy_us(round(hit * weight[0].nbytes)) for weight in (self.first, self.second)]

        def time(run: Callable[[Batch], object], expected: float) -> float:
            return launch_us([lambda batch=batch: run(batch) for batch in batches], expected)  # type: ignore[misc]

        return Figure(
            self.name,
            self.form,
            count,
            hit,
            floors[0],
            time(lambda batch: self._first(batch.x, batch.ids, batch.order), floors[0]),
            floors[1],
            time(self._second, floors[1]),
            time(self._layer, sum(floors)),
            time(self._bf16_layer, 2 * sum(floors)),
            _error(self._layer(batches[0]), self._bf16_layer(batches[0])),
        )


def _scheme_of(weight: QuantizedMatrix) -> ActivationScheme:
    return ActivationScheme(None if weight.scales is None else weight.block_columns)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().mean() / expected.float().abs().mean())


def prompt_table(figures: Sequence[PromptFigure]) -> str:
    """Return the figures of prompt tokens as Markdown."""
    lines = [
        "| shape | scales | tokens | floor, µs | bf16 layer, µs | exact layer, µs | bf16 / exact | error | "
        "dequantize, µs | FP8 layer, µs | bf16 / FP8 | quantize, µs | first, µs | second, µs | error |",
        "|---|---|" + "---:|" * 13,
    ]
    for one in figures:
        cells = [one.shape, one.form, f"{one.tokens}", f"{one.floor_us:.0f}", f"{one.bf16_us:.0f}"]
        cells += [f"{one.exact_us:.0f}", f"{one.bf16_us / one.exact_us:.2f}", f"{one.exact_error:.4f}"]
        cells += [f"{one.dequantize_us:.0f}"]
        if one.fp8_us is None:
            cells += [""] * 6
        else:
            cells += [f"{one.fp8_us:.0f}", f"{one.bf16_us / one.fp8_us:.2f}", f"{one.quantize_us:.0f}"]
            cells += [f"{one.first_us:.0f}", f"{one.second_us:.0f}", f"{one.error:.4f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "| shape | scales | tokens | experts hit | first, µs | of its floor | second, µs | of its floor | layer, µs | "
        "of both floors | bf16 layer, µs | error |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in figures:
        floor = one.first_floor_us + one.second_floor_us
        cells = [one.shape, one.form, f"{one.tokens}", f"{one.experts_hit:.0f}"]
        cells += [f"{one.first_us:.1f}", f"{one.first_floor_us / one.first_us:.2f}"]
        cells += [f"{one.second_us:.1f}", f"{one.second_floor_us / one.second_us:.2f}"]
        cells += [f"{one.layer_us:.1f}", f"{floor / one.layer_us:.2f}", f"{one.bf16_layer_us:.1f}", f"{one.error:.4f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, then print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=FORMS, default=list(FORMS), help="default: all")
    parser.add_argument("--forms", nargs="+", choices=sorted({*chain(*FORMS.values())}), help="default: all")
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS), metavar="N")
    parser.add_argument("--prompts", nargs="*", type=int, default=[], metavar="N", help="numbers of prompt tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure to FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    figures: list[Figure] = []
    prompts: list[PromptFigure] = []
    for name in arguments.shapes:
        for form in (form for form in FORMS[name] if not arguments.forms or form in arguments.forms):
            bench = Bench(name, form)
            figures += [bench.measure(count) for count in arguments.tokens]
            for count in arguments.prompts:
                prompts.append(bench.measure_prompts(count))
                print(prompts[-1], flush=True)
            del bench
            torch.cuda.empty_cache()
    if figures:
        print(table(figures))
    if prompts:
        print(f"\n{prompt_table(prompts)}")
    if arguments.json:
        document = {"machine": describe_machine(), "figures": [*map(asdict, figures), *map(asdict, prompts)]}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
