"""Measure how accurate the outputs of both recurrences are with states in fp32, bf16 and fp16.

    PYTHONPATH=. python3 benchmarks/state_dtypes.py [--small] [--device DEVICE] [--json FILE]

One request of 4,096 random tokens after SiLU, with gates as models are initialized, so that heads remember from about
ten tokens to all of them. "decode" computes one token at a time and stores the state after each, as `--draft-states
window` does. "decode after prefill" scans the text, which rounds the state at block boundaries, and decodes only the
last tokens. The error is the root mean square over the last tokens, relative to that of the outputs with fp64 states.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring.machine import describe_machine
from torch import Tensor
from torch.nn.functional import silu

from megatron_mamba_cache.recurrences.batches import DecodeBatch, PrefillBatch, full_sequences
from megatron_mamba_cache.recurrences.gated_delta.inputs import DeltaTokens, GateWeights
from megatron_mamba_cache.recurrences.gated_delta.reference import delta_scan_ref
from megatron_mamba_cache.recurrences.gated_delta.scan import delta_scan
from megatron_mamba_cache.recurrences.gated_delta.verify import delta_verify
from megatron_mamba_cache.recurrences.mamba2.inputs import SSMTokens, SSMWeights
from megatron_mamba_cache.recurrences.mamba2.reference import ssd_scan_ref
from megatron_mamba_cache.recurrences.mamba2.scan import ssd_scan
from megatron_mamba_cache.recurrences.mamba2.verify import state_verify
from megatron_mamba_cache.recurrences.stochastic_rounding import rounding_seed

NUM_TOKENS, NUM_LAST = 4096, 256
BLOCK, GRAIN = 256, 64
FORMS = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "fp16, to nearest": (torch.float16, None),
    "fp16, stochastic": (torch.float16, rounding_seed(torch.float16)),
}


@dataclass(frozen=True)
class Case:
    """One layer and its text; ops take tokens, weights, a pool, rows and a seed."""

    name: str
    tokens: Any
    weights: Any
    state: tuple[int, int, int]
    scan: Callable[..., Tensor]
    step: Callable[..., Tensor]
    exact: Callable[..., Tensor]

    def part(self, first: int, end: int) -> Any:
        """Return the tokens from `first` to `end` - 1."""
        return type(self.tokens)(*(getattr(self.tokens, field.name)[first:end] for field in fields(self.tokens)))


@dataclass(frozen=True)
class Figure:
    """Errors with states in one dtype, relative to the outputs: those of decode and of a decode after prefill."""

    recurrence: str
    states: str
    decode: float
    prefill: float


def gate_values(num_heads: int, device: str) -> tuple[Tensor, Tensor]:
    """Return A_log and dt_bias as models are initialized: A from 1 to 16, time steps from 0.001 to 0.1."""
    steps = torch.exp(torch.rand(num_heads, device=device) * math.log(100) + math.log(0.001))
    return torch.log(1 + 15 * torch.rand(num_heads, device=device)), steps + torch.log(-torch.expm1(-steps))


def mamba2_case(num_tokens: int, is_small: bool, device: str) -> Case:
    """Return a Mamba2 layer: 64 heads of 64 x 128, or 4 of 16 x 16."""
    heads, head_dim, d_state = (4, 16, 16) if is_small else (64, 64, 128)
    shapes = (num_tokens, heads, head_dim), (num_tokens, 1, d_state), (num_tokens, 1, d_state)
    x, b, c = (silu(torch.randn(shape, device=device)) for shape in shapes)
    A_log, dt_bias = gate_values(heads, device)
    weights = SSMWeights(A_log, torch.zeros(heads, device=device), dt_bias)
    tokens = SSMTokens(x, torch.randn(num_tokens, heads, device=device), b, c)
    scan, exact = partial(_scan_mamba2, ssd_scan), partial(_scan_mamba2, ssd_scan_ref)
    return Case("Mamba2", tokens, weights, (heads, d_state, head_dim), scan, state_verify, exact)


def _scan_mamba2(
    op: Callable[..., Tensor], tokens: Any, weights: Any, pool: Tensor, rows: PrefillBatch, seed: int | None
) -> Tensor:
    return op(tokens, weights, pool, rows, GRAIN, seed=seed)


def delta_case(num_tokens: int, is_small: bool, device: str) -> Case:
    """Return a Gated DeltaNet layer: 32 value heads of 128 x 128, or 4 of 16 x 16."""
    heads, dim = (4, 16) if is_small else (32, 128)
    counts = (heads // 2, heads // 2, heads)
    q, k, v = (silu(torch.randn(num_tokens, count, dim, device=device)) for count in counts)
    b, a = (torch.randn(num_tokens, heads, device=device) for _ in range(2))
    tokens, weights = DeltaTokens(q, k, v, b, a), GateWeights(*gate_values(heads, device))

    def scan(tokens: Any, weights: Any, pool: Tensor, rows: PrefillBatch, seed: int | None) -> Tensor:
        return delta_scan(tokens, weights, pool, rows, GRAIN, seed=seed)

    def exact(tokens: Any, weights: Any, pool: Tensor, rows: PrefillBatch, seed: int | None) -> Tensor:
        return delta_scan_ref(tokens, weights, pool, rows, seed=seed)

    return Case("Gated DeltaNet", tokens, weights, (heads, dim, dim), scan, delta_verify, exact)


def decoded(case: Case, pool: Tensor, seed: int | None, first: int, end: int) -> Tensor:
    """Return the outputs of tokens that are decoded one at a time."""
    outputs, device = [], pool.device
    cu_tokens, column, accepted = (
        torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, 1], [[0]], [1])
    )
    positions = torch.arange(first, end, dtype=torch.int32, device=device)[:, None]
    for token, position in enumerate(positions, first):
        rows = DecodeBatch(cu_tokens, column, accepted, 1, position)
        outputs.append(case.step(case.part(token, token + 1), case.weights, pool, rows, seed=seed))
    return torch.cat(outputs)


def prompt_rows(num_tokens: int, device: str) -> PrefillBatch:
    """Return a prompt whose final state is stored in slot 0."""
    rows = full_sequences(1, num_tokens, GRAIN, torch.device(device))
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    return replace(rows, final_slots=nothing, computed=nothing, block_size=BLOCK)


def measure(case: Case, num_last: int, device: str) -> Iterator[Figure]:
    """Yield the errors for each dtype of the states, over the outputs of the last tokens."""
    tensors = [getattr(case.tokens, field.name) for field in fields(case.tokens)]
    num_tokens, doubled = tensors[0].shape[0], type(case.tokens)(*(tensor.double() for tensor in tensors))
    pool = torch.zeros(1, *case.state, dtype=torch.float64, device=device)
    expected = case.exact(doubled, case.weights, pool, prompt_rows(num_tokens, device), None)[-num_last:]

    def error(outputs: Tensor) -> float:
        return float((outputs.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())

    for name, (dtype, seed) in FORMS.items():
        pool = torch.zeros(1, *case.state, dtype=dtype, device=device)
        one_by_one = decoded(case, pool, seed, 0, num_tokens)[-num_last:]
        pool.zero_()
        first = num_tokens - num_last
        case.scan(case.part(0, first), case.weights, pool, prompt_rows(first, device), seed)
        after_prefill = decoded(case, pool, seed, first, num_tokens)
        yield Figure(case.name, name, error(one_by_one), error(after_prefill))


def main() -> None:
    """Measure, then print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description="Measure the accuracy of states in 16 bits.")
    parser.add_argument("--small", action="store_true", help="small layers, for a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print("| recurrence | states | decode | decode after prefill |\n|---|---|---:|---:|")
    figures = []
    with torch.no_grad():
        for make in (mamba2_case, delta_case):
            for figure in measure(make(NUM_TOKENS, arguments.small, arguments.device), NUM_LAST, arguments.device):
                line = f"| {figure.recurrence} | {figure.states} | {figure.decode:.1e} | {figure.prefill:.1e} |"
                print(line, flush=True)
                figures.append(asdict(figure))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": describe_machine(), "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
