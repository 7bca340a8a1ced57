"""Products of FP8 codes with a vector on CUDA cores, for kernels that multiply a few tokens by their experts' weights.

Codes become fp32, which is exact, and so are the sums; scales multiply the sum of a block of columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import INTERPRETED
from ..quantized.code_tiles import decoded_pairs
from ..quantized.few_token_gemm import has_kernel
from ..quantized.quantized_matrix import RUN, QuantizedMatrix

_IS_INTERPRETED = tl.constexpr(INTERPRETED)
_ALIKE = tl.constexpr(1024)
"""Words from which on a tile of inputs, [PIECES, HALF], has the layout of threads that the words have."""
_MOST_COLUMNS = 2048
"""Of a piece."""


@triton.jit
def _decoded_values(words):
    """Return the values of the low and of the high e4m3 codes of words, in fp32; exact."""
    if _IS_INTERPRETED:
        low, high = decoded_pairs(words)
    else:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b16 word, other, low, high; .reg .b32 halves;
            mov.b32 {word, other}, $4;
            cvt.rn.f16x2.e4m3x2 halves, word; mov.b32 {low, high}, halves;
            cvt.f32.f16 $0, low; cvt.f32.f16 $2, high;
            cvt.rn.f16x2.e4m3x2 halves, other; mov.b32 {low, high}, halves;
            cvt.f32.f16 $1, low; cvt.f32.f16 $3, high;
            }""",
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=2,
        )
    return low, high


@triton.jit
def load_pieces(
    words, scales, origin, block, row, exists,
    LENGTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Load pieces of rows, of HALF words each, and their scales; 0 for pieces that do not exist.

    Args:
        origin: [PIECES] int64: where row 0 is among all rows of `words`.
        block: [PIECES] index of a piece in its row.
        row: [ROWS].
        exists: [PIECES].

    Returns:
        Words [PIECES, ROWS, HALF] and scales [PIECES, ROWS].
    """
    stacked = origin[:, None] + row[None, :]
    word = block[:, None] * HALF + tl.arange(0, HALF)[None, :]
    pointers = words + stacked[:, :, None] * LENGTH + word[:, None, :]
    loaded = tl.load(pointers, mask=(exists[:, None] & (word < LENGTH))[:, None, :], other=0)
    column = tl.minimum(block, COLUMNS - 1)  # a row may have one scale for all of its blocks
    scale = tl.load(scales + stacked // BLOCK_ROWS * COLUMNS + column[:, None], mask=exists[:, None], other=0)
    return loaded, scale


@triton.jit
def load_inputs(inputs, block, exists, ROWS: tl.constexpr, LENGTH: tl.constexpr, HALF: tl.constexpr, RUN: tl.constexpr):
    """Load what the low and the high codes of pieces are multiplied with, [PIECES, 1 or ROWS, HALF] float32.

    Args:
        inputs: [PIECES] pointers to the vectors of the pieces' rows.
    """
    word = block[:, None] * HALF + tl.arange(0, HALF)[None, :]
    inside = (exists[:, None] & (word < LENGTH))[:, None, :]
    pointers = (inputs[:, None] + word // RUN * (2 * RUN) + word % RUN)[:, None, :]
    if block.shape[0] * HALF < _ALIKE:  # a thread has words of one row only, and loads what these need
        pointers += tl.zeros([1, ROWS, 1], tl.int32)
        inside = inside & (tl.arange(0, ROWS) >= 0)[None, :, None]
    of_low = tl.load(pointers, mask=inside, other=0).to(tl.float32)
    of_high = tl.load(pointers + RUN, mask=inside, other=0).to(tl.float32)
    return of_low, of_high


@triton.jit
def sum_pieces(loaded, scale, of_low, of_high):
    """Return the sums [PIECES, ROWS] over the words of pieces, times their inputs and scales."""
    low, high = _decoded_values(loaded)
    return scale * tl.sum(low * of_low + high * of_high, axis=2)


def can_multiply_pairs(*weights: QuantizedMatrix) -> bool:
    """Return True if the kernels of this module read weights, which must be of one kind, as codes."""
    first = weights[0]
    return all(
        weight.code_bits == 8
        and has_kernel(weight)
        and (weight.scales is None) != (weight.factors is None)
        and _kind(weight) == _kind(first)
        and (weight.scales is None or weight.shape[-2] % weight.block_rows == 0)
        and weight.block_columns <= _MOST_COLUMNS
        and weight.block_columns & (weight.block_columns - 1) == 0
        for weight in weights
    )


def _kind(weight: QuantizedMatrix) -> tuple[object, ...]:
    return weight.scales is None, weight.block_rows, weight.block_columns


def check_rows(x: Tensor, weight: QuantizedMatrix, shared: QuantizedMatrix | None, fits: bool) -> None:
    """Raise `ValueError` unless the rows fit the weights and kernels can multiply them."""
    weights = (weight,) if shared is None else (weight, shared)
    if not fits or x.dtype is not torch.bfloat16 or not can_multiply_pairs(*weights):
        raise ValueError(
            f"need contiguous bf16 rows of {weight.shape[2]} inputs and FP8 experts of one kind in whole blocks, found "
            f"{tuple(x.shape)} {x.dtype} and experts {[matrix.shape for matrix in weights]}"
        )


def meaning_of(weight: QuantizedMatrix | None) -> Tensor | None:
    """Return the weight in float64, for references; None for None."""
    return None if weight is None else weight.dequantized(torch.float64)


def scales_of(weight: QuantizedMatrix) -> Tensor:
    """Return the scales of blocks, or the factors of rows."""
    found = weight.factors if weight.scales is None else weight.scales
    assert found is not None
    return found


def num_columns(weight: QuantizedMatrix) -> int:
    """Return the number of scales of a row."""
    return 1 if weight.scales is None else weight.scales.shape[-1]


def words_of_piece(weight: QuantizedMatrix) -> int:
    """Return how many words of a row have one scale, at most 64 if a row has one scale."""
    return 4 * RUN if weight.scales is None else weight.block_columns // 2
