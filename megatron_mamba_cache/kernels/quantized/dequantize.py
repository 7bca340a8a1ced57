"""Dequantize a weight into bf16 or fp32, for products of many tokens.

Layout: rows of all matrices of a stack in one sequence. Grid: (tiles of rows, tiles of words); a program decodes each
code of its words, and multiplies in fp32. Graph safe: no host sync.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from .quantized_matrix import RUN, QuantizedMatrix

_ROWS, _WORDS = 8, 128
_KINDS = {torch.float32: "fp32", torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}


@triton.jit
def _decoded(codes, BITS: tl.constexpr):
    """Return the fp32 values of e4m3 or e2m1 codes; as fp16 numbers their bits mean 2^-8 or 2^-14 of them."""
    if BITS == 8:
        halves = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
        values = halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        halves = ((codes & 8) << 12) | ((codes & 7) << 9)
        values = halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return values


@triton.jit
def _scale_values(scales, KIND: tl.constexpr):
    """Return the fp32 values of stored scales."""
    if KIND == "e4m3":
        values = _decoded(scales.to(tl.int32), 8)
    elif KIND == "e8m0":
        values = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        values = scales
    return values


@triton.jit(do_not_specialize=["num_rows"])
def _dequantize_kernel(
    words,
    scales,
    factors,
    out,
    num_rows,
    LENGTH: tl.constexpr,
    MATRIX_ROWS: tl.constexpr,
    GRID_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    BITS: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    CODES: tl.constexpr = 16 // BITS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    is_here = (row < num_rows)[:, None] & (word < LENGTH)[None, :]
    grid_rows = (MATRIX_ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    block_row = row // MATRIX_ROWS * grid_rows + row % MATRIX_ROWS // BLOCK_ROWS
    found = tl.load(words + row[:, None] * LENGTH + word[None, :], mask=is_here, other=0).to(tl.int32)
    for number in tl.static_range(CODES):
        values = _decoded((found >> (number * BITS)) & ((1 << BITS) - 1), BITS)
        column = word // RUN * (CODES * RUN) + number * RUN + word % RUN
        if GRID_COLUMNS > 0:
            block = block_row[:, None] * GRID_COLUMNS + (column // BLOCK_COLUMNS)[None, :]
            values *= _scale_values(tl.load(scales + block, mask=is_here, other=0), KIND)
        if HAS_FACTORS:
            values *= tl.load(factors + row, mask=row < num_rows, other=0)[:, None]
        pointers = out + row[:, None] * (CODES * LENGTH) + column[None, :]
        tl.store(pointers, values.to(out.dtype.element_ty), mask=is_here)


def dequantize(weight: QuantizedMatrix, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the values of a weight or of a stack, rounded once to `dtype`.

    Raises:
        ValueError: If parts of the weight are not contiguous.

    Reference: `QuantizedMatrix.dequantized`. CUDA-graph safe: no host sync, one launch.
    """
    if not launches_kernel(weight.words) or dtype is torch.float64:
        return weight.dequantized(dtype)
    rows, columns = weight.shape[-2:]
    parts = [part for part in (weight.words, weight.scales, weight.factors) if part is not None]
    if not all(part.is_contiguous() for part in parts):
        raise ValueError(f"need contiguous codes, scales and factors of the weight {weight.shape}")
    out = torch.empty(weight.shape, dtype=dtype, device=weight.words.device)
    num_rows, length = out.numel() // columns, weight.words.shape[-1]
    if not num_rows:
        return out
    scales = weight.scales
    kind = "fp32" if scales is None else _KINDS[scales.dtype]
    _dequantize_kernel[(triton.cdiv(num_rows, _ROWS), triton.cdiv(length, _WORDS))](
        words=weight.words,
        scales=out if scales is None else scales if kind == "fp32" else scales.view(torch.uint8),
        factors=out if weight.factors is None else weight.factors,
        out=out,
        num_rows=num_rows,
        LENGTH=length,
        MATRIX_ROWS=rows,
        GRID_COLUMNS=0 if scales is None else scales.shape[-1],
        BLOCK_ROWS=weight.block_rows,
        BLOCK_COLUMNS=weight.block_columns,
        KIND=kind,
        HAS_FACTORS=weight.factors is not None,
        BITS=weight.code_bits,
        RUN=RUN,
        ROWS=_ROWS,
        WORDS=_WORDS,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out
