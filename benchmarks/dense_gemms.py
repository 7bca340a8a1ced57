"""Measure the time of a model's dense GEMMs by the number of tokens in a step.

    PYTHONPATH=. python3 benchmarks/dense_gemms.py [--shape NAME] [--json FILE]

All GEMMs of the model's layers, except those of routed experts and routers, run one after another in a CUDA graph. Each
GEMM has its own weights, so that they are read from memory as in a step. cuBLAS chooses a kernel by the number of
tokens, so fewer tokens can take more time. `step/captured_shapes.py` chooses the numbers of tokens of captured steps.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from loads.serving_engine import add_shape_arguments, model_of, shape_of
from measuring.graph_timing import interleaved_us
from measuring.machine import describe_machine
from torch import Tensor

from megatron_mamba_cache.command_line.quiet import own_warnings_hidden, quiet_libraries

TOKENS = (64, 128, 192, 255, 256, 257, 287, 288, 319, 320, 383, 384, 415, 416, 447, 448, 511, 512, 543, 544, 575, 576)
MORE_TOKENS = (640, 767, 768, 832, 1023, 1024, 1055, 1056)
NUM_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Products:
    """Time and FLOPs of all dense GEMMs for a number of tokens."""

    num_tokens: int
    us: float
    num_flops: float

    @property
    def tflops(self) -> float:
        """Speed in TFLOP/s."""
        return self.num_flops / self.us / 1e6


class DenseGemms:
    """The dense GEMMs of a step, with preallocated inputs and outputs; weights are [outputs, inputs].

    Attributes:
        inputs, outputs: [tokens, width] tensors by width.
    """

    def __init__(self, weights: Sequence[Tensor], num_tokens: int) -> None:
        self._weights = weights
        like = {"device": weights[0].device, "dtype": weights[0].dtype}
        self.inputs = {width: torch.randn(num_tokens, width, **like) for width in {w.shape[1] for w in weights}}
        self.outputs = {width: torch.empty(num_tokens, width, **like) for width in {w.shape[0] for w in weights}}

    def __call__(self) -> None:
        """Compute all GEMMs."""
        for weight in self._weights:
            torch.mm(self.inputs[weight.shape[1]], weight.t(), out=self.outputs[weight.shape[0]])


def dense_weights(model: Any) -> list[Tensor]:
    """Return the [outputs, inputs] weights of a model's layers, without routed experts and routers."""
    return [
        weight.detach()
        for name, weight in model.decoder.named_parameters()
        if weight.dim() == 2 and ".experts." not in name and ".router." not in name
    ]


def measure(weights: Sequence[Tensor], counts: Sequence[int]) -> list[Products]:
    """Measure the GEMMs for each number of tokens, in turn, so that drift affects all of them."""
    num_weights = sum(weight.numel() for weight in weights)
    variants = [[DenseGemms(weights, count)] for count in counts]
    times = interleaved_us(variants, sum(weight.nbytes for weight in weights) / 3e6, NUM_ROUNDS)
    return [Products(count, us, 2.0 * num_weights * count) for count, us in zip(counts, times, strict=True)]


def table(found: Sequence[Products]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| tokens | ms | TFLOP/s |", "|---:|---:|---:|"]
    return "\n".join([*lines, *(f"| {one.num_tokens:,} | {one.us / 1e3:.2f} | {one.tflops:.0f} |" for one in found)])


def main() -> None:
    """Measure, print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape_arguments(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS + MORE_TOKENS, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    with quiet_libraries(), own_warnings_hidden():
        found = measure(dense_weights(model_of(shape_of(parser, arguments, {}))), arguments.tokens)
    print(table(found))
    if arguments.json:
        figures = {"machine": describe_machine(), "products": [asdict(one) | {"TFLOP/s": one.tflops} for one in found]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
