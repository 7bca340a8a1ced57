"""Compare the prefill scan with mamba-ssm's, and measure how much time boundary states add.

    PYTHONPATH=. python3 benchmarks/ssd_scan.py [--json FILE] [--sweep]

Times are in nanoseconds per token and layer, with bf16 tokens and float32 states. Each time is the median of one launch
inside a CUDA graph of several, on random data. mamba-ssm scans the same tokens without initial states, stores only the
final states, and uses the faster of two chunk sizes. It processes requests of different lengths as one sequence with
request indices.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from measuring.graph_timing import Launch, interleaved_us, launch_us
from measuring.machine import describe_machine
from peers.mamba_ssm_peer import peer_function
from torch import Tensor

from megatron_mamba_cache.recurrences.batches import PAD_SLOT, PrefillBatch
from megatron_mamba_cache.recurrences.mamba2.inputs import SSMTokens, SSMWeights
from megatron_mamba_cache.recurrences.mamba2.scan import scan_tiles, ssd_scan
from megatron_mamba_cache.recurrences.mamba2.tiles import HopperTiling
from megatron_mamba_cache.recurrences.request_tiles import TILE_LEN, tile_shape
from megatron_mamba_cache.step.prefill_metadata import plan_chunks

CHUNK = 256
D_STATE, HEAD_DIM, GROUPS = 128, 64, 8
HEADS = {"8B": 128, "Nano": 64}
MIXED = tuple(random.Random(0).randint(200, 4000) for _ in range(16))
CASES = {
    "1 x 512": (512,),
    "1 x 2k": (2048,),
    "1 x 4k": (4096,),
    "8 x 4k": (4096,) * 8,
    "16 rows of 200 to 4000": MIXED,
    "1 x 32k": (32768,),
    "1 x 128k": (131072,),
}
BOUNDARIES = {"no boundary": (), "three": (1024, 2048, 3072), "every 256": tuple(range(256, 4096, 256))}
SWEPT_CASES = ("1 x 4k", "8 x 4k", "16 rows of 200 to 4000")
TILINGS = (
    HopperTiling(heads=1, channels=64, num_stages=2),
    HopperTiling(heads=1, channels=64, num_stages=3),
    HopperTiling(heads=1, channels=32, num_stages=2),
    HopperTiling(heads=1, channels=32, num_stages=3),
    HopperTiling(heads=2, channels=64, num_stages=2),
    HopperTiling(heads=2, channels=32, num_stages=2),
    None,
)
PEER_CHUNKS = (128, 256)
GUESSED_NS = 30.0
NUM_ROUNDS = 41
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured case, in nanoseconds per token and layer."""

    model: str
    case: str
    form: str
    ns: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Random tokens and weights of a layer, and requests without an initial state."""

    lengths: tuple[int, ...]
    tokens: SSMTokens
    weights: SSMWeights
    pool: Tensor
    rows: PrefillBatch

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all requests."""
        return sum(self.lengths)


def make_batch(num_heads: int, lengths: tuple[int, ...], device: str = "cuda") -> Batch:
    """Return requests of the given lengths, each with its own float32 slot for the final state."""
    num_tokens = sum(lengths)

    def randn(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(sizes, device=device) * scale).bfloat16()

    tokens = SSMTokens(
        x=randn(num_tokens, num_heads, HEAD_DIM),
        dt=randn(num_tokens, num_heads),
        B=randn(num_tokens, GROUPS, D_STATE, scale=0.3),
        C=randn(num_tokens, GROUPS, D_STATE, scale=0.3),
    )
    A_log = torch.log(torch.rand(num_heads, device=device) * 15 + 1)
    weights = SSMWeights(A_log, torch.randn(num_heads, device=device), torch.randn(num_heads, device=device) - 4)
    pool = torch.empty(len(lengths), num_heads, D_STATE, HEAD_DIM, device=device)
    return Batch(lengths, tokens, weights, pool, _rows(lengths, (), device))


def tokens_bytes(num_heads: int, num_tokens: int) -> int:
    """Return the bytes of x, y, B, C and dt, each counted once."""
    return 2 * num_tokens * (2 * num_heads * HEAD_DIM + 2 * GROUPS * D_STATE + num_heads)


def scan_flops(num_heads: int, num_tokens: int) -> int:
    """Return the FLOPs of the scan in tiles of TILE_LEN tokens.

    They are those of the scores, the weighted sums of x, the output of the state, and the update of the state.
    """
    a_head = 4 * D_STATE * HEAD_DIM + 2 * TILE_LEN * HEAD_DIM
    return num_tokens * (num_heads * a_head + GROUPS * 2 * TILE_LEN * D_STATE)


def with_boundaries(batch: Batch, boundaries: tuple[int, ...], ssm_dtype: torch.dtype) -> Batch:
    """Return the same tokens with other boundaries, and a new pool for the states."""
    shape = (len(batch.lengths) * (1 + len(boundaries)), *batch.pool.shape[1:])
    device = str(batch.pool.device)
    pool = torch.empty(shape, dtype=ssm_dtype, device=device)
    return replace(batch, pool=pool, rows=_rows(batch.lengths, boundaries, device))


def _rows(lengths: tuple[int, ...], boundaries: tuple[int, ...], device: str) -> PrefillBatch:
    starts = [0, *accumulate(lengths)]
    plan = plan_chunks([0] * len(lengths), starts, CHUNK)
    chunk_slots = [PAD_SLOT] * len(plan.chunk_requests)
    at_boundaries = (
        start + boundary
        for start, length in zip(starts, lengths, strict=False)
        for boundary in boundaries
        if boundary <= length
    )
    for slot, packed_end in enumerate(at_boundaries, start=len(lengths)):
        chunk_slots[plan.chunk_at_end(packed_end)] = slot
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


def scan_launch(batch: Batch) -> Launch:
    """Return a launch of our scan, in the variant that the op chooses."""
    return lambda: ssd_scan(batch.tokens, batch.weights, batch.pool, batch.rows, CHUNK)


def form_launch(batch: Batch, tiling: HopperTiling | None) -> Launch:
    """Return a launch of our scan with one tiling."""
    shape = tile_shape(CHUNK, batch.tokens.x.dtype)
    assert shape is not None
    return lambda: scan_tiles(batch.tokens, batch.weights, batch.pool, batch.rows, shape, tiling)


def peer_launches(batch: Batch, chunk_sizes: Sequence[int] = PEER_CHUNKS) -> list[Launch]:
    """Return launches of mamba-ssm's scan of the same tokens by chunk size; empty if it is not installed."""
    scan = peer_function("ssd_combined", "mamba_chunk_scan_combined")
    if scan is None:
        return []
    num_rows = len(batch.lengths) if len(set(batch.lengths)) == 1 else 1
    x, dt, B, C = (
        t.unflatten(0, (num_rows, -1)) for t in (batch.tokens.x, batch.tokens.dt, batch.tokens.B, batch.tokens.C)
    )
    A = -torch.exp(batch.weights.A_log)
    seq_idx = None
    if num_rows == 1 and len(batch.lengths) > 1:
        lengths = torch.tensor(batch.lengths, device="cuda")
        seq_idx = torch.arange(len(batch.lengths), device="cuda", dtype=torch.int32).repeat_interleave(lengths)[None]

    def launch(chunk_size: int) -> Launch:
        return lambda: scan(
            x, dt, A, B, C, chunk_size, D=batch.weights.D, dt_bias=batch.weights.dt_bias, dt_softplus=True,
            seq_idx=seq_idx, return_final_states=True,
        )  # fmt: skip

    return [launch(chunk_size) for chunk_size in chunk_sizes]


def ns_per_token(batch: Batch, launch: Launch) -> float:
    """Return the time of a launch per token of the batch, in nanoseconds."""
    return launch_us([launch], GUESSED_NS * batch.num_tokens / 1000) * 1000 / batch.num_tokens


def measure(
    models: Iterable[str] = HEADS, cases: Iterable[str] = CASES, peer_chunks: Sequence[int] = PEER_CHUNKS
) -> Iterator[Figure]:
    """Yield the times of both scans in each case."""
    for model in models:
        for case in cases:
            batch = make_batch(HEADS[model], CASES[case])
            yield Figure(model, case, "ours", ns_per_token(batch, scan_launch(batch)))
            if case in SWEPT_CASES:
                yield Figure(model, case, "portable", ns_per_token(batch, form_launch(batch, None)))
            peers = [ns_per_token(batch, launch) for launch in peer_launches(batch, peer_chunks)]
            if peers:
                yield Figure(model, case, "mamba-ssm", min(peers))
            del batch
            torch.cuda.empty_cache()


def measure_boundaries(
    models: Iterable[str] = HEADS, counts: Iterable[int] = (1, 8), dtypes: Iterable[torch.dtype] = DTYPES
) -> Iterator[Figure]:
    """Yield the times of our scan of 4k prompts with and without boundary states; graphs are replayed in turn."""
    for model in models:
        for num_rows in counts:
            tokens = make_batch(HEADS[model], (4096,) * num_rows)
            for dtype in dtypes:
                batches = [with_boundaries(tokens, boundaries, dtype) for boundaries in BOUNDARIES.values()]
                expected_us = GUESSED_NS * tokens.num_tokens / 1000
                times = interleaved_us([[scan_launch(batch)] for batch in batches], expected_us, NUM_ROUNDS)
                case = f"{num_rows} x 4k, {str(dtype).removeprefix('torch.')} states"
                for name, us in zip(BOUNDARIES, times, strict=True):
                    yield Figure(model, case, name, us * 1000 / tokens.num_tokens)
                del batches
            torch.cuda.empty_cache()


def sweep() -> Iterator[Figure]:
    """Yield the times of every tiling of our scan."""
    for model, num_heads in HEADS.items():
        for case in SWEPT_CASES:
            batch = make_batch(num_heads, CASES[case])
            for tiling in TILINGS:
                name = f"{tiling.heads} x {tiling.channels}, {tiling.num_stages} stages" if tiling else "portable"
                yield Figure(model, case, name, ns_per_token(batch, form_launch(batch, tiling)))


def table(figures: list[Figure]) -> str:
    """Return a Markdown table with a line per model and case."""
    forms = list(dict.fromkeys(figure.form for figure in figures))
    found = {(figure.model, figure.case, figure.form): figure.ns for figure in figures}
    with_ratio = "mamba-ssm" in forms
    lines = [f"| model | case | {' | '.join(forms)} |{' mamba-ssm / ours |' if with_ratio else ''}"]
    lines.append("|---|---|" + "---:|" * (len(forms) + with_ratio))
    for model, case in dict.fromkeys((figure.model, figure.case) for figure in figures):
        values = [found.get((model, case, form)) for form in forms]
        cells = [f"{value:.1f}" if value is not None else "" for value in values]
        if with_ratio:
            cells.append(f"{found[model, case, 'mamba-ssm'] / found[model, case, 'ours']:.2f}")
        lines.append(f"| {model} | {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure the prefill scan.")
    parser.add_argument("--json", type=Path, help="also write the results to FILE")
    parser.add_argument("--sweep", action="store_true", help="measure every tiling of our scan instead")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    groups = [list(sweep())] if arguments.sweep else [list(measure()), list(measure_boundaries())]
    print("Nanoseconds a token and layer.\n")
    print("\n\n".join(table(figures) for figures in groups))
    if arguments.json:
        figures = [asdict(figure) for group in groups for figure in group]
        arguments.json.write_text(json.dumps({"machine": describe_machine(), "figures": figures}, indent=2))


if __name__ == "__main__":
    main()
