"""Split bf16 tokens into two FP8 values each, so that FP8 tensor cores multiply them with nothing rounded.

A bf16 value has 8 significant bits and an e4m3 code has 4: x = (high + low / 16) * scale. A scale is a power of 2 and
belongs to a group of 128 inputs of a token. Values below 2^-13 of the greatest one in their group lose their last bits:
the error is at most 2^-21 of the greatest.

Grid: (tiles of tokens, tiles of groups). Graph safe: no host sync.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from ..overlap import await_inputs, overlapping
from .quantized_matrix import RUN, packed

GROUP = 128
"""Inputs that share a scale."""
LOW_SCALE = 1 / 16
"""Weight of a low value relative to a high one."""
_ROWS = 4
_GROUPS = 4
_MOST_PROGRAMS = 16
"""Of a tile of tokens: all programs start while the previous kernel runs, so that the next one can start too."""
_GREATEST_EXPONENT = 7
"""Scaled values are below 2^8, so that high and low values are below 448, the greatest code."""


@dataclass(frozen=True, slots=True)
class SplitTokens:
    """Tokens as pairs of FP8 values.

    Args:
        halves: [2 * rows, inputs] float8_e4m3fn: the high values of tokens, then the low ones, both padded to `rows`
            with undefined values. Inputs are in the order of `packed`.
        scales: [groups, rows] float32.
    """

    halves: Tensor
    scales: Tensor

    def joined(self, num_tokens: int) -> Tensor:
        """Return the tokens [num_tokens, inputs] in float64, with inputs in the order of `packed`."""
        high, low = (half[:num_tokens].float().double() for half in self.halves.chunk(2))
        scales = self.scales[:, :num_tokens].t().double().repeat_interleave(GROUP, dim=1)
        return (high + low * LOW_SCALE) * scales[:, : high.shape[1]]


@triton.jit
def _nearest_code(values):
    """Round values below 448 to those of e4m3 codes, ties to even; still in fp32."""
    bits = values.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    magnitude = tl.abs(values)
    subnormal = magnitude + 16384.0 - 16384.0  # leaves multiples of 2^-9
    subnormal = tl.where(values < 0, -subnormal, subnormal)
    return tl.where(magnitude < 0.015625, subnormal, normal)


@triton.jit
def _put(pointers, lows, highs, is_stored, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Store the codes of the first and the second inputs of words, as their bytes."""
    joined = tl.reshape(tl.join(lows.to(tl.float8e4nv), highs.to(tl.float8e4nv)), [ROWS, WIDTH])
    tl.store(pointers, joined, mask=is_stored)


@triton.jit(do_not_specialize=["num_tokens"])
def _split_kernel(
    x, halves, scales, x_stride, num_tokens,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    RUN: tl.constexpr, GREATEST_EXPONENT: tl.constexpr, LOW_SCALE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Split a tile of tokens, GROUPS groups at a time."""
    await_inputs(OVERLAPS)
    WIDTH: tl.constexpr = GROUPS * GROUP
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, WIDTH // 2)
    is_row = (row < num_tokens)[:, None]
    infinity = float("inf")  # stands for NaN too
    for tile in range(tl.program_id(1), (COLUMNS + WIDTH - 1) // WIDTH, tl.num_programs(1)):
        first = tile * WIDTH + word // RUN * (2 * RUN) + word % RUN
        is_here = is_row & (first < COLUMNS)[None, :]
        tokens = x + row.to(tl.int64)[:, None] * x_stride + first[None, :]
        lows = tl.load(tokens, mask=is_here, other=0).to(tl.float32)
        highs = tl.load(tokens + RUN, mask=is_here, other=0).to(tl.float32)
        greatest = tl.where((lows == lows) & (highs == highs), tl.maximum(tl.abs(lows), tl.abs(highs)), infinity)
        greatest = tl.max(tl.reshape(greatest, [ROWS, GROUPS, GROUP // 2]), axis=2)
        exponent = tl.maximum(greatest.to(tl.int32, bitcast=True) >> 23, GREATEST_EXPONENT + 1)  # with a bias of 127
        scale = ((exponent - GREATEST_EXPONENT) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(exponent == 255, infinity, scale)
        inverse = ((254 + GREATEST_EXPONENT - exponent) << 23).to(tl.float32, bitcast=True)
        inverse = tl.reshape(tl.broadcast_to(inverse[:, :, None], [ROWS, GROUPS, GROUP // 2]), [ROWS, WIDTH // 2])
        lows, highs = lows * inverse, highs * inverse
        first_lows, first_highs = _nearest_code(lows), _nearest_code(highs)
        column = tile * WIDTH + tl.arange(0, WIDTH)
        is_stored = is_row & (column < COLUMNS)[None, :]
        pointers = halves + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        _put(pointers, first_lows, first_highs, is_stored, ROWS, WIDTH)
        lows, highs = (lows - first_lows) * (1 / LOW_SCALE), (highs - first_highs) * (1 / LOW_SCALE)
        _put(pointers + PADDED * COLUMNS, _nearest_code(lows), _nearest_code(highs), is_stored, ROWS, WIDTH)
        group = tile * GROUPS + tl.arange(0, GROUPS)
        is_stored = is_row & (group * GROUP < COLUMNS)[None, :]
        tl.store(scales + group[None, :] * PADDED + row[:, None], scale, mask=is_stored)


def split_tokens(x: Tensor, rows: int) -> SplitTokens:
    """Return tokens [tokens, inputs] bf16 as pairs of FP8 values.

    A NaN or an infinite input makes all results of its token NaN or infinite, as in a sum.

    Args:
        x: Inputs are contiguous, and a multiple of 32.
        rows: To which the tokens are padded; at least their number.

    Raises:
        ValueError: If the inputs are no multiple of 32 or there are more tokens than rows.

    Reference: `split_tokens_ref`. CUDA-graph safe: no host sync, one launch.
    """
    num_tokens, columns = x.shape
    if columns % (2 * RUN) or num_tokens > rows or x.stride(1) != 1:
        raise ValueError(
            f"need at most {rows} tokens of contiguous inputs in runs of {2 * RUN}, found {tuple(x.shape)} with "
            f"strides {x.stride()}"
        )
    if not launches_kernel(x):
        return split_tokens_ref(x, rows)
    num_groups = triton.cdiv(columns, GROUP)
    halves = torch.empty(2 * rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_groups, rows, dtype=torch.float32, device=x.device)
    _split_kernel[(triton.cdiv(num_tokens, _ROWS), min(triton.cdiv(num_groups, _GROUPS), _MOST_PROGRAMS))](
        x=x,
        halves=halves,
        scales=scales,
        x_stride=x.stride(0),
        num_tokens=num_tokens,
        COLUMNS=columns,
        PADDED=rows,
        GROUP=GROUP,
        ROWS=_ROWS,
        GROUPS=_GROUPS,
        RUN=RUN,
        GREATEST_EXPONENT=_GREATEST_EXPONENT,
        LOW_SCALE=LOW_SCALE,
        num_warps=4,
        enable_fp_fusion=True,
        **overlapping(x.device),
    )
    return SplitTokens(halves, scales)


def split_tokens_ref(x: Tensor, rows: int) -> SplitTokens:
    """Torch twin of `split_tokens`, to the bit."""
    num_tokens, columns = x.shape
    num_groups = -(-columns // GROUP)
    values = torch.zeros(rows, num_groups * GROUP, device=x.device)
    values[:num_tokens, :columns] = x
    groups = values.view(rows, num_groups, GROUP)
    greatest = groups.abs().masked_fill(groups.isnan(), torch.inf).amax(-1)
    exponent = (greatest.view(torch.int32) >> 23).clamp_min(_GREATEST_EXPONENT + 1)
    scales = ((exponent - _GREATEST_EXPONENT) << 23).view(torch.float32).masked_fill(exponent == 255, torch.inf)
    inverse = ((254 + _GREATEST_EXPONENT - exponent) << 23).view(torch.float32)
    scaled = (groups * inverse.unsqueeze(-1)).flatten(1)[:, :columns].clamp(-448, 448)
    high = scaled.to(torch.float8_e4m3fn)
    low = ((scaled - high.float()) / LOW_SCALE).to(torch.float8_e4m3fn)
    codes = [packed(half.view(torch.uint8), 8).view(torch.float8_e4m3fn) for half in (high, low)]
    return SplitTokens(torch.cat(codes), scales.t().contiguous())
