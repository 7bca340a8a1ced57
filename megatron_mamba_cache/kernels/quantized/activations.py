"""Quantize the activations of prompt tokens to FP8 (e4m3), in the order in which quantized weights have their columns.

A scale belongs to a group of columns of one token, to a whole token, or to all tokens. Grid: (tiles of tokens, groups).
A program reads its columns twice, for the scale and for the codes; the second time from a cache. Graph safe: no host
sync.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import INTERPRETED, launches_kernel
from .quantized_matrix import RUN, packed

_IS_INTERPRETED = tl.constexpr(INTERPRETED)
GREATEST_CODE = 448.0
SMALLEST_AMAX = 1e-10
"""Smaller greatest magnitudes count as this one, so that the scale of zeros is not zero."""
_ALIGNED_TOKENS = 4
"""Rows of codes are a multiple of it, so that columns of scales have 16-byte addresses."""


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """How the activations of a layer are quantized.

    Args:
        columns: Columns of a token that share a scale; None: all.
        scale: [1] float32, the scale of all tokens, from the file; None: scales follow from the greatest magnitudes.
    """

    columns: int | None = None
    scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class QuantizedActivations:
    """Quantized tokens; x = code * scale.

    Args:
        codes: [rows, columns] float8_e4m3fn, in the order of `packed`. The last rows are zero: padding.
        scales: [groups, rows] float32.
        columns: Columns of a group.
        num_tokens: Rows without padding.
    """

    codes: Tensor
    scales: Tensor
    columns: int
    num_tokens: int

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the tokens, with columns in the order of `codes`."""
        values = self.codes[: self.num_tokens].float().to(dtype)
        by_column = self.scales[:, : self.num_tokens].t().to(dtype).repeat_interleave(self.columns, dim=1)
        return values * by_column[:, : values.shape[1]]


@triton.jit
def _code_bits(values):
    """Return the codes of values up to 448 as integers; the interpreter's own conversion rounds ties otherwise."""
    bits = values.to(tl.int32, bitcast=True)
    normal = (((bits & 0x7FFFFFFF) + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = ((tl.abs(values) + 16384.0 - 16384.0) * 512.0).to(tl.int32)
    magnitude = tl.where(tl.abs(values) < 0.015625, subnormal, normal)
    return tl.where(values == values, magnitude | ((bits >> 24) & 0x80), 0x7F).to(tl.uint8)


@triton.jit
def _code(values, inverse, GREATEST: tl.constexpr):
    """Return the codes of values: rounded to nearest even, saturated; NaN stays NaN."""
    scaled = values * inverse[:, None]
    scaled = tl.where(scaled > GREATEST, GREATEST, tl.where(scaled < -GREATEST, -GREATEST, scaled))
    return _code_bits(scaled).to(tl.float8e4nv, bitcast=True) if _IS_INTERPRETED else scaled.to(tl.float8e4nv)


@triton.jit
def _target(positions, row, copy, num_tokens, num_rows, COPIES: tl.constexpr, HAS_POSITIONS: tl.constexpr):
    """Return the rows of the result to which tokens are written; -1 for none."""
    if HAS_POSITIONS:
        found = tl.load(positions + row * COPIES + copy, mask=row < num_tokens, other=-1)
    else:
        found = tl.where(row < num_rows, row, -1)
    return found


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _quantize_kernel(
    x,
    fixed_scale,
    positions,
    codes,
    scales,
    x_stride,
    num_tokens,
    num_rows,
    COPIES: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
    IS_FIXED: tl.constexpr,
    GREATEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Quantize SPAN columns of each token of a tile; they share a scale. Long because of its arguments."""
    HALF: tl.constexpr = WIDTH // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * SPAN
    pair = tl.arange(0, HALF)
    low = pair // RUN * (2 * RUN) + pair % RUN
    tokens = x + row.to(tl.int64)[:, None] * x_stride
    is_token = (row < num_tokens)[:, None]
    if IS_FIXED:
        scale = tl.zeros([ROWS], tl.float32) + tl.load(fixed_scale)
        inverse = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), scale)
    else:
        amax = tl.full([ROWS], SMALLEST, tl.float32)
        for begin in range(first, first + SPAN, WIDTH):
            column = begin + tl.arange(0, WIDTH)
            is_here = is_token & ((column < COLUMNS) & (column < first + SPAN))[None, :]
            values = tl.load(tokens + column[None, :], mask=is_here, other=0).to(tl.float32)
            amax = tl.maximum(amax, tl.max(tl.where(values == values, tl.abs(values), 0.0), axis=1))
        scale = tl.div_rn(amax, tl.full([ROWS], GREATEST, tl.float32))
        inverse = tl.div_rn(tl.full([ROWS], GREATEST, tl.float32), amax)
    for begin in range(first, first + SPAN, WIDTH):
        of_low = begin + low
        is_here = is_token & ((of_low < COLUMNS) & (of_low < first + SPAN))[None, :]
        lows = tl.load(tokens + of_low[None, :], mask=is_here, other=0).to(tl.float32)
        highs = tl.load(tokens + of_low[None, :] + RUN, mask=is_here, other=0).to(tl.float32)
        joined = tl.join(_code(lows, inverse, GREATEST), _code(highs, inverse, GREATEST))
        column = begin + tl.arange(0, WIDTH)
        is_column = ((column < COLUMNS) & (column < first + SPAN))[None, :]
        for copy in tl.static_range(COPIES):
            target = _target(positions, row, copy, num_tokens, num_rows, COPIES, HAS_POSITIONS)
            pointers = codes + target.to(tl.int64)[:, None] * COLUMNS + column[None, :]
            tl.store(pointers, tl.reshape(joined, [ROWS, WIDTH]), mask=(target >= 0)[:, None] & is_column)
    for copy in tl.static_range(COPIES):
        target = _target(positions, row, copy, num_tokens, num_rows, COPIES, HAS_POSITIONS)
        tl.store(scales + tl.program_id(1).to(tl.int64) * num_rows + target, scale, mask=target >= 0)


def quantize_activations(x: Tensor, scheme: ActivationScheme, positions: Tensor | None = None) -> QuantizedActivations:
    """Return tokens quantized by a scheme. Long because the kernel's arguments are named one by one.

    A scale is the greatest magnitude of its columns, NaN not counted, divided by 448. A code is its value divided by
    the scale, rounded to the nearest, to even codes if there are two, and at most 448; NaN stays NaN.

    Args:
        x: [tokens, columns]; columns contiguous, whole runs of codes.
        positions: [tokens, copies] int32: rows of the result that are a token, -1 for none. Other rows are undefined.
            None: the rows are the tokens.

    Raises:
        ValueError: If the columns are not whole runs of 32.

    Reference: `quantize_activations_ref`. CUDA-graph safe: no host sync, one launch.
    """
    num_tokens, columns = x.shape
    span = columns if scheme.columns is None else scheme.columns
    if columns % (2 * RUN) or span % (2 * RUN):
        raise ValueError(f"need columns and groups in runs of {2 * RUN}, found {columns} columns in groups of {span}")
    if not launches_kernel(x) or x.dtype is torch.float64 or not num_tokens:
        return quantize_activations_ref(x, scheme, positions)
    x = x if x.stride(1) == 1 else x.contiguous()
    num_copied = num_tokens if positions is None else positions.numel()
    num_rows = _padded(num_copied)
    codes = torch.empty(num_rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(triton.cdiv(columns, span), num_rows, dtype=torch.float32, device=x.device)
    rows, width = (1, 1024) if span > 512 else (16, triton.next_power_of_2(span))
    _quantize_kernel[(triton.cdiv(num_rows if positions is None else num_tokens, rows), len(scales))](
        x=x,
        fixed_scale=scales if scheme.scale is None else scheme.scale,
        positions=x if positions is None else positions,
        codes=codes,
        scales=scales,
        x_stride=x.stride(0),
        num_tokens=num_tokens,
        num_rows=num_rows,
        COPIES=1 if positions is None else positions.shape[1],
        HAS_POSITIONS=positions is not None,
        COLUMNS=columns,
        SPAN=span,
        IS_FIXED=scheme.scale is not None,
        GREATEST=GREATEST_CODE,
        SMALLEST=SMALLEST_AMAX,
        RUN=RUN,
        ROWS=rows,
        WIDTH=width,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return QuantizedActivations(codes, scales, span, num_copied)


def quantize_activations_ref(
    x: Tensor, scheme: ActivationScheme, positions: Tensor | None = None
) -> QuantizedActivations:
    """Torch twin of `quantize_activations`, to the bit."""
    if positions is not None:
        rows = x.new_zeros(positions.numel(), x.shape[1])
        is_row = positions.flatten() >= 0
        rows[positions.flatten()[is_row].long()] = x.repeat_interleave(positions.shape[1], dim=0)[is_row]
        x = rows
    num_tokens, columns = x.shape
    span = columns if scheme.columns is None else scheme.columns
    num_rows, num_groups = _padded(num_tokens), -(-columns // span)
    values = torch.zeros(num_rows, num_groups * span, device=x.device)
    values[:num_tokens, :columns] = x
    groups = values.view(num_rows, num_groups, span)
    if scheme.scale is None:
        amax = groups.abs().masked_fill(groups.isnan(), 0).amax(-1).clamp_min(SMALLEST_AMAX)
        greatest = torch.full_like(amax, GREATEST_CODE)  # on CUDA, torch multiplies by the reciprocal of a number
        scales, inverse = amax / greatest, greatest / amax
    else:
        scales = scheme.scale.expand(num_rows, num_groups)
        inverse = torch.ones_like(scales) / scales
    scaled = (groups * inverse.unsqueeze(-1)).clamp(-GREATEST_CODE, GREATEST_CODE).flatten(1)[:, :columns]
    octets = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = packed(octets, 8).view(torch.float8_e4m3fn)
    return QuantizedActivations(codes, scales.t().contiguous(), span, num_tokens)


def _padded(num_tokens: int) -> int:
    return -(-num_tokens // _ALIGNED_TOKENS) * _ALIGNED_TOKENS
