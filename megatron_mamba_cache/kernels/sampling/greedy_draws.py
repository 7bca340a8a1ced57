"""Greedy sampling: find the most probable token in each row of logits.

The first launch finds the largest logit of each vocabulary tile, the second that of each row. Layout: logits row-major,
vocabulary contiguous. Reading the logits once dominates the run time. Safe in CUDA graphs: no host sync, and the grids
depend only on the shape of the logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import is_computed_in_fp32, launches_kernel
from ..overlap import await_inputs, overlapping
from .row_tiles import LARGEST, TILE, load_logits

_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _first_largest(found, token):
    """Return the largest logit and the lowest token id that has it."""
    largest = tl.max(found, axis=0)
    return largest, tl.min(tl.where(found == largest, token, _NO_TOKEN), axis=0)


@triton.jit
def _best_of_tiles_kernel(
    logits, stride, peaks, ids, num_tiles, vocab_size, TILE: tl.constexpr, OVERLAPS: tl.constexpr
):
    await_inputs(OVERLAPS)
    row, tile = tl.program_id(0), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    peak, first = _first_largest(load_logits(logits, row, stride, token, vocab_size), token)
    tl.store(peaks + row * num_tiles + tile, peak)
    tl.store(ids + row * num_tiles + tile, first)


@triton.jit
def _best_of_row_kernel(peaks, ids, tokens, num_tiles, TILES: tl.constexpr, OVERLAPS: tl.constexpr):
    await_inputs(OVERLAPS)
    row, tile = tl.program_id(0), tl.arange(0, TILES)
    at, is_tile = row * num_tiles + tile, tile < num_tiles
    peak = tl.load(peaks + at, mask=is_tile, other=float("-inf"))
    _, first = _first_largest(peak, tl.load(ids + at, mask=is_tile, other=_NO_TOKEN))
    tl.store(tokens + row, first.to(tl.int64))


def greedy_tokens(logits: Tensor) -> Tensor:
    """Return the most probable token in each row of `logits` [rows, vocab] as [rows] int64; the lowest id wins ties.

    NaN is less probable than any number. Reference: `greedy_tokens_ref`. CUDA-graph safe: no host sync, two launches.
    """
    if not launches_kernel(logits) or not is_computed_in_fp32(logits) or logits.stride(1) != 1:
        return greedy_tokens_ref(logits)
    if not len(logits):
        return logits.new_empty(0, dtype=torch.int64)
    return best_of_rows(*best_of_tiles(logits))


def best_of_tiles(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each tile and the lowest token id that has it, [rows, tiles] each."""
    (num_rows, vocab_size), num_tiles = logits.shape, triton.cdiv(logits.shape[1], TILE)
    peaks, ids = (logits.new_empty(num_rows, num_tiles, dtype=dtype) for dtype in (torch.float32, torch.int32))
    _best_of_tiles_kernel[(num_rows, num_tiles)](
        logits=logits,
        stride=logits.stride(0),
        peaks=peaks,
        ids=ids,
        num_tiles=num_tiles,
        vocab_size=vocab_size,
        TILE=TILE,
        num_warps=4,
        enable_fp_fusion=True,
        **overlapping(logits.device),
    )
    return peaks, ids


def best_of_rows(peaks: Tensor, ids: Tensor) -> Tensor:
    """Return the lowest of each row's `ids` among the tiles with the largest peak, [rows] int64."""
    num_rows, num_tiles = peaks.shape
    tokens = ids.new_empty(num_rows, dtype=torch.int64)
    _best_of_row_kernel[(num_rows,)](
        peaks=peaks,
        ids=ids,
        tokens=tokens,
        num_tiles=num_tiles,
        TILES=triton.next_power_of_2(num_tiles),
        num_warps=1,
        enable_fp_fusion=True,
        **overlapping(peaks.device),
    )
    return tokens


def greedy_tokens_ref(logits: Tensor) -> Tensor:
    """Torch reference for `greedy_tokens`."""
    found, largest = (logits.float(), LARGEST) if is_computed_in_fp32(logits) else (logits, None)
    return found.nan_to_num(nan=float("-inf"), posinf=largest, neginf=float("-inf")).argmax(dim=-1)
