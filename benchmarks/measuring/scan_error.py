"""Errors of our prefill scan and of mamba-ssm's, compared with the reference scan in float64 on the same tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from ssd_scan import CHUNK, Batch, make_batch, peer_launches
from torch import Tensor

from megatron_mamba_cache.recurrences.mamba2.inputs import SSMTokens
from megatron_mamba_cache.recurrences.mamba2.reference import ssd_scan_ref
from megatron_mamba_cache.recurrences.mamba2.scan import ssd_scan

NUM_HEADS, LENGTHS = 64, (4096,)


@dataclass(frozen=True, slots=True)
class ScanError:
    """Relative errors of the outputs and of the last state, in the Frobenius norm."""

    scan: str
    y: float
    state: float


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return the Frobenius norm of the difference, divided by the norm of the expected value."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def in_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return the same tokens in another dtype, with a new state pool for float64 or float32 results."""
    tokens = batch.tokens
    cast = SSMTokens(tokens.x.to(dtype), tokens.dt.to(dtype), tokens.B.to(dtype), tokens.C.to(dtype))
    pool = torch.zeros_like(batch.pool, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return replace(batch, tokens=cast, pool=pool)


def scan_errors(batch: Batch, peer_chunks: tuple[int, ...] = ()) -> Iterator[ScanError]:
    """Yield the errors of our scan for bf16 and fp32 tokens, and of mamba-ssm's scan for each chunk size."""
    exact = in_dtype(batch, torch.float64)
    y = ssd_scan_ref(exact.tokens, exact.weights, exact.pool, exact.rows, CHUNK)
    for name, dtype in (("ours, bf16 tokens", torch.bfloat16), ("ours, fp32 tokens", torch.float32)):
        ours = in_dtype(batch, dtype)
        ours_y = ssd_scan(ours.tokens, ours.weights, ours.pool, ours.rows, CHUNK)
        yield ScanError(name, relative_error(ours_y, y), relative_error(ours.pool, exact.pool))
    for chunk_size, launch in zip(peer_chunks, peer_launches(batch, peer_chunks), strict=False):
        peer_y, states = launch()  # [rows, length, heads, head_dim], [rows, heads, head_dim, d_state]
        error = relative_error(peer_y.flatten(0, 1), y)
        yield ScanError(f"mamba-ssm, chunks of {chunk_size}", error, relative_error(states.mT, exact.pool))


def measure_errors(peer_chunks: tuple[int, ...]) -> list[ScanError]:
    """Return the errors for one prompt of 4096 random tokens."""
    return list(scan_errors(make_batch(NUM_HEADS, LENGTHS), peer_chunks))


def table(errors: list[ScanError]) -> str:
    """Return the errors as a Markdown table."""
    lines = ["| scan | error of y | error of the last state |", "|---|---:|---:|"]
    return "\n".join([*lines, *(f"| {error.scan} | {error.y:.2e} | {error.state:.2e} |" for error in errors)])
