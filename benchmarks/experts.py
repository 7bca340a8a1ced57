"""Compare an MoE layer, from the router to the weighted sum, with the limits of the GPU.

    PYTHONPATH=. python3 benchmarks/experts.py [--shapes NAME ...] [--tokens N ...] [--json FILE]

Each time is the median of one layer inside a CUDA graph of many layers, whose tokens differ so that their experts are
not in the L2 cache. Weights and inputs are random in bf16; all experts are equally likely. The floor is the time to
read the weights of the used experts at the speed of a plain copy, or the time of their FLOPs at the speed of a large
GEMM, whichever is longer. Both speeds are measured in the same run.

The router's weights, the tokens and everything between the two GEMMs are not part of the floor. Latent projections are
not measured. Shared experts are measured for Qwen's shapes only; their weights are part of the floor. Shapes named
"ungated" omit the gate of the shared expert, for comparison.

The peer is a layer with `torch.nn.functional.grouped_mm`, in which torch sorts and sums; it also runs in a CUDA graph.
The columns after the peer are the parts of our layer, each timed alone. For up to `FEW_TOKENS` tokens, the second GEMM
also computes the sum, and tokens are not sorted.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring.ceilings import copy_us, matmul_tflops
from measuring.graph_timing import launch_us
from measuring.machine import describe_machine
from torch import Tensor

from megatron_mamba_cache.kernels.activations import gated_silu, squared_relu
from megatron_mamba_cache.kernels.experts.expert_order import order_by_expert
from megatron_mamba_cache.kernels.experts.grouped_gemm import Activation, grouped_gemm
from megatron_mamba_cache.kernels.experts.overlapped_expert import OverlappedExpert, shared_gemm, takes_shared_gemm
from megatron_mamba_cache.kernels.experts.pair_gemms import FEW_TOKENS, pair_gemm
from megatron_mamba_cache.kernels.experts.routed_experts import SharedExpert, routed_experts, takes_shared_expert
from megatron_mamba_cache.kernels.experts.router_logits import router_logits
from megatron_mamba_cache.kernels.experts.routing import RoutingRule, SharedGate, route
from megatron_mamba_cache.kernels.experts.summed_gemms import summed_gemm
from megatron_mamba_cache.kernels.experts.weighted_sum import weighted_sum

TOKENS = (1, 4, 8, 16, 64, 256, 1024, 4096, 8192, 32768)
COLD_BYTES = 2**28  # bytes of experts that are read before an expert is read again: several times the L2 cache
MOST_TOKENS = 32  # maximum number of different inputs in a graph
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Dimensions of an MoE layer: `hidden` is the width of its input and output, and `inner` that between the GEMMs.

    Args:
        shared_inner: Width between the GEMMs of the shared expert; 0 without a shared expert.
        has_gate: True if the shared expert has a gate.
    """

    num_experts: int
    hidden: int
    inner: int
    activation: Activation
    rule: RoutingRule
    shared_inner: int = 0
    has_gate: bool = False

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights in bf16."""
        return self.expert_bytes_of(self.inner)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the shared expert's weights in bf16."""
        return self.expert_bytes_of(self.shared_inner)

    def expert_bytes_of(self, inner: int) -> int:
        """Return the bytes of an expert's weights in bf16, for a given inner width."""
        return 2 * (3 if self.activation == "gated_silu" else 2) * self.hidden * inner


SHAPES = {
    "nano": LayerShape(128, 2688, 1856, "squared_relu", RoutingRule(6, "sigmoid", scale=2.5)),
    "super": LayerShape(512, 1024, 2688, "squared_relu", RoutingRule(22, "sigmoid", scale=5.0)),
    "granite-small": LayerShape(72, 4096, 768, "gated_silu", RoutingRule(10)),
    "granite-tiny": LayerShape(64, 1536, 512, "gated_silu", RoutingRule(6)),
    "qwen36-35b": LayerShape(256, 2048, 512, "gated_silu", RoutingRule(8), shared_inner=512, has_gate=True),
    "qwen36-35b-ungated": LayerShape(256, 2048, 512, "gated_silu", RoutingRule(8), shared_inner=512),
    "qwen3-next": LayerShape(512, 2048, 512, "gated_silu", RoutingRule(10), shared_inner=512, has_gate=True),
    "qwen3-next-ungated": LayerShape(512, 2048, 512, "gated_silu", RoutingRule(10), shared_inner=512),
}
"""Nemotron 3 Nano and Super, Granite 4 H Small and Tiny (their routed experts); Qwen3.6-35B-A3B, Qwen3-Next."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Times of a layer in microseconds, for a number of tokens."""

    shape: str
    tokens: int
    experts_hit: float
    bytes_us: float
    flops_us: float
    layer_us: float
    grouped_mm_us: float
    parts_us: dict[str, float]

    @property
    def floor_us(self) -> float:
        """The longer of the two floors."""
        return max(self.bytes_us, self.flops_us)

    @property
    def of_floor(self) -> float:
        """Floor divided by the measured time."""
        return self.floor_us / self.layer_us


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tokens of a launch, its shared expert, and the intermediate results.

    `of_pairs` is `inner` in the order of the tokens.
    """

    x: Tensor
    shared: SharedExpert | None
    logits: Tensor
    ids: Tensor
    weights: Tensor
    inner: Tensor
    rows: Tensor
    of_pairs: Tensor


class Bench:
    """An MoE layer with random weights."""

    def __init__(self, name: str, shape: LayerShape, device: str = "cuda") -> None:
        torch.manual_seed(0)
        self.device = device
        self.name = name
        self.shape = shape
        width = shape.inner * (2 if shape.activation == "gated_silu" else 1)
        self.gate = self._random(shape.num_experts, shape.hidden)
        self.first = self._random(shape.num_experts, width, shape.hidden)
        self.second = self._random(shape.num_experts, shape.hidden, shape.inner)
        self.shared_gate = self._random(1, shape.hidden) if shape.has_gate else None

    def _shared_expert(self) -> SharedExpert | None:
        """Return a shared expert with its own weights, so that a graph does not read weights from the L2 cache."""
        shape = self.shape
        width = shape.shared_inner * (2 if shape.activation == "gated_silu" else 1)
        if not width:
            return None
        return SharedExpert(self._random(width, shape.hidden), self._random(shape.hidden, shape.shared_inner))

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, device=self.device, dtype=torch.bfloat16).mul_(sizes[-1] ** -0.5)

    def measure(self, num_tokens: int) -> Figure:
        """Measure the layer, its peer and its parts."""
        batches = [self.inputs(num_tokens)]
        hit = float(batches[0].ids.unique().numel())
        num_batches = min(MOST_TOKENS, 1 + int(COLD_BYTES / (hit * self.shape.expert_bytes)))
        batches += [self.inputs(num_tokens) for _ in range(num_batches - 1)]
        hit = sum(float(batch.ids.unique().numel()) for batch in batches) / len(batches)
        of_token = self.shape.expert_bytes * self.shape.rule.top_k + self.shape.shared_bytes
        num_flops = of_token * num_tokens  # two FLOPs per weight, which has two bytes
        bytes_us = copy_us(round(hit * self.shape.expert_bytes + self.shape.shared_bytes))
        flops_us = num_flops / matmul_tflops() / 1e6
        expected_us = max(bytes_us, flops_us, 5.0)

        def time(run: Callable[[Inputs], object]) -> float:
            return launch_us([lambda batch=batch: run(batch) for batch in batches], expected_us)

        self.check(batches[0])
        orders = {id(batch): order_by_expert(batch.ids, self.shape.num_experts) for batch in batches}
        top_k, activation = self.shape.rule.top_k, self.shape.activation
        parts = {
            "logits": lambda batch: router_logits(batch.x, self.gate),
            "route": lambda batch: route(batch.logits, None, self.shape.rule, None, self._gate_of(batch.x)),
            "order": lambda batch: order_by_expert(batch.ids, self.shape.num_experts),
            "first": lambda batch: grouped_gemm(
                batch.x, self.first, orders[id(batch)], top_k=top_k, activation=activation
            ),
            "second": lambda batch: grouped_gemm(batch.inner, self.second, orders[id(batch)]),
            "sum": lambda batch: weighted_sum(
                batch.rows, orders[id(batch)].positions, batch.weights, self._addend(batch)
            ),
        }
        if num_tokens <= FEW_TOKENS:
            parts["first"] = lambda batch: pair_gemm(batch.x, self.first, batch.ids, activation=activation)
            parts["second"] = lambda batch: summed_gemm(batch.of_pairs, self.second, batch.ids, batch.weights)
            del parts["order"], parts["sum"]
        layer_us = time(self._layer)
        return Figure(
            self.name,
            num_tokens,
            hit,
            bytes_us,
            flops_us,
            layer_us,
            time(self._peer),
            {name: time(run) for name, run in parts.items()},
        )

    def inputs(self, num_tokens: int) -> Inputs:
        """Sample tokens and a shared expert, and compute the intermediate results."""
        x = torch.randn(num_tokens, self.shape.hidden, device=self.device).bfloat16()
        logits = router_logits(x, self.gate)
        ids, weights = route(logits, None, self.shape.rule, None, self._gate_of(x))
        order = order_by_expert(ids, self.shape.num_experts)
        inner = grouped_gemm(x, self.first, order, top_k=self.shape.rule.top_k, activation=self.shape.activation)
        rows = grouped_gemm(inner, self.second, order)
        of_pairs = inner[order.positions.flatten().long()]
        return Inputs(x, self._shared_expert(), logits, ids, weights, inner, rows, of_pairs)

    def _layer(self, batch: Inputs) -> Tensor:
        """Compute the layer as the engine does."""
        x, shared, experts = batch.x, batch.shared, (self.first, self.second, self.shape.activation)
        takes_along = shared is not None and takes_shared_expert(x)
        overlapped = None
        if shared is not None and not takes_along:
            overlapped = OverlappedExpert(lambda: self._begin_shared(shared, x), x.device)
        ids, weights = route(router_logits(x, self.gate), None, self.shape.rule, None, self._gate_of(x))
        if overlapped is None:
            return routed_experts(x, ids, weights, *experts, shared=shared)
        return routed_experts(x, ids, weights, *experts, addend=overlapped.output, overlapped=overlapped)

    def _begin_shared(self, shared: SharedExpert, x: Tensor) -> Callable[[], Tensor]:
        activation = self.shape.activation
        if takes_shared_gemm(x, shared.first, activation):
            inner = shared_gemm(x, shared.first, activation)
            return lambda: F.linear(inner, shared.second)
        return lambda: F.linear(self._activated(F.linear(x, shared.first)), shared.second)

    def _activated(self, products: Tensor) -> Tensor:
        return gated_silu(products) if self.shape.activation == "gated_silu" else squared_relu(products)

    def _gate_of(self, x: Tensor) -> SharedGate | None:
        return None if self.shared_gate is None else SharedGate(x, self.shared_gate)

    def _addend(self, batch: Inputs) -> Tensor | None:
        return None if batch.shared is None else batch.x  # has the shape of the shared expert's output

    def _peer(self, batch: Inputs) -> Tensor:
        """Compute the layer with torch."""
        x, rule, of_shared = batch.x, self.shape.rule, batch.shared
        product = getattr(F, "grouped_mm", None) or torch._grouped_mm  # torch 2.11 has it under this name
        logits = torch.mm(x, self.gate.T, out_dtype=torch.float32)
        scores = logits.sigmoid() if rule.score == "sigmoid" else logits.softmax(-1)
        weights, ids = scores.topk(rule.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True) * rule.scale
        experts, order = ids.flatten().sort(stable=True)
        tokens = order // rule.top_k
        wanted = torch.arange(self.shape.num_experts, device=x.device)
        ends = torch.searchsorted(experts, wanted, right=True).to(torch.int32)
        inner = product(x[tokens], self.first.transpose(1, 2), offs=ends)
        if self.shape.activation == "gated_silu":
            gates, others = inner.chunk(2, dim=-1)
            inner = F.silu(gates) * others
        else:
            inner = inner.relu().square()
        rows = product(inner, self.second.transpose(1, 2), offs=ends) * weights.flatten()[order, None]
        out = torch.zeros(x.shape, device=x.device).index_add_(0, tokens, rows.float()).bfloat16()
        if of_shared is None:
            return out
        shared = F.linear(self._activated(F.linear(x, of_shared.first)), of_shared.second)
        return out + (shared if self.shared_gate is None else shared * F.linear(x, self.shared_gate).sigmoid())

    def check(self, batch: Inputs) -> None:
        """Raise `RuntimeError` if layer and peer differ by more than rounding to bf16 explains."""
        found, expected = self._layer(batch).float(), self._peer(batch).float()
        error = (found - expected).abs().mean() / expected.abs().mean()
        if not error < TOLERANCE:
            raise RuntimeError(f"{self.name}: layer and peer differ by {error:.4f} of the mean output")


def table(figures: Sequence[Figure]) -> str:
    """Return the results as a Markdown table."""
    parts = ["logits", "route", "order", "first", "second", "sum"]
    heads = [
        "shape",
        "tokens",
        "experts hit",
        "bytes, µs",
        "FLOPs, µs",
        "layer, µs",
        "of the floor",
        "grouped_mm, of it",
    ]
    lines = [f"| {' | '.join([*heads, *parts])} |", "|---|" + "---:|" * (len(heads) + len(parts) - 1)]
    for figure in figures:
        peer = f"{figure.floor_us / figure.grouped_mm_us:.2f}"
        cells = [figure.shape, f"{figure.tokens:,}", f"{figure.experts_hit:.0f}"]
        cells += [f"{us:,.1f}" for us in (figure.bytes_us, figure.flops_us, figure.layer_us)]
        cells += [f"{figure.of_floor:.2f}", peer, *(_cell(figure.parts_us.get(part)) for part in parts)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(us: float | None) -> str:
    return "-" if us is None else f"{us:,.1f}"


def main() -> None:
    """Measure, then print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="default: all")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    figures: list[Figure] = []
    for name in arguments.shapes:
        bench = Bench(name, SHAPES[name])
        figures += [bench.measure(num_tokens) for num_tokens in arguments.tokens]
        del bench
        torch.cuda.empty_cache()
    print(table(figures))
    if arguments.json:
        document = {"machine": describe_machine(), "matmul, TFLOP/s": matmul_tflops()}
        document["figures"] = [asdict(figure) | {"of the floor": figure.of_floor} for figure in figures]
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
