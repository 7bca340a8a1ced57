"""Compare the kernels for decode states and convolutions with a plain copy of the same number of bytes.

    PYTHONPATH=. python3 benchmarks/state_kernels.py [--json FILE] [--sweep]

Each time is the median of one launch inside a CUDA graph of many launches, on random data. Successive launches use
different slots and inputs, one GiB in total, so that none are in the L2 cache. The ratio is the time of a plain copy
that reads and writes the same number of bytes, divided by the time of the kernel. Copies are measured up to 384 MiB
read; the times of larger copies are extrapolated. These bytes count:

- State update: only the states. With K drafts, it reads one state and writes 1 + K.
- Replayed states: the states that are read, and those that folds write. No drafts, half of them or all are accepted.
- Convolutions: inputs, outputs and windows.

If mamba-ssm is installed, its update runs on the same number of states, in its own layout and without drafts.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from measuring.ceilings import copy_us
from measuring.graph_timing import MEMCPY_NOTE, Launch, launch_us
from measuring.machine import describe_machine
from measuring.replay_bench import ReplayBench
from peers.causal_conv1d_peer import peer_conv
from peers.mamba_ssm_peer import peer_function
from torch import Tensor

from megatron_mamba_cache.recurrences.batches import DecodeBatch, full_sequences
from megatron_mamba_cache.recurrences.conv import conv as causal_conv_module
from megatron_mamba_cache.recurrences.conv import verify as conv_verify_module
from megatron_mamba_cache.recurrences.conv.conv import ConvTiling, causal_conv
from megatron_mamba_cache.recurrences.conv.verify import ConvVerifyTiling, conv_verify
from megatron_mamba_cache.recurrences.mamba2 import verify as state_verify_module
from megatron_mamba_cache.recurrences.mamba2.inputs import SSMTokens, SSMWeights
from megatron_mamba_cache.recurrences.mamba2.reference import state_verify_ref
from megatron_mamba_cache.recurrences.mamba2.replay.outputs import replay_tiled, state_replay
from megatron_mamba_cache.recurrences.mamba2.replay.tiling import ReplayTiling
from megatron_mamba_cache.recurrences.mamba2.verify import VerifyTiling, state_verify

ROTATED_BYTES = 2**30
D_CONV = 4
CHUNK = 256
ROWS = (8, 64, 256)
DRAFTS = (0, 1, 3, 7)
PROMPTS = ((1, 4096), (8, 4096))  # number of prompts, tokens per prompt
DECODE_SIZES = (64, 256)
SWEPT = ((64, 0), (256, 0), (64, 3))  # rows, drafts
SWEPT_REPLAYS = ((64, 0), (64, 3), (64, 7))
RING_LEN = 16
STATE_TILINGS = (
    state_verify_module.TILING,
    VerifyTiling(width=64, num_warps=4, max_registers=168),
    VerifyTiling(width=64, num_warps=8, max_registers=128),
    VerifyTiling(width=64, num_warps=2, max_registers=255),
    VerifyTiling(width=32, num_warps=4, max_registers=80),
    VerifyTiling(width=32, num_warps=4, max_registers=64),
    VerifyTiling(width=32, num_warps=2, max_registers=128),
    VerifyTiling(width=16, num_warps=2, max_registers=80),
)
REPLAY_TILINGS = (
    ReplayTiling("sums", width=32, num_warps=1, max_registers=255),
    ReplayTiling("sums", width=16, num_warps=1, max_registers=128),
    ReplayTiling("mma", width=32, num_warps=1, max_registers=255),
    ReplayTiling("mma", width=32, num_warps=1, max_registers=224),
    ReplayTiling("mma", width=32, num_warps=1, max_registers=168),
    ReplayTiling("mma", width=16, num_warps=1, max_registers=168),
    ReplayTiling("portable", width=64, num_warps=4, max_registers=128),
    ReplayTiling("portable", width=32, num_warps=1, max_registers=255),
)
CONV_TILINGS = (
    causal_conv_module.TILING,
    ConvTiling(tokens=32, channels=512, at_once=8, num_warps=2),
    ConvTiling(tokens=32, channels=1024, at_once=4, num_warps=4),
    ConvTiling(tokens=64, channels=1024, at_once=8, num_warps=4),
    ConvTiling(tokens=16, channels=1024, at_once=8, num_warps=4),
    ConvTiling(tokens=32, channels=1024, at_once=16, num_warps=4),
    ConvTiling(tokens=32, channels=256, at_once=8, num_warps=1),
)
CONV_VERIFY_TILINGS = (
    conv_verify_module.TILING,
    ConvVerifyTiling(channels=256, num_warps=1),
    ConvVerifyTiling(channels=512, num_warps=4),
    ConvVerifyTiling(channels=1024, num_warps=4),
)
Peer = Callable[..., object]
Tiling = VerifyTiling | ReplayTiling | ConvTiling | ConvVerifyTiling


@dataclass(frozen=True, slots=True)
class Layer:
    """Dimensions of a Mamba layer."""

    name: str
    heads: int
    groups: int = 8
    head_dim: int = 64
    d_state: int = 128

    @property
    def conv_dim(self) -> int:
        """Number of channels of the convolution."""
        return self.heads * self.head_dim + 2 * self.groups * self.d_state

    @property
    def projected(self) -> int:
        """Width of the input projection, which contains the convolution's input."""
        return self.conv_dim + self.heads * self.head_dim + self.heads

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one SSM state."""
        return self.heads * self.head_dim * self.d_state * dtype.itemsize


LAYERS = (Layer("8B", 128), Layer("Nano", 64))
STATE_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured case, with times in microseconds; `num_bytes` are read and written."""

    kernel: str
    layer: str
    case: str
    tiling: Tiling | None
    num_bytes: int
    us: float
    memcpy_us: float

    @property
    def ratio(self) -> float:
        """Speed relative to the plain copy."""
        return self.memcpy_us / self.us

    @property
    def gb_per_s(self) -> float:
        """Bandwidth in GB/s."""
        return self.num_bytes / self.us / 1000


def timed(
    kernel: str, layer: Layer, case: str, num_bytes: int, launches: Sequence[Launch], tiling: Tiling | None = None
) -> Figure:
    """Measure launches that each read and write `num_bytes` in total."""
    us = launch_us(launches, max(2.0, num_bytes / 4e6))
    return Figure(kernel, layer.name, case, tiling, num_bytes, us, copy_us(num_bytes))


def num_rotations(num_bytes: int) -> int:
    """Return the number of steps of `num_bytes` each that cover ROTATED_BYTES, from 2 to 256."""
    return min(256, max(2, -(-ROTATED_BYTES // num_bytes)))


def windows_of_step(number: int, num_rows: int, num_drafts: int, device: str) -> DecodeBatch:
    """Return requests of 1 + `num_drafts` tokens with all accepted counts, and slots that only step `number` uses."""
    num_columns = 1 + num_drafts
    row = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    slots = torch.arange(num_rows * num_columns, dtype=torch.int32, device=device)
    columns = slots.view(num_columns, num_rows).t() + number * num_rows * num_columns
    return DecodeBatch(row * num_columns, columns.contiguous(), 1 + row[:-1] % num_columns, num_columns)


def random_tokens(layer: Layer, num_tokens: int, device: str = "cuda") -> SSMTokens:
    """Return bf16 tokens as slices of a wider tensor."""
    gn, d_inner = layer.groups * layer.d_state, layer.heads * layer.head_dim
    xbc = torch.randn(num_tokens, layer.conv_dim, device=device).bfloat16()
    x, b, c = xbc.split([d_inner, gn, gn], dim=1)
    dt = torch.randn(num_tokens, layer.heads, device=device).bfloat16()
    groups = (layer.groups, layer.d_state)
    return SSMTokens(x.unflatten(1, (layer.heads, layer.head_dim)), dt, b.unflatten(1, groups), c.unflatten(1, groups))


def random_weights(layer: Layer, device: str = "cuda") -> SSMWeights:
    """Return random weights of a layer."""
    a_log, skip, bias = torch.randn(3, layer.heads, device=device).unbind()
    return SSMWeights(a_log, skip, bias)


class StateBench:
    """SSM states and inputs of one layer."""

    def __init__(self, layer: Layer, dtype: torch.dtype, num_rows: int, num_drafts: int, device: str = "cuda") -> None:
        self.layer, self.num_rows, self.num_drafts = layer, num_rows, num_drafts
        self.num_bytes = num_rows * (2 + num_drafts) * layer.state_bytes(dtype)
        num_steps = num_rotations(num_rows * (1 + num_drafts) * layer.state_bytes(dtype))
        num_tokens = num_rows * (1 + num_drafts)
        shape = (num_steps * num_tokens, layer.heads, layer.d_state, layer.head_dim)
        self.pool = torch.empty(shape, dtype=dtype, device=device).normal_()
        self.steps = [windows_of_step(number, num_rows, num_drafts, device) for number in range(num_steps)]
        self.tokens, self.weights = random_tokens(layer, num_tokens, device), random_weights(layer, device)

    def launches(self, tiling: VerifyTiling) -> list[Launch]:
        """Return the state update of each step."""
        return [
            lambda rows=rows: state_verify(self.tokens, self.weights, self.pool, rows, tiling) for rows in self.steps
        ]

    def check(self, tiling: VerifyTiling) -> None:
        """Compare one step with the reference.

        Raises:
            RuntimeError: If the update is wrong.
        """
        rows = self.steps[0]
        before = self.pool[: rows.columns.numel()].clone()
        expected = state_verify_ref(self.tokens, self.weights, before, rows)
        y = state_verify(self.tokens, self.weights, self.pool, rows, tiling)
        error = (y - expected).abs().max() / expected.abs().max()
        states = self.pool[: before.shape[0]].float()
        state_error = (states - before.float()).abs().max() / before.float().abs().max()
        if not (error < 0.02 and state_error < 0.02):
            raise RuntimeError(
                f"{self.layer.name}: outputs differ from the reference by {error:.2e}, states by {state_error:.2e}"
            )


class PeerBench:
    """mamba-ssm's update of the same states, in its layout [slots, heads, head_dim, d_state]."""

    def __init__(self, bench: StateBench, update: Peer) -> None:
        layer, tokens, weights = bench.layer, bench.tokens, bench.weights
        self._update = update
        self._steps = [rows.columns[:, 0].contiguous() for rows in bench.steps]
        self._pool = bench.pool.view(-1, layer.heads, layer.head_dim, layer.d_state)
        over_head = (-1, layer.head_dim)
        a = -torch.exp(weights.A_log)[:, None, None].expand(-1, layer.head_dim, layer.d_state)
        dt = tokens.dt[:, :, None].expand(-1, *over_head)
        self._inputs = (tokens.x, dt, a, tokens.B, tokens.C, weights.D[:, None].expand(over_head))
        self._bias = weights.dt_bias[:, None].expand(over_head)

    def launches(self) -> list[Launch]:
        """Return the state update of each step."""
        return [lambda slots=slots: self._step(slots) for slots in self._steps]

    def _step(self, slots: Tensor) -> object:
        return self._update(self._pool, *self._inputs, dt_bias=self._bias, dt_softplus=True, state_batch_indices=slots)


class ConvBench:
    """Convolution of one layer: weights, and inputs that are slices of a wider projection."""

    def __init__(self, layer: Layer, device: str = "cuda") -> None:
        self.layer, self.device = layer, device
        self.weight = torch.randn(layer.conv_dim, D_CONV, device=device).bfloat16()
        self.bias = torch.randn(layer.conv_dim, device=device).bfloat16()

    def prompt_bytes(self, num_rows: int, length: int) -> int:
        """Return the bytes of inputs and outputs of prompts."""
        return 2 * num_rows * length * self.layer.conv_dim * 2

    def prompts(self, num_rows: int, length: int, tiling: ConvTiling) -> list[Launch]:
        """Return convolutions of whole prompts, each with its own inputs; they store their windows in slots."""
        rows = full_sequences(num_rows, length, CHUNK, torch.device(self.device))
        slots = torch.arange(num_rows, dtype=torch.int32, device=self.device)
        rows = replace(rows, initial_slots=slots, final_slots=slots)
        pool = torch.randn(num_rows, D_CONV - 1, self.layer.conv_dim, device=self.device).bfloat16()
        inputs = self._prompt_inputs(num_rows, length)
        return [lambda x=x: causal_conv(x, self.weight, self.bias, pool, rows, tiling) for x in inputs]

    def peer_prompts(self, num_rows: int, length: int, conv: Peer) -> list[Launch]:
        """Return causal-conv1d's convolutions of whole prompts; they store no windows."""
        inputs = [x.unflatten(0, (num_rows, length)).mT for x in self._prompt_inputs(num_rows, length)]
        return [lambda x=x: conv(x, self.weight, self.bias, activation="silu") for x in inputs]

    def decode_bytes(self, num_rows: int) -> int:
        """Return the bytes of inputs and outputs, and of windows, which are both read and written."""
        return 2 * num_rows * D_CONV * self.layer.conv_dim * 2

    def decodes(self, num_rows: int, tiling: ConvVerifyTiling) -> list[Launch]:
        """Return steps with one token per request, each with its own slots and inputs."""
        layer, count = self.layer, num_rotations(self.decode_bytes(num_rows))
        pool = torch.randn(count * num_rows, D_CONV - 1, layer.conv_dim, device=self.device).bfloat16()
        wide = torch.randn(count, num_rows, layer.projected, device=self.device).bfloat16()
        inputs = wide[:, :, layer.heads * layer.head_dim :][:, :, : layer.conv_dim]
        steps = [(x, windows_of_step(number, num_rows, 0, self.device)) for number, x in enumerate(inputs)]
        return [lambda x=x, rows=rows: conv_verify(x, self.weight, self.bias, pool, rows, tiling) for x, rows in steps]

    def _prompt_inputs(self, num_rows: int, length: int) -> list[Tensor]:
        """Return inputs of prompts: [tokens, conv_dim]."""
        layer, count = self.layer, num_rotations(self.prompt_bytes(num_rows, length))
        shape = (num_rows * length, layer.projected)
        wide = [torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_() for _ in range(count)]
        return [projected[:, layer.heads * layer.head_dim :][:, : layer.conv_dim] for projected in wide]


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bf16" or "fp32"."""
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def measure_states(
    layer: Layer,
    cases: Sequence[tuple[int, int]],
    tilings: Sequence[VerifyTiling],
    peer: Peer | None,
) -> Iterator[Figure]:
    """Measure the state update in every case (requests, drafts) with every tiling, and the peer without drafts."""
    for dtype in STATE_DTYPES:
        for num_rows, num_drafts in cases:
            bench = StateBench(layer, dtype, num_rows, num_drafts)
            case = f"{dtype_name(dtype)}, {num_rows} rows, K = {num_drafts}"
            for tiling in tilings:
                bench.check(tiling)
                launches = bench.launches(tiling)
                yield timed("state_verify", layer, case, bench.num_bytes, launches, tiling)
            if peer is not None and num_drafts == 0:
                launches = PeerBench(bench, peer).launches()
                yield timed("mamba-ssm", layer, case, bench.num_bytes, launches)
            del bench, launches
            torch.cuda.empty_cache()


def kept_counts(num_drafts: int) -> list[int]:
    """Return the numbers of accepted tokens in a step if none, half or all of its drafts are accepted."""
    return sorted({1, 1 + num_drafts // 2, 1 + num_drafts})


def measure_replays(
    layer: Layer, cases: Sequence[tuple[int, int]], tilings: Sequence[ReplayTiling | None]
) -> Iterator[Figure]:
    """Measure replayed states in every case (requests, drafts): the mean over a ring's period, including folds.

    If a tiling is None, the op chooses it. Bytes count for the states that are read, and for those that folds write.
    """
    for dtype in STATE_DTYPES:
        for num_rows, num_drafts in cases:
            tokens, weights = random_tokens(layer, num_rows * (1 + num_drafts)), random_weights(layer)
            state_bytes = num_rows * layer.state_bytes(dtype)
            for kept in kept_counts(num_drafts):
                bench = ReplayBench(
                    tokens, weights, dtype, RING_LEN, num_rows=num_rows, kept=kept, num_steps=num_rotations(state_bytes)
                )
                case = f"{dtype_name(dtype)}, {num_rows} rows, K = {num_drafts}, {kept - 1} kept"
                num_bytes = state_bytes + state_bytes * min(kept, RING_LEN) // RING_LEN
                for tiling in tilings:
                    replay = state_replay if tiling is None else partial(replay_tiled, tiling=tiling)
                    bench.check(replay)
                    yield timed("state_replay", layer, case, num_bytes, bench.launches(replay), tiling)
                del bench
                torch.cuda.empty_cache()


def measure_convs(
    layer: Layer, tilings: Sequence[ConvTiling], decode_tilings: Sequence[ConvVerifyTiling]
) -> Iterator[Figure]:
    """Measure both convolutions in every case with every tiling, and causal-conv1d for prompts if it is installed."""
    bench, peer = ConvBench(layer), peer_conv()
    for num_rows, length in PROMPTS:
        num_bytes, case = bench.prompt_bytes(num_rows, length), f"{num_rows} x {length} tokens"
        for tiling in tilings:
            launches = bench.prompts(num_rows, length, tiling)
            yield timed("causal_conv", layer, case, num_bytes, launches, tiling)
            del launches
            torch.cuda.empty_cache()
        if peer is not None:
            yield timed("causal-conv1d", layer, case, num_bytes, bench.peer_prompts(num_rows, length, peer))
    for num_rows in DECODE_SIZES:
        num_bytes = bench.decode_bytes(num_rows)
        for tiling in decode_tilings:
            launches = bench.decodes(num_rows, tiling)
            yield timed("conv_verify", layer, f"{num_rows} rows, K = 0", num_bytes, launches, tiling)


def table(figures: Sequence[Figure]) -> str:
    """Return a Markdown table with a line per case and a column per layer."""
    layers = list(dict.fromkeys(figure.layer for figure in figures))
    found = {(figure.kernel, figure.case, figure.layer): figure for figure in figures}
    lines = ["| kernel | case | " + " | ".join(f"{layer}: µs, GB/s, of memcpy" for layer in layers) + " |"]
    lines.append("|---|---|" + "---:|" * len(layers))
    for kernel, case in dict.fromkeys((figure.kernel, figure.case) for figure in figures):
        cells = [_cell(found.get((kernel, case, layer))) for layer in layers]
        lines.append(f"| {kernel} | {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sweep_table(figures: Sequence[Figure]) -> str:
    """Return a Markdown table with a line per case and tiling."""
    lines = ["| kernel | layer | case | tiling | µs, GB/s, of memcpy |", "|---|---|---|---|---:|"]
    for figure in figures:
        sizes = ", ".join(f"{name} {size}" for name, size in asdict(figure.tiling).items()) if figure.tiling else ""
        lines.append(f"| {figure.kernel} | {figure.layer} | {figure.case} | {sizes} | {_cell(figure)} |")
    return "\n".join(lines)


def _cell(figure: Figure | None) -> str:
    return "" if figure is None else f"{figure.us:,.1f}, {figure.gb_per_s:,.0f}, {figure.ratio:.3f}"


def main() -> None:
    """Measure, then print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description="Measure the state and convolution kernels against a memcpy.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    parser.add_argument("--sweep", action="store_true", help="compare tilings on the 8B shapes instead")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    peer = peer_function("selective_state_update", "selective_state_update")
    figures: list[Figure] = []
    if arguments.sweep:
        figures += measure_states(LAYERS[0], SWEPT, STATE_TILINGS, peer=None)
        figures += measure_replays(LAYERS[0], SWEPT_REPLAYS, REPLAY_TILINGS)
        figures += measure_convs(LAYERS[0], CONV_TILINGS, CONV_VERIFY_TILINGS)
        print(sweep_table(figures))
    else:
        cases = [(num_rows, num_drafts) for num_drafts in DRAFTS for num_rows in ROWS]
        for layer in LAYERS:
            figures += measure_states(layer, cases, [state_verify_module.TILING], peer=peer)
            figures += measure_replays(layer, cases, [None])
            figures += measure_convs(layer, [causal_conv_module.TILING], [conv_verify_module.TILING])
        print(table(figures))
        print("\nmamba-ssm: " + ("its selective_state_update" if peer else "not installed"))
    print(f"\n{MEMCPY_NOTE}")
    if arguments.json:
        records = [asdict(figure) | {"ratio": figure.ratio, "GB/s": figure.gb_per_s} for figure in figures]
        document = {"machine": describe_machine(), "figures": records}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
