"""Quantized weights as kernels read them, and what they mean: W = code * scale * factor.

Five forms have one layout. Rows are outputs, columns are inputs:

| form | codes | scales | factors |
|---|---|---|---|
| FP8, a scale per tensor or row | e4m3 | none | fp32 |
| FP8 in blocks | e4m3 | fp32 [row blocks, column blocks] | none |
| MXFP8 | e4m3 | E8M0 [rows, inputs / 32] | none |
| NVFP4 | e2m1 | e4m3 [rows, inputs / 16] | fp32 |
| MXFP4 | e2m1 | E8M0 [rows, inputs / 32] | none |

A factor belongs to one row, so parts of a fused matrix may have different ones.

Codes are packed into words of 16 bits: two of e4m3, the first one in the lowest bits, or four of e2m1. A run of RUN
words has two or four times RUN columns: word i has columns i, RUN + i, ... of them. So the same bits of consecutive
words are consecutive columns, and a tile of words is as many operands of tensor cores as a word has codes.

The bits of an e2m1 code, its sign and the three of its magnitude, highest first, are bits of a word:

| code | sign | magnitude |
|---|---|---|
| 0 | 15 | 8, 7, 6: those of a bf16 number that is 2^-126 of the code's value |
| 1 | 5 | 14, 13, 12: the same once the bytes are swapped and moved by 2 bits |
| 2 | 2 | 11, 10, 9: the same with 5 bits |
| 3 | 1 | 0, 4, 3: the same after a multiplication, whose copies of the four bits do not meet |
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

RUN = 16
"""Words of a run."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_DTYPES = (torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A quantized weight, or a stack of one per expert.

    Args:
        words: [..., rows, columns / codes of a word] int16.
        code_bits: 8 for e4m3 codes, 4 for e2m1.
        scales: [..., row blocks, column blocks] float32, float8_e4m3fn or float8_e8m0fnu; None for none.
        factors: [..., rows] float32; None for none.
        block_rows, block_columns: Size of the blocks that share a scale; the last ones may be smaller.

    Raises:
        ValueError: If shapes or dtypes disagree.
    """

    words: Tensor
    code_bits: int
    scales: Tensor | None = None
    factors: Tensor | None = None
    block_rows: int = 1
    block_columns: int = 1

    def __post_init__(self) -> None:
        if self.words.dtype is not torch.int16 or self.code_bits not in (4, 8) or self.words.shape[-1] % RUN:
            raise ValueError(
                f"need int16 words of 4-bit or 8-bit codes in runs of {RUN}, found {tuple(self.words.shape)} "
                f"{self.words.dtype} of {self.code_bits}-bit codes"
            )
        *leading, rows, columns = self.shape
        grid = (*leading, -(-rows // self.block_rows), -(-columns // self.block_columns))
        if self.scales is not None and (self.scales.shape != grid or self.scales.dtype not in _SCALE_DTYPES):
            raise ValueError(
                f"need scales {grid} for blocks of {self.block_rows} x {self.block_columns}, found "
                f"{tuple(self.scales.shape)} {self.scales.dtype}"
            )
        if self.factors is not None and self.factors.shape != (*leading, rows):
            raise ValueError(f"need factors {(*leading, rows)}, found {tuple(self.factors.shape)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        *leading, words = self.words.shape
        return (*leading, words * 16 // self.code_bits)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and factors."""
        return sum(part.nbytes for part in (self.words, self.scales, self.factors) if part is not None)

    def __getitem__(self, index: int | slice) -> "QuantizedMatrix":
        """Return the matrix or matrices of a stack at an index."""
        scales = None if self.scales is None else self.scales[index]
        factors = None if self.factors is None else self.factors[index]
        return QuantizedMatrix(self.words[index], self.code_bits, scales, factors, self.block_rows, self.block_columns)

    def row_slab(self, first: int, last: int) -> "QuantizedMatrix":
        """Return the rows of one matrix from `first`, where a block begins, up to `last`."""
        blocks = slice(first // self.block_rows, -(-last // self.block_rows))
        scales = None if self.scales is None else self.scales[blocks]
        factors = None if self.factors is None else self.factors[first:last]
        words = self.words[first:last]
        return QuantizedMatrix(words, self.code_bits, scales, factors, self.block_rows, self.block_columns)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, computed in float32, or float64 for that dtype, and rounded once."""
        computed = torch.float64 if dtype is torch.float64 else torch.float32
        found = decoded(unpacked(self.words, self.code_bits), self.code_bits).to(computed)
        if self.scales is not None:
            rows, columns = found.shape[-2:]
            blocks = self.scales.float().to(computed)  # torch has no conversion of E8M0 to float64
            by_row = blocks.repeat_interleave(self.block_rows, dim=-2)[..., :rows, :]
            found = found * by_row.repeat_interleave(self.block_columns, dim=-1)[..., :columns]
        if self.factors is not None:
            found = found * self.factors.to(computed).unsqueeze(-1)
        return found.to(dtype)


@dataclass(frozen=True, slots=True)
class QuantizedForm:
    """Description of what a quantized weight consists of, by the arguments of `QuantizedMatrix`.

    Args:
        scale_dtype: None: no scales.
    """

    code_bits: int
    scale_dtype: torch.dtype | None = None
    has_factors: bool = False
    block_rows: int = 1
    block_columns: int = 1

    def empty(self, shape: tuple[int, ...], device: torch.device) -> QuantizedMatrix:
        """Return a weight of this form with undefined values."""
        *leading, rows, columns = shape
        grid = (*leading, -(-rows // self.block_rows), -(-columns // self.block_columns))
        scales = None if self.scale_dtype is None else torch.empty(grid, dtype=self.scale_dtype, device=device)
        factors = torch.empty((*leading, rows), device=device) if self.has_factors else None
        words = torch.empty((*leading, rows, columns * self.code_bits // 16), dtype=torch.int16, device=device)
        return QuantizedMatrix(words, self.code_bits, scales, factors, self.block_rows, self.block_columns)


def packed(codes: Tensor, code_bits: int) -> Tensor:
    """Return the words of codes.

    Args:
        codes: [..., columns] uint8, one code each.

    Raises:
        ValueError: If the columns are not whole runs.
    """
    per_word = 16 // code_bits
    if codes.shape[-1] % (per_word * RUN):
        raise ValueError(f"{code_bits}-bit codes need a multiple of {per_word * RUN} columns, found {codes.shape[-1]}")
    runs = codes.unflatten(-1, (-1, per_word, RUN))
    if code_bits == 8:
        return runs.movedim(-1, -2).flatten(-3).view(torch.int16)
    zero, one, two, three = runs.int().unbind(-2)
    halves = (zero & 8) << 12 | (zero & 7) << 6, (one & 8) << 2 | (one & 7) << 12, (two & 8) >> 1 | (two & 7) << 9
    last = (three & 8) >> 2 | (three & 4) >> 2 | (three & 3) << 3
    return (halves[0] | halves[1] | halves[2] | last).to(torch.int16).flatten(-2)


def unpacked(words: Tensor, code_bits: int) -> Tensor:
    """Return the codes [..., columns] uint8 of words, one a byte."""
    if code_bits == 8:
        return words.contiguous().view(torch.uint8).unflatten(-1, (-1, RUN, 2)).movedim(-1, -2).flatten(-3)
    bits = words.unflatten(-1, (-1, RUN)).int()
    zero, one = bits >> 12 & 8 | bits >> 6 & 7, bits >> 2 & 8 | bits >> 12 & 7
    two, three = bits << 1 & 8 | bits >> 9 & 7, bits << 2 & 12 | bits >> 3 & 3
    return torch.stack((zero, one, two, three), dim=-2).to(torch.uint8).flatten(-3)


def codes_of_pairs(pairs: Tensor) -> Tensor:
    """Return the e2m1 codes [..., 2 * n] of bytes [..., n], as checkpoints have them: the low four bits first."""
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def decoded(codes: Tensor, code_bits: int) -> Tensor:
    """Return the values of codes, one a byte, in float32."""
    return codes.view(torch.float8_e4m3fn).float() if code_bits == 8 else _e2m1(codes.device)[codes.long()]


@cache
def _e2m1(device: torch.device) -> Tensor:
    """Return the values of the 16 codes."""
    return torch.tensor((*_MAGNITUDES, *(-value for value in _MAGNITUDES)), device=device)
