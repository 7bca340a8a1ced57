"""Tiles of FP8 codes that kernels dequantize in registers, and their products with tokens.

Layout: weights are the left operand, which has at least 64 rows on tensor cores, and tokens the right one. A code is
exact in bf16. So products are exact, and sums are in fp32; scales of blocks multiply the sum of a block's columns.
"""

import triton
import triton.language as tl

from ..kernel_launches import INTERPRETED

_IS_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def decoded_pairs(words):
    """Return the values of the low and of the high e4m3 codes of words, in bf16; exact. NaN is decoded as 480.

    The bits of a code, moved to those of a bf16 number, mean 2^-120 of its value.
    """
    if _IS_INTERPRETED:
        bits = words.to(tl.int32)
        low = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
        high = (((bits & 0x8000) << 16) | ((bits & 0x7F00) << 12)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        # Two words at once: each code becomes the low byte of a half whose high byte repeats its sign; then it is
        # moved up by four bits, and all but the sign and the code are cleared.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, factor;
            prmt.b32 low, $2, 0, 0xA280; prmt.b32 high, $2, 0, 0xB391;
            shl.b32 low, low, 4; shl.b32 high, high, 4;
            and.b32 low, low, 0x87F087F0; and.b32 high, high, 0x87F087F0;
            mov.b32 factor, 0x7B807B80;
            mul.bf16x2 $0, low, factor; mul.bf16x2 $1, high, factor;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return low, high


@triton.jit
def multiply(weights, given, total):
    """Return total + weights @ given; see `grouped_gemm` for why the interpreter gets sums."""
    if _IS_INTERPRETED:
        found = total + tl.sum(weights.to(tl.float32).T[:, :, None] * given.to(tl.float32)[:, None, :], axis=0)
    else:
        found = tl.dot(weights, given, total)
    return found


@triton.jit
def load_words(
    words,
    first,
    begin,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    BOXES: tl.constexpr,
):
    """Load words [WIDTH, DEPTH] from row `first` and word `begin` on; after the last row, others'."""
    if BOXES:
        found = words.load([first, begin])
    else:
        row, word = first + tl.arange(0, WIDTH), begin + tl.arange(0, DEPTH)
        pointers = words + tl.minimum(row, ROWS - 1).to(tl.int64)[:, None] * LENGTH + word[None, :]
        is_whole: tl.constexpr = LENGTH % DEPTH == 0
        found = tl.load(pointers) if is_whole else tl.load(pointers, mask=(word < LENGTH)[None, :], other=0)
    return found


@triton.jit
def load_inputs(inputs, begin, element, LENGTH: tl.constexpr, DEPTH: tl.constexpr):
    """Load the inputs [DEPTH, TILE] of the low, or of the high, codes of words."""
    if LENGTH % DEPTH == 0:
        found = tl.load(inputs + 2 * begin)
    else:
        found = tl.load(inputs + 2 * begin, mask=(begin + element < LENGTH)[:, None], other=0)
    return found


@triton.jit
def block_scale(scales, row, word, GRID_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Return the scales of rows in the block of columns of a word."""
    return tl.load(scales + row // BLOCK_ROWS * GRID_COLUMNS + tl.minimum(2 * word // BLOCK_COLUMNS, GRID_COLUMNS - 1))


@triton.jit
def sum_inputs(
    x,
    words,
    scales,
    first,
    token,
    x_stride,
    begin,
    end,
    ROWS: tl.constexpr,
    LENGTH: tl.constexpr,
    GRID_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    BOXES: tl.constexpr,
):
    """Return the products [WIDTH, TILE] of the words from `begin` to `end`. Long because of its arguments."""
    HAS_SCALES: tl.constexpr = GRID_COLUMNS > 0
    IS_UNIFORM: tl.constexpr = BLOCK_ROWS % WIDTH == 0  # all rows of a tile have one scale
    element = tl.arange(0, DEPTH)
    row = first if IS_UNIFORM else tl.minimum(first + tl.arange(0, WIDTH), ROWS - 1)
    column = element // RUN * (2 * RUN) + element % RUN
    inputs = x + token.to(tl.int64)[None, :] * x_stride + column[:, None]
    total = tl.zeros([WIDTH, TILE], tl.float32)
    if HAS_SCALES:
        scale = block_scale(scales, row, begin, GRID_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS)
    for word in range(begin, end, DEPTH):
        low, high = decoded_pairs(load_words(words, first, word, ROWS, LENGTH, WIDTH, DEPTH, BOXES))
        of_low = load_inputs(inputs, word, element, LENGTH, DEPTH)
        of_high = load_inputs(inputs + RUN, word, element, LENGTH, DEPTH)
        if HAS_SCALES:
            following = block_scale(scales, row, word + DEPTH, GRID_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS)
            products = multiply(low, of_low, tl.zeros([WIDTH, TILE], tl.float32))
            products = multiply(high, of_high, products)
            total += products * (scale if IS_UNIFORM else scale[:, None])
            scale = following
        else:
            total = multiply(high, of_high, multiply(low, of_low, total))
    return total
