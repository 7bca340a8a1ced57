"""Dequantize a weight into bf16 or fp32, for products of many tokens.

Layout: rows of all matrices of a stack in one sequence. Grid: (tiles of rows, tiles of words); a program decodes each
code of its words, and multiplies in fp32. Graph safe: no host sync.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_language import appended
from ..kernel_launches import launches_kernel
from .fp4_codes import code_of_word, decoded_quads, nvfp4_scales, of_words
from .quantized_matrix import RUN, QuantizedMatrix

_ROWS, _WORDS = 16, 128
_STORED = {"fp32": torch.float32, "e4m3": torch.int32, "e8m0": torch.uint8}
"""Dtype of scales in the kernel, which loads four e4m3 scales as one integer."""
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
    return (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True) if KIND == "e8m0" else scales


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
    """Dequantize WORDS words of ROWS rows. Long because of its arguments."""
    CODES: tl.constexpr = 16 // BITS
    RUNS: tl.constexpr = WORDS // RUN
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    is_here = (row < num_rows)[:, None] & (word < LENGTH)[None, :]
    is_run = (row < num_rows)[:, None] & (run < LENGTH // RUN)[None, :]
    grid_rows = (MATRIX_ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    block_row = row // MATRIX_ROWS * grid_rows + row % MATRIX_ROWS // BLOCK_ROWS
    found = tl.load(words + row[:, None] * LENGTH + word[None, :], mask=is_here, other=0)
    factor = tl.load(factors + row, mask=row < num_rows, other=0)[:, None] if HAS_FACTORS else 1.0
    if KIND == "e4m3":  # NVFP4; a run has four scales
        fours = tl.load(scales + row[:, None] * (LENGTH // RUN) + run[None, :], mask=is_run, other=0)
        first, second, third, fourth = nvfp4_scales(fours)
        values = decoded_quads(
            found, of_words(first, RUN), of_words(second, RUN), of_words(third, RUN), of_words(fourth, RUN)
        )
        factor *= 65536.0  # scales are times 2^110, and codes times 2^-126
        by_column = tl.join(tl.join(values[0], values[2]), tl.join(values[1], values[3])).to(tl.float32)
    else:
        values = ()
        for number in tl.static_range(CODES):
            bits = found.to(tl.int32)
            code = code_of_word(bits, number) if BITS == 4 else (bits >> (8 * number)) & 255
            value = _decoded(code, BITS)
            if GRID_COLUMNS > 0:
                column = run * (CODES * RUN) + number * RUN
                block = block_row[:, None] * GRID_COLUMNS + (column // BLOCK_COLUMNS)[None, :]
                value *= of_words(_scale_values(tl.load(scales + block, mask=is_run, other=0), KIND), RUN)
            values = appended(values, value)
        if CODES == 2:
            by_column = tl.join(values[0], values[1])
        else:
            by_column = tl.join(tl.join(values[0], values[2]), tl.join(values[1], values[3]))
    by_column = (by_column.reshape([ROWS, WORDS * CODES]) * factor).to(out.dtype.element_ty)
    in_order = by_column.reshape([ROWS, RUNS, RUN, CODES]).permute([0, 1, 3, 2]).reshape([ROWS, WORDS * CODES])
    column = tl.program_id(1) * (WORDS * CODES) + tl.arange(0, WORDS * CODES)
    pointers = out + row[:, None] * (CODES * LENGTH) + column[None, :]
    tl.store(pointers, in_order, mask=(row < num_rows)[:, None] & (column < CODES * LENGTH)[None, :])


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
        scales=out if scales is None else scales.view(_STORED[kind]),
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
