"""Compare attention backends, the KV append and a layer's norms with the limits of the GPU.

    PYTHONPATH=. python3 benchmarks/attention.py [--shape NAME] [--fp8-kv] [--json FILE]

Each time is the median of one launch inside a CUDA graph of many launches, in bf16. It is compared with a plain copy
that reads and writes the same number of bytes in total. Copies are measured up to 384 MiB read; the times of larger
copies are extrapolated. FLOPs are those of the scores inside the causal mask and of the weighted sums of values. The
host time to plan a step is measured separately, once for all layers.

Qwen models normalize and rotate their heads and gate the output. For these models, the kernel that prepares the heads
is compared with the plain KV append, and this kernel and the gate are compared with their references.

`--fp8-kv` measures only decode attention over an FP8 KV cache, by this package and by FlashInfer, and over a bf16 cache
by FlashInfer, which the table's last column compares them with.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch
from measuring.ceilings import copy_us
from measuring.graph_timing import MEMCPY_NOTE, launch_us
from measuring.machine import describe_machine
from torch import Tensor

from megatron_mamba_cache.kernels.attention.attention_inputs import write_attention_inputs, write_attention_inputs_ref
from megatron_mamba_cache.kernels.attention.choice import BACKENDS
from megatron_mamba_cache.kernels.attention.flashinfer import FlashInferAttention
from megatron_mamba_cache.kernels.attention.head_changes import HeadChanges, HeadNorms, Rotation
from megatron_mamba_cache.kernels.attention.interface import AttentionBackend, AttentionRows, AttentionShape
from megatron_mamba_cache.kernels.attention.kv_append import append_kv, append_kv_ref
from megatron_mamba_cache.kernels.attention.kv_values import FP8
from megatron_mamba_cache.kernels.attention.output_gate import gate_output, gate_output_ref
from megatron_mamba_cache.kernels.norm.gated_norm import gated_group_norm, gated_group_norm_ref

BLOCK_SIZE = 256
DECODES = {
    "decode, 64 rows of 32k": (1, (32768,) * 64),
    "decode, 64 rows of 1k to 64k": (1, tuple(range(1000, 65000, 1000))),
    "decode, 4 rows of 32k": (1, (32768,) * 4),
    "decode, 64 rows of 1k": (1, (1024,) * 64),
    "verify of 4, 64 rows of 32k": (4, (32768,) * 64),
}
"""Query tokens of each request and the lengths of the requests' contexts, by case of `--fp8-kv`."""
TOKENS = (64, 320, 4096)
HEADS = {"8b": (32, 8, 128), "qwen36-27b": (24, 4, 256), "qwen36-35b": (16, 2, 256), "nano3": (32, 2, 128)}
"""Heads of queries and of keys, and channels of a head; Qwen3-Next's are those of the 35B model."""


@dataclass(frozen=True, slots=True)
class Case:
    """A step with equal requests."""

    name: str
    num_rows: int
    query_len: int
    kv_len: int


CASES = (
    Case("decode, 64 rows of 4k", 64, 1, 4096),
    Case("verify of 5, 64 rows of 4k", 64, 5, 4096),
    Case("decode, 4 rows of 32k", 4, 1, 32768),
    Case("prefill of 4k", 1, 4096, 4096),
    Case("prefill of 1k after 7k", 1, 1024, 8192),
)
LATER_TURNS = tuple(
    Case(f"prefill of {query_len} after {history // 1024}k", 1, query_len, history + query_len)
    for history in (8192, 65536)
    for query_len in (256, 384, 512)
)
"""Short prompts after long histories, as graphs attend them."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured launch, with times in microseconds."""

    case: str
    way: str
    us: float
    num_bytes: float
    num_flops: float = 0.0
    plan_us: float = 0.0
    memcpy_us: float = 0.0

    @property
    def of_memcpy(self) -> float:
        """Speed relative to a plain copy of the same number of bytes."""
        return self.memcpy_us / self.us

    @property
    def gb_per_s(self) -> float:
        """Bandwidth in GB/s."""
        return self.num_bytes / self.us / 1e3

    @property
    def tflops(self) -> float:
        """Speed in TFLOP/s."""
        return self.num_flops / self.us / 1e6


def attention_bytes(case: Case, shape: AttentionShape) -> float:
    """Return the bytes of attention: keys and values read once, queries read, and outputs written."""
    cached = 2 * case.num_rows * case.kv_len * shape.num_kv_heads
    return (cached + 2 * case.num_rows * case.query_len * shape.num_heads) * shape.head_dim * shape.dtype.itemsize


def attention_flops(case: Case, shape: AttentionShape) -> float:
    """Return the FLOPs of the scores inside the causal mask and of the weighted sums of values."""
    scores = case.query_len * case.kv_len - case.query_len * (case.query_len - 1) / 2
    return 4 * case.num_rows * scores * shape.num_heads * shape.head_dim


def rows_of(case: Case, device: str) -> AttentionRows:
    """Return the requests of a case; their KV blocks are in random order."""
    num_blocks = -(-case.kv_len // BLOCK_SIZE)
    table = torch.randperm(case.num_rows * num_blocks).to(torch.int32).view(case.num_rows, num_blocks)
    lengths = [case.query_len] * case.num_rows
    return AttentionRows(
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
        torch.full((case.num_rows,), case.kv_len, dtype=torch.int32, device=device),
        table.to(device),
        tuple(lengths),
        (case.kv_len,) * case.num_rows,
        table.numpy(),
        last_block_lens=torch.full((case.num_rows,), (case.kv_len - 1) % BLOCK_SIZE + 1, dtype=torch.int32).to(device),
    )


def shape_of(name: str, device: torch.device) -> AttentionShape:
    """Return the attention shape of an entry of `HEADS`, in bf16."""
    num_heads, num_kv_heads, head_dim = HEADS[name]
    return AttentionShape(num_heads, num_kv_heads, head_dim, BLOCK_SIZE, head_dim**-0.5, torch.bfloat16, device)


def backends(shape: AttentionShape) -> dict[str, AttentionBackend]:
    """Return all backends that support the shape, by name; FlashInfer's two kernels are separate entries."""
    built: dict[str, AttentionBackend] = {}
    for backend in BACKENDS:
        reason = backend.refusal(shape)
        if reason is not None:
            print(f"{backend.name} is left out: {reason}")
        elif backend is FlashInferAttention:
            built |= {f"flashinfer {kernel}": FlashInferAttention(shape, kernel) for kernel in ("fa2", "fa3")}
        else:
            built[backend.name] = backend(shape)
    return built


def measure_attention(
    case: Case, shape: AttentionShape, named: dict[str, AttentionBackend], *, is_captured: bool = False
) -> list[Figure]:
    """Measure every backend in one case, outside a CUDA graph or, if `is_captured`, inside one."""
    rows = rows_of(case, "cuda")
    heads = shape.num_kv_heads, shape.head_dim
    cache = torch.randn(2, rows.block_table.numel(), BLOCK_SIZE, *heads, device="cuda").bfloat16()
    q = torch.randn(case.num_rows * case.query_len, shape.num_heads, shape.head_dim, device="cuda").bfloat16()
    num_bytes, num_flops = attention_bytes(case, shape), attention_flops(case, shape)
    expected_us = max(num_bytes / 3e6, num_flops / 4e8)
    figures = []
    for name, backend in named.items():
        if is_captured:
            captured = backend.capture(rows)
            plan_us, attend = host_us(partial(captured.plan_again, rows)), captured.begin()
        else:
            plan_us, attend = host_us(partial(backend.plan, rows)), backend.plan(rows)
        slowdown = 20 if name == "reference" else 1
        us = launch_us([partial(attend, q, cache[0], cache[1])], slowdown * expected_us)
        figures.append(Figure(case.name, name, us, num_bytes, num_flops, plan_us, copy_us(int(num_bytes))))
    return figures


def measure_fp8_kv(shape: AttentionShape) -> list[Figure]:
    """Measure decode attention in a CUDA graph over FP8 keys and values, and over bf16 ones by FlashInfer."""
    of_codes = replace(shape, has_fp8_kv=True)
    ways = {
        "flashinfer fa2, bf16": FlashInferAttention(shape, "fa2"),
        "flashinfer fa2, FP8": FlashInferAttention(of_codes, "fa2"),
        "this package, FP8": FlashInferAttention(of_codes),
    }
    figures = []
    for name, (query_len, kv_lens) in DECODES.items():
        rows = decode_rows(query_len, kv_lens)
        sizes = 2, sum(-(-kv_len // BLOCK_SIZE) for kv_len in kv_lens), BLOCK_SIZE, shape.num_kv_heads, shape.head_dim
        values = torch.randn(sizes, device="cuda", dtype=torch.bfloat16)
        caches = {torch.bfloat16: values, FP8: values.to(FP8)}
        q = torch.randn(len(kv_lens) * query_len, shape.num_heads, shape.head_dim, device="cuda").bfloat16()
        for way, backend in ways.items():
            cache = caches[FP8 if way.endswith("FP8") else torch.bfloat16]
            captured = backend.capture(rows)
            plan_us, attend = host_us(partial(captured.plan_again, rows)), captured.begin()
            num_bytes = 2 * sum(kv_lens) * cache[0, 0, 0].nbytes + 2 * q.nbytes
            us = launch_us([partial(attend, q, cache[0], cache[1])], num_bytes / 3e6)
            figures.append(Figure(name, way, us, num_bytes, plan_us=plan_us, memcpy_us=copy_us(num_bytes)))
        del values, caches, cache
        torch.cuda.empty_cache()
    return figures


def decode_rows(query_len: int, kv_lens: Sequence[int]) -> AttentionRows:
    """Return requests that decode or verify; their KV blocks are in random order."""
    num_blocks = [-(-kv_len // BLOCK_SIZE) for kv_len in kv_lens]
    table = torch.zeros(len(kv_lens), max(num_blocks), dtype=torch.int32)
    for row, blocks in enumerate(torch.randperm(sum(num_blocks)).to(torch.int32).split(num_blocks)):
        table[row, : len(blocks)] = blocks
    lengths = torch.tensor(kv_lens, dtype=torch.int32, device="cuda")
    return AttentionRows(
        torch.arange(len(kv_lens) + 1, dtype=torch.int32, device="cuda") * query_len,
        lengths,
        table.cuda(),
        (query_len,) * len(kv_lens),
        tuple(kv_lens),
        table.numpy(),
        num_decode_requests=len(kv_lens),
        last_block_lens=(lengths - 1) % BLOCK_SIZE + 1,
    )


def fp8_table(figures: list[Figure]) -> str:
    """Return the results of `measure_fp8_kv` as a Markdown table; the floor is a copy of as many bytes."""
    lines = ["| case | way | µs | of the floor | of bf16 | plan, µs |", "|---|---|---:|---:|---:|---:|"]
    base = {figure.case: figure.us for figure in figures if figure.way.endswith("bf16")}
    for figure in figures:
        ratio = f"{figure.of_memcpy:.3f} | {figure.us / base[figure.case]:.3f}"
        lines.append(f"| {figure.case} | {figure.way} | {figure.us:,.1f} | {ratio} | {figure.plan_us:,.0f} |")
    return "\n".join(lines)


def host_us(call: Callable[[], object]) -> float:
    """Return the median host time of a call in microseconds."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return median(times) * 1e6


def measure_token_kernels(tokens: Sequence[int] = TOKENS) -> list[Figure]:
    """Measure the KV append, the norms and their references; inputs rotate, so that none are in the L2 cache."""
    figures = []
    for num_tokens in tokens:
        figures += _measure_gated_norm("8B", num_tokens, channels=8192, group_size=1024)
        figures += _measure_gated_norm("Nano", num_tokens, channels=4096, group_size=512)
        figures += _measure_layer_norm("8B", num_tokens, channels=4096)
        figures += _measure_layer_norm("Nano", num_tokens, channels=2688)
        figures += _measure_append(num_tokens)
    return figures


def _measure_gated_norm(name: str, num_tokens: int, channels: int, group_size: int) -> list[Figure]:
    num_copies = max(2, 2**27 // (num_tokens * channels * 6))
    projected = [torch.randn(num_tokens, 2 * channels, device="cuda").bfloat16() for _ in range(num_copies)]
    weight = torch.ones(channels, dtype=torch.bfloat16, device="cuda")
    num_bytes = 3 * num_tokens * channels * 2
    figures = []
    for norm in (gated_group_norm, gated_group_norm_ref):
        launches = [
            partial(norm, rows[:, :channels], rows[:, channels:], weight, group_size, 1e-5) for rows in projected
        ]
        us = launch_us(launches, max(2.0, num_bytes / 3e6))
        case = f"gated norm, {name}, {num_tokens} tokens"
        figures.append(Figure(case, norm.__name__, us, num_bytes, memcpy_us=copy_us(num_bytes)))
    return figures


def _measure_layer_norm(name: str, num_tokens: int, channels: int) -> list[Figure]:
    num_bytes = 2 * num_tokens * channels * 2
    inputs = [torch.randn(num_tokens, channels, device="cuda").bfloat16() for _ in range(max(2, 2**27 // num_bytes))]
    weight = torch.ones(channels, dtype=torch.bfloat16, device="cuda")
    figures = []
    for way, norm in {
        "gated_group_norm": lambda rows: gated_group_norm(rows, None, weight, channels, 1e-5),
        "torch's rms_norm": lambda rows: torch.nn.functional.rms_norm(rows, (channels,), weight, 1e-5),
    }.items():
        us = launch_us([partial(norm, rows) for rows in inputs], max(2.0, num_bytes / 3e6))
        case = f"layer norm, {name}, {num_tokens} tokens"
        figures.append(Figure(case, way, us, num_bytes, memcpy_us=copy_us(num_bytes)))
    return figures


def _measure_append(num_tokens: int) -> list[Figure]:
    joint = [torch.randn(num_tokens, 8, 6 * 128, device="cuda").bfloat16() for _ in range(8)]
    cache = torch.zeros(2, 1024, BLOCK_SIZE, 8, 128, dtype=torch.bfloat16, device="cuda")
    chosen = [torch.randperm(1024 * BLOCK_SIZE, device="cuda")[:num_tokens].to(torch.int32) for _ in joint]
    targets = [(slot // BLOCK_SIZE, slot % BLOCK_SIZE) for slot in chosen]

    num_bytes = 4 * num_tokens * 8 * 128 * 2
    figures = []
    for append in (append_kv, append_kv_ref):
        launches = [
            partial(append, new[:, :, 512:640], new[:, :, 640:], cache[0], cache[1], *slot)
            for new, slot in zip(joint, targets, strict=True)
        ]
        us = launch_us(launches, max(2.0, num_bytes / 3e6))
        figures.append(
            Figure(f"KV append, {num_tokens} tokens", append.__name__, us, num_bytes, memcpy_us=copy_us(num_bytes))
        )
    return figures


def measure_gated_heads(shape: AttentionShape, tokens: Sequence[int] = (1, *TOKENS)) -> list[Figure]:
    """Measure the kernels before and after attention with normalized, rotated and gated heads."""
    figures = []
    for num_tokens in tokens:
        inputs = GatedHeads(shape, num_tokens)
        heads = 2 * (shape.num_heads + 2 * shape.num_kv_heads)  # read and written
        figures += inputs.measure("inputs of attention", heads, inputs.ways_of_inputs())
        figures += inputs.measure("output gate", 3 * shape.num_heads, inputs.ways_of_gates())
    return figures


class GatedHeads:
    """Joint projections [q | gate | k | v] by KV head, with their norms and rotary table."""

    def __init__(self, shape: AttentionShape, num_tokens: int) -> None:
        device, dim = shape.device, shape.head_dim
        self.shape, self.num_tokens = shape, num_tokens
        self.queries = shape.num_heads // shape.num_kv_heads
        width = (2 * self.queries + 2) * dim
        num_copies = max(2, min(64, 2**27 // (num_tokens * shape.num_kv_heads * width * 2)))
        sizes = num_copies, num_tokens, shape.num_kv_heads, width
        self.joint = torch.randn(sizes, device=device, dtype=torch.bfloat16).unbind()
        blocks = max(2, num_tokens // BLOCK_SIZE + 1)
        caches = 2, blocks, BLOCK_SIZE, shape.num_kv_heads, dim
        chosen = torch.randperm(blocks * BLOCK_SIZE, device=device)[:num_tokens].to(torch.int32)
        self.caches = torch.zeros(caches, dtype=torch.bfloat16, device=device).unbind()
        self.targets = chosen // BLOCK_SIZE, chosen % BLOCK_SIZE
        weights = torch.zeros(2, dim, dtype=torch.bfloat16, device=device)
        table = torch.randn(4096, 2, dim // 8, device=device).bfloat16()  # a quarter of the channels are rotated
        positions = torch.randint(4096, (num_tokens,), device=device)
        self.changes = HeadChanges(HeadNorms(weights[0], weights[1], 1e-6, 1.0), Rotation(table, positions))

    def ways_of_inputs(self) -> dict[str, list[Callable[[], object]]]:
        """Return the launches that write the inputs of attention, by name of the op."""
        rows = [(*self._heads(joint, 0), *self.caches, *self.targets) for joint in self.joint]
        plain = [partial(append_kv, *targets[1:], targets[0]) for targets in rows]
        changed = {
            op.__name__: [partial(op, *targets, self.changes) for targets in rows]
            for op in (write_attention_inputs, write_attention_inputs_ref)
        }
        return {"append_kv": plain, **changed}

    def ways_of_gates(self) -> dict[str, list[Callable[[], object]]]:
        """Return the launches that gate the output of attention, by name of the op."""
        attended = [torch.empty_like(self._heads(joint, 0)[0].flatten(1, 2)) for joint in self.joint]
        gates = [self._heads(joint, 1)[0] for joint in self.joint]
        return {
            op.__name__: [partial(op, *given) for given in zip(attended, gates, strict=True)]
            for op in (gate_output, gate_output_ref)
        }

    def measure(self, what: str, heads: int, ways: dict[str, list[Callable[[], object]]]) -> list[Figure]:
        """Time launches that move `heads` heads of each token."""
        num_bytes = heads * self.num_tokens * self.shape.head_dim * 2
        return [
            Figure(
                f"{what}, {self.num_tokens} tokens",
                way,
                launch_us(launches, max(2.0, num_bytes / 3e6)),
                num_bytes,
                memcpy_us=copy_us(num_bytes),
            )
            for way, launches in ways.items()
        ]

    def _heads(self, joint: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Split a joint projection: return the queries (`number` 0) or the gates, and the keys and values."""
        dim = self.shape.head_dim
        parts = joint.split((self.queries * dim, self.queries * dim, dim, dim), dim=-1)
        return parts[number].unflatten(-1, (self.queries, dim)), parts[2], parts[3]


def table(figures: list[Figure]) -> str:
    """Return the results as a Markdown table."""
    lines = ["| case | way | µs | GB/s | of memcpy | TFLOP/s | plan, µs |", "|---|---|---:|---:|---:|---:|---:|"]
    for figure in figures:
        arithmetic = f"{figure.tflops:,.0f} | {figure.plan_us:,.0f}" if figure.num_flops else " | "
        moved = f"{figure.us:,.1f} | {figure.gb_per_s:,.0f} | {figure.of_memcpy:.3f}"
        lines.append(f"| {figure.case} | {figure.way} | {moved} | {arithmetic} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, then print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description="Measure attention backends, KV append and norms.")
    parser.add_argument("--shape", choices=HEADS, default="8b", help="default: %(default)s")
    parser.add_argument("--fp8-kv", action="store_true", help="measure only decode attention over an FP8 KV cache")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    shape = shape_of(arguments.shape, torch.device("cuda", torch.cuda.current_device()))
    if arguments.fp8_kv:
        figures = measure_fp8_kv(shape)
        print(f"{fp8_table(figures)}\n\n{MEMCPY_NOTE}")
    else:
        figures = measure_all(shape, arguments.shape)
        print(f"{table(figures)}\n\n{MEMCPY_NOTE}")
    if arguments.json:
        document = {"machine": describe_machine()}
        document["figures"] = [
            asdict(figure) | {"GB/s": figure.gb_per_s, "of memcpy": figure.of_memcpy, "TFLOP/s": figure.tflops}
            for figure in figures
        ]
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


def measure_all(shape: AttentionShape, name: str) -> list[Figure]:
    """Measure every backend, and the kernels before and after attention."""
    named = backends(shape)
    figures: list[Figure] = []
    for case in CASES:
        figures += measure_attention(case, shape, named)
        torch.cuda.empty_cache()
    if FlashInferAttention.refusal(shape) is None:
        kernels = {name: backend for name, backend in named.items() if isinstance(backend, FlashInferAttention)}
        for case in LATER_TURNS:
            figures += measure_attention(
                case, shape, {**kernels, "flashinfer": FlashInferAttention(shape)}, is_captured=True
            )
    return figures + (measure_token_kernels() if name == "8b" else measure_gated_heads(shape))


if __name__ == "__main__":
    main()
