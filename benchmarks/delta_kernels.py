"""Compare the speed and accuracy of our Gated DeltaNet kernels with fla-core and FlashInfer.

    PYTHONPATH=. python3 benchmarks/delta_kernels.py [--json FILE] [--only SECTION ...] [--layers NAME ...]
        [--sweep [KERNEL ...]]

Tokens are bf16 and states are float32. Each time is the median of one launch inside a CUDA graph of several, on random
data. Prompts are larger than the L2 cache, and successive decode steps use different slots, one GiB in total.

- Prompts: our op and each of its two kernels. Other libraries get precomputed gates and write strengths.
- Decode: the ratio is the time of a plain copy that reads and writes the bytes of the states, divided by the time of
  the kernel.
- Replayed decode: the mean over a ring's period, with its folds, if a step keeps none, half or all of its drafts. The
  ratio is the time of the kernels divided by FlashInfer's time for one token per request with states of the same dtype,
  in the same run; without FlashInfer, by the time of our window form.
- Errors: relative to the largest output of the reference in float64, over 4,096 tokens.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, product
from pathlib import Path

import torch
from measuring.ceilings import copy_us
from measuring.graph_timing import Launch, launch_us
from measuring.machine import describe_machine
from measuring.replay_bench import DeltaReplayBench
from peers.delta_rule_peers import Peer, fla_peer, flashinfer_peer
from torch import Tensor

from megatron_mamba_cache.recurrences.batches import PAD_SLOT, DecodeBatch, PrefillBatch
from megatron_mamba_cache.recurrences.gated_delta.inputs import DeltaTokens, GateWeights, write_strengths
from megatron_mamba_cache.recurrences.gated_delta.replay.outputs import delta_replay
from megatron_mamba_cache.recurrences.gated_delta.replay.tiling import SUMS, ReplayTiling
from megatron_mamba_cache.recurrences.gated_delta.scan import carry_states, delta_scan, solve
from megatron_mamba_cache.recurrences.gated_delta.scan_portable import ScanTiling, scan_portably
from megatron_mamba_cache.recurrences.gated_delta.tile_systems import solve_tiles
from megatron_mamba_cache.recurrences.gated_delta.verify import VerifyTiling, delta_verify
from megatron_mamba_cache.recurrences.request_tiles import tile_shape
from megatron_mamba_cache.step.prefill_metadata import plan_chunks

GRAIN = 64
DIM = 128
LAYERS = {"Qwen3-Next": (16, 32), "Qwen3.6-27B": (16, 48)}
MIXED = tuple(map(random.Random(0).randint, (200,) * 16, (4000,) * 16))
PROMPTS = {
    "1 x 512": (512,),
    "1 x 4k": (4096,),
    "8 x 4k": (4096,) * 8,
    "16 rows of 200 to 4000": MIXED,
    "1 x 32k": (32768,),
}
BOUNDARIES = {"8 x 4k, three boundaries": (1024, 2048, 3072), "8 x 4k, a boundary every 256": range(256, 4096, 256)}
REQUESTS, DRAFTS = (1, 8, 64, 256), (0, 3)
REPLAYED_REQUESTS, REPLAYED_DRAFTS, RING_LEN = (8, 64, 256), (0, 3, 7), 16
ROTATED_BYTES = 2**30
ERROR_TOKENS = 4096
SCAN_TILINGS = (
    ScanTiling(64, num_warps=4, num_stages=2),
    ScanTiling(64, num_warps=4, num_stages=3),
    ScanTiling(64, num_warps=4, num_stages=2, by_tma=False),
    ScanTiling(64, num_warps=4, num_stages=3, by_tma=False),
    ScanTiling(128, num_warps=8, num_stages=2),
    ScanTiling(128, num_warps=8, num_stages=3),
)
SYSTEM_REGISTERS = (128, 168, 255)
VERIFY_TILINGS = (
    VerifyTiling(width=32, num_warps=4, max_registers=96),
    VerifyTiling(width=32, num_warps=4, max_registers=128),
    VerifyTiling(width=32, num_warps=2, max_registers=128),
    VerifyTiling(width=32, num_warps=1, max_registers=255),
    VerifyTiling(width=16, num_warps=1, max_registers=128),
    VerifyTiling(width=16, num_warps=1, max_registers=168),
    VerifyTiling(width=8, num_warps=1, max_registers=96),
    VerifyTiling(width=64, num_warps=2, max_registers=255),
    VerifyTiling(width=64, num_warps=4, max_registers=128),
)
REPLAY_TILINGS = (
    SUMS,
    ReplayTiling(width=32, num_warps=1, max_registers=255),
    ReplayTiling(width=16, num_warps=1, max_registers=168),
    ReplayTiling(width=16, num_warps=1, max_registers=128),
    ReplayTiling(width=32, num_warps=2, max_registers=168),
    ReplayTiling(width=64, num_warps=2, max_registers=255),
)
SWEPT_PROMPTS, SWEPT_DECODES = ("1 x 4k", "8 x 4k", "1 x 32k"), ((1, 0), (1, 3), (8, 0), (64, 0), (64, 3))
SWEPT_REPLAYS = ((8, 0, 1), (64, 0, 1), (64, 3, 1), (64, 3, 4), (64, 7, 8))
"""Numbers of requests, of drafts and of kept tokens."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured case: a time in microseconds or a relative error, and times for comparison.

    Args:
        copy_us: Time of a plain copy.
        peer_us: Time of another library for one token per request.
    """

    layer: str
    case: str
    form: str
    value: float
    copy_us: float | None = None
    peer_us: float | None = None


def random_tokens(heads: tuple[int, int], num_tokens: int, device: str = "cuda") -> DeltaTokens:
    """Return bf16 tokens and gates, as slices of wider tensors like those of a convolution and a projection."""
    key_heads, value_heads = heads
    of_keys = key_heads * DIM
    qkv = torch.empty(num_tokens, 2 * of_keys + value_heads * DIM, device=device, dtype=torch.bfloat16).normal_()
    q, k, v = qkv.split([of_keys, of_keys, value_heads * DIM], dim=1)
    b, a = torch.randn(2, num_tokens, value_heads, device=device).bfloat16()
    return DeltaTokens(*(t.unflatten(1, (-1, DIM)) for t in (q, k, v)), b, a)


def random_gates(heads: tuple[int, int], device: str = "cuda") -> GateWeights:
    """Return the gate parameters of a newly initialized model: A from 0 to 16, time steps from 0.001 to 0.1."""
    A_log = torch.log(16 * torch.rand(heads[1], device=device) + 1e-3)
    return GateWeights(A_log, torch.log(torch.expm1(10 ** (-3 + 2 * torch.rand(heads[1], device=device)))))


def prompt_rows(lengths: Sequence[int], boundaries: Sequence[int] = (), device: str = "cuda") -> PrefillBatch:
    """Return prompts without an initial state, with a slot for each last state and for each state at a boundary."""
    starts = [0, *accumulate(lengths)]
    plan = plan_chunks([0] * len(lengths), starts, GRAIN)
    chunk_slots = [PAD_SLOT] * len(plan.chunk_requests)
    ends = [start + end for start in starts[:-1] for end in boundaries]
    for slot, end in enumerate(ends, start=len(lengths)):
        chunk_slots[plan.chunk_at_end(end)] = slot
    columns = (
        starts,
        [PAD_SLOT] * len(lengths),
        range(len(lengths)),
        plan.cu_chunks,
        plan.chunk_requests,
        chunk_slots,
        plan.cu_request_chunks,
        sorted(range(len(lengths)), key=lambda row: -lengths[row]),
    )
    return PrefillBatch(*(torch.tensor(column, dtype=torch.int32, device=device) for column in columns))


def prompt_launches(tokens: DeltaTokens, gates: GateWeights, pool: Tensor, rows: PrefillBatch) -> dict[str, Launch]:
    """Return the launches of our scan and of each of its kernels, by name."""
    shape = tile_shape(GRAIN, tokens.q.dtype)
    assert shape is not None
    tiles = solve(tokens, gates, rows, shape)
    return {
        "ours": lambda: delta_scan(tokens, gates, pool, rows, GRAIN),
        "systems": lambda: solve(tokens, gates, rows, shape),
        "scan": lambda: carry_states(tokens, pool, rows, tiles),
    }


def peer_prompts(peer: Peer, tokens: DeltaTokens, gates: GateWeights, lengths: Sequence[int]) -> Launch:
    """Return a peer's scan of the same tokens, without initial states and with final states."""
    assert peer.prefill is not None
    prefill = peer.prefill
    q, k, v = (t.contiguous() for t in (tokens.q, tokens.k, tokens.v))
    g, beta = gates.log_decays(tokens.a, torch.float32), write_strengths(tokens.b)
    is_varlen = len(set(lengths)) > 1 or peer.name != "fla-core"
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], device="cuda") if is_varlen else None
    return lambda: prefill(q, k, v, g, beta, cu_seqlens, len(lengths))


def measured(layer: str, case: str, form: str, launches: Sequence[Launch], guess_us: float) -> Iterator[Figure]:
    """Yield the time of a launch; if the launch fails, print the reason and yield nothing."""
    try:
        yield Figure(layer, case, form, launch_us(launches, guess_us))
    except Exception as error:  # a peer that fails must not stop the benchmark
        if form == "ours":
            raise
        print(f"{form} does not run {case} of {layer}: {type(error).__name__}: {str(error)[:200]}")
    finally:
        torch.cuda.empty_cache()


def measure_prompts(layers: Sequence[str], peers: Sequence[Peer]) -> Iterator[Figure]:
    """Yield the times of all scans in each case."""
    for layer in layers:
        gates = random_gates(LAYERS[layer])
        for case, lengths in PROMPTS.items():
            tokens, rows = random_tokens(LAYERS[layer], sum(lengths)), prompt_rows(lengths)
            guess_us = max(20.0, 0.03 * sum(lengths))
            pool = torch.empty(len(lengths), LAYERS[layer][1], DIM, DIM, device="cuda")
            for form, launch in prompt_launches(tokens, gates, pool, rows).items():
                yield from measured(layer, case, form, [launch], guess_us)
            for peer in peers:
                if peer.prefill is not None:
                    launch = peer_prompts(peer, tokens, gates, lengths)
                    yield from measured(layer, case, peer.name, [launch], 2 * guess_us)
            del tokens, launch
        lengths = (4096,) * 8
        tokens = random_tokens(LAYERS[layer], sum(lengths))
        for case, boundaries in BOUNDARIES.items():
            rows = prompt_rows(lengths, boundaries)
            pool = torch.empty(8 * (1 + len(boundaries)), LAYERS[layer][1], DIM, DIM, device="cuda")
            launch = prompt_launches(tokens, gates, pool, rows)["ours"]
            yield from measured(layer, case, "ours", [launch], 1000)


def decode_rows(number: int, num_rows: int, num_drafts: int, device: str = "cuda") -> DecodeBatch:
    """Return requests of 1 + `num_drafts` tokens with slots that only step `number` uses."""
    num_columns = 1 + num_drafts
    row = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    slots = torch.arange(num_rows * num_columns, dtype=torch.int32, device=device)
    columns = slots.view(num_columns, num_rows).t() + number * num_rows * num_columns
    return DecodeBatch(row * num_columns, columns.contiguous(), 1 + row[:-1] % num_columns, num_columns)


class DecodeBench:
    """States of one layer, in separate slots for each of many steps, and the tokens of a step."""

    def __init__(
        self, layer: str, requests: int, num_drafts: int, device: str = "cuda", dtype: torch.dtype = torch.float32
    ) -> None:
        state_bytes = LAYERS[layer][1] * DIM * DIM * dtype.itemsize
        of_step = requests * (1 + num_drafts)
        count = min(256, max(2, -(-ROTATED_BYTES // (of_step * state_bytes))))
        self.num_bytes = requests * (2 + num_drafts) * state_bytes
        self.requests = requests
        self.gates, self.tokens = random_gates(LAYERS[layer], device), random_tokens(LAYERS[layer], of_step, device)
        self.pool = torch.empty(count * of_step, LAYERS[layer][1], DIM, DIM, device=device, dtype=dtype).normal_()
        self.steps = [decode_rows(number, requests, num_drafts, device) for number in range(count)]

    def launches(self, tiling: VerifyTiling | None = None) -> list[Launch]:
        """Return the update of each step."""
        chosen = {} if tiling is None else {"tiling": tiling}
        return [partial(delta_verify, self.tokens, self.gates, self.pool, rows, **chosen) for rows in self.steps]

    def peer_launches(self, peer: Peer) -> list[Launch]:
        """Return a peer's update of each step, without drafts."""
        assert peer.decode is not None
        plain = DeltaTokens(*(getattr(self.tokens, name).contiguous() for name in ("q", "k", "v", "b", "a")))
        return [partial(peer.decode, plain, self.gates, state) for state in self.pool.split(self.requests)]


def measure_decode(layers: Sequence[str], peers: Sequence[Peer]) -> Iterator[Figure]:
    """Yield the times of the state update in each case, and those of the peers for one token per request."""
    for layer, num_drafts, requests in product(layers, DRAFTS, REQUESTS):
        bench = DecodeBench(layer, requests, num_drafts)
        copied, guess_us = copy_us(bench.num_bytes), max(3.0, bench.num_bytes / 3e6)
        case = f"{requests} requests, {num_drafts} drafts"
        forms = {"ours": bench.launches()}
        if num_drafts == 0:
            forms |= {peer.name: bench.peer_launches(peer) for peer in peers if peer.decode is not None}
        for form, launches in forms.items():
            for figure in measured(layer, case, form, launches, guess_us):
                yield replace(figure, copy_us=copied)
        del bench, forms, launches


def kept_counts(num_drafts: int) -> list[int]:
    """Return how many tokens a step keeps if none, half or all of its drafts are correct."""
    return sorted({1, 1 + num_drafts // 2, 1 + num_drafts})


def replay_bench(
    layer: str, requests: int, num_drafts: int, kept: int, dtype: torch.dtype = torch.float32, device: str = "cuda"
) -> DeltaReplayBench:
    """Return states, rings and steps of one layer; each step has its own states."""
    heads = LAYERS[layer]
    num_steps = min(256, max(2, -(-ROTATED_BYTES // (requests * heads[1] * DIM * DIM * dtype.itemsize))))
    tokens, gates = random_tokens(heads, requests * (1 + num_drafts), device), random_gates(heads, device)
    return DeltaReplayBench(tokens, gates, dtype, RING_LEN, num_rows=requests, kept=kept, num_steps=num_steps)


def measure_replays(layers: Sequence[str], peers: Sequence[Peer]) -> Iterator[Figure]:
    """Yield the times of replayed steps, of the window form, and of the peers for one token per request."""
    for layer, dtype, requests in product(layers, (torch.float32, torch.bfloat16), REPLAYED_REQUESTS):
        states = requests * LAYERS[layer][1] * DIM * DIM * dtype.itemsize
        name, guess_us = f"{str(dtype)[6:]}, {requests} requests", max(3.0, states / 2e6)
        one_token = DecodeBench(layer, requests, 0, dtype=dtype)
        updates = {"window": one_token.launches()}
        updates |= {peer.name: one_token.peer_launches(peer) for peer in peers if peer.decode is not None}
        found = [next(measured(layer, name, form, each, guess_us), None) for form, each in updates.items()]
        times = {figure.form: figure.value for figure in found if figure is not None}
        peer_us = times.get("FlashInfer", times["window"])
        del one_token, updates
        for num_drafts in REPLAYED_DRAFTS:
            case = f"{name}, {num_drafts} drafts"
            if num_drafts == 0:
                yield from (
                    Figure(layer, f"{case}, 0 kept", form, value, None, peer_us) for form, value in times.items()
                )
            else:
                window = DecodeBench(layer, requests, num_drafts, dtype=dtype).launches()
                for figure in measured(layer, f"{case}, 0 kept", "window", window, (1 + num_drafts) * guess_us):
                    yield replace(figure, peer_us=peer_us)
                del window
            for kept in kept_counts(num_drafts):
                bench = replay_bench(layer, requests, num_drafts, kept, dtype)
                bench.check(delta_replay)
                launches = bench.launches(delta_replay)
                for figure in measured(layer, f"{case}, {kept - 1} kept", "ours", launches, guess_us):
                    yield replace(figure, peer_us=peer_us)
                del bench, launches


def sweep_scans(layers: Sequence[str]) -> Iterator[Figure]:
    """Yield the times of the scan in every tiling."""
    shape = tile_shape(GRAIN, torch.bfloat16)
    assert shape is not None
    for layer, case in product(layers, SWEPT_PROMPTS):
        lengths, gates = PROMPTS[case], random_gates(LAYERS[layer])
        tokens, rows = random_tokens(LAYERS[layer], sum(lengths)), prompt_rows(lengths)
        pool = torch.empty(len(lengths), LAYERS[layer][1], DIM, DIM, device="cuda")
        for registers in SYSTEM_REGISTERS:
            launch: Launch = partial(solve_tiles, tokens, gates, rows, shape, registers)
            yield from measured(layer, case, f"systems, {registers} registers", [launch], 0.02 * sum(lengths))
        tiles, found = solve_tiles(tokens, gates, rows, shape), []
        for tiling in SCAN_TILINGS:
            launch = partial(scan_portably, tokens, pool, rows, tiles, tiling=tiling)
            yield from measured(layer, case, f"scan, {_named(tiling)}", [launch], 0.02 * sum(lengths))
            found.append((tiles.y.clone(), pool.clone()))
        if not all(torch.equal(one, other) for results in found for one, other in zip(results, found[0], strict=True)):
            print(f"{case}: tilings of the scan give different bits")
        del tiles, found, launch


def sweep_updates(layers: Sequence[str]) -> Iterator[Figure]:
    """Yield the times of the window form in every tiling."""
    for layer, (requests, num_drafts), tiling in product(layers, SWEPT_DECODES, VERIFY_TILINGS):
        bench = DecodeBench(layer, requests, num_drafts)
        launches, guess_us = bench.launches(tiling), max(3.0, bench.num_bytes / 3e6)
        case = f"{requests} requests, {num_drafts} drafts"
        for figure in measured(layer, case, _named(tiling), launches, guess_us):
            yield replace(figure, copy_us=copy_us(bench.num_bytes))
        del bench, launches


def sweep_replays(layers: Sequence[str]) -> Iterator[Figure]:
    """Yield the times of replayed steps in every tiling."""
    for layer, (requests, num_drafts, kept) in product(layers, SWEPT_REPLAYS):
        bench = replay_bench(layer, requests, num_drafts, kept)
        guess_us = max(3.0, requests * LAYERS[layer][1] * DIM * DIM * 4 / 2e6)
        for tiling in REPLAY_TILINGS:
            replay = partial(delta_replay, tiling=tiling)
            bench.check(replay)
            case = f"{requests} requests, {num_drafts} drafts, {kept - 1} kept"
            yield from measured(layer, case, _named(tiling), bench.launches(replay), guess_us)
        del bench


def _named(tiling: ScanTiling | VerifyTiling | ReplayTiling) -> str:
    return ", ".join(f"{size} {name}" for name, size in asdict(tiling).items())


def scanned(tokens: DeltaTokens, gates: GateWeights, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last state of one request, with its tokens cast to `dtype`."""
    # b keeps its dtype, because the op rounds sigmoid(b) to it.
    cast = replace(tokens, **{name: getattr(tokens, name).to(dtype) for name in ("q", "k", "v", "a")})
    of_states = torch.float64 if dtype == torch.float64 else torch.float32
    pool = torch.zeros(1, tokens.v.shape[1], DIM, DIM, device="cuda", dtype=of_states)
    return delta_scan(cast, gates, pool, prompt_rows([tokens.v.shape[0]]), GRAIN), pool


def measure_errors(layers: Sequence[str], peers: Sequence[Peer]) -> Iterator[Figure]:
    """Yield the errors of outputs and final states: the largest error relative to the largest value, and the norm."""
    for layer in layers:
        gates, tokens = random_gates(LAYERS[layer]), random_tokens(LAYERS[layer], ERROR_TOKENS)
        exact = scanned(tokens, gates, torch.float64)
        found = {f"ours, {str(d)[6:]}": scanned(tokens, gates, d) for d in (torch.bfloat16, torch.float32)}
        for peer in peers:
            if peer.prefill is None:
                continue
            try:
                y, last = peer_prompts(peer, tokens, gates, [ERROR_TOKENS])()
            except Exception as error:
                print(f"{peer.name} does not run: {type(error).__name__}: {str(error)[:200]}")
                continue
            last = last if peer.name == "fla-core" else last.mT
            found[f"{peer.name}, bfloat16"] = (y.reshape(exact[0].shape), last.reshape(exact[1].shape))
        for form, results in found.items():
            for name, result, wanted in zip(("y", "state"), results, exact, strict=True):
                difference = result.double() - wanted
                yield Figure(layer, f"{name}, largest", form, float(difference.abs().max() / wanted.abs().max()))
                yield Figure(layer, f"{name}, norm", form, float(difference.norm() / wanted.norm()))


def table(figures: Sequence[Figure]) -> str:
    """Return a Markdown table with a line per layer and case."""
    forms = list(dict.fromkeys(figure.form for figure in figures))
    found = {(figure.layer, figure.case, figure.form): figure for figure in figures}
    lines = [f"| layer | case | {' | '.join(forms)} |", "|---|---|" + "---:|" * len(forms)]
    for layer, case in dict.fromkeys((figure.layer, figure.case) for figure in figures):
        cells = [_cell(found.get((layer, case, form))) for form in forms]
        lines.append(f"| {layer} | {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    if figure.copy_us is not None:
        return f"{figure.value:,.1f} ({figure.copy_us / figure.value:.2f} of copy)"
    if figure.peer_us is not None:
        return f"{figure.value:,.1f} ({figure.value / figure.peer_us:.2f} x)"
    return f"{figure.value:,.1f}" if figure.value >= 1 else f"{figure.value:.2e}"


MEASURES = {
    "prefill": measure_prompts,
    "decode": measure_decode,
    "replay": measure_replays,
    "errors": measure_errors,
}
SWEEPS = {"scan": sweep_scans, "window": sweep_updates, "replay": sweep_replays}


def main() -> None:
    """Measure, then print Markdown and write JSON."""
    parser = argparse.ArgumentParser(description="Measure the kernels of Gated DeltaNet.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to FILE")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument(
        "--sweep", nargs="*", choices=SWEEPS, metavar="KERNEL", help="measure every tiling of our kernels instead"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    torch.manual_seed(0)
    if arguments.sweep is not None:
        for name in arguments.sweep or SWEEPS:
            with torch.no_grad():
                for figure in SWEEPS[name](arguments.layers):
                    print(f"| {figure.layer} | {figure.case} | {figure.form} | {_cell(figure)} |", flush=True)
        return
    peers = (fla_peer(), flashinfer_peer())
    figures: dict[str, list[Figure]] = {}
    with torch.no_grad():
        for name in arguments.only:
            figures[name] = list(MEASURES[name](arguments.layers, peers))
            print(f"\n{name}: {'relative errors' if name == 'errors' else 'microseconds'}\n\n{table(figures[name])}")
            if arguments.json:
                records = {each: [asdict(figure) for figure in found] for each, found in figures.items()}
                arguments.json.write_text(json.dumps({"machine": describe_machine(), **records}, indent=2) + "\n")


if __name__ == "__main__":
    main()
