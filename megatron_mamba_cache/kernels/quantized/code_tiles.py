"""Tiles of FP8 codes that kernels dequantize in registers, and their products with tokens.

Layout: weights are the left operand, which has at least 64 rows on tensor cores, and tokens the right one. A code is
exact in bf16. So products are exact, and sums are in fp32; scales of blocks multiply the sum of a block's columns.
"""

import triton
import triton.language as tl

from ..kernel_launches import INTERPRETED
from .fp4_codes import decoded_quads, nvfp4_scales, of_words

_IS_INTERPRETED = tl.constexpr(INTERPRETED)

DECODE_PAIRS = tl.constexpr(
    """{
    .reg .b32 low, high, factor;
    prmt.b32 low, $2, 0, 0xA280; prmt.b32 high, $2, 0, 0xB391;
    shl.b32 low, low, 4; shl.b32 high, high, 4;
    and.b32 low, low, 0x87F087F0; and.b32 high, high, 0x87F087F0;
    mov.b32 factor, 0x7B807B80;
    mul.bf16x2 $0, low, factor; mul.bf16x2 $1, high, factor;
    }"""
)
"""PTX of `decoded_pairs` for two words at once.

Each code becomes the low byte of a half whose high byte repeats its sign. Then it is moved up by four bits, and all
but the sign and the code are cleared.
"""


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
        low, high = tl.inline_asm_elementwise(
            DECODE_PAIRS,
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
def load_words(words, row, begin, LENGTH: tl.constexpr, DEPTH: tl.constexpr, BOXES: tl.constexpr):
    """Load words [WIDTH, DEPTH] of rows from word `begin` on; for BOXES, of the row and those that follow it."""
    if BOXES:
        found = words.load([row, begin])
    else:
        word = begin + tl.arange(0, DEPTH)
        pointers = words + row.to(tl.int64)[:, None] * LENGTH + word[None, :]
        is_whole: tl.constexpr = LENGTH % DEPTH == 0
        found = tl.load(pointers) if is_whole else tl.load(pointers, mask=(word < LENGTH)[None, :], other=0)
    return found


@triton.jit
def prefetch_words(words, row, begin, LENGTH: tl.constexpr, LINES: tl.constexpr):
    """Begin to copy the first LINES times 128 bytes of rows, from word `begin` on, from memory to the L2 cache."""
    line = begin + tl.arange(0, LINES) * 64
    pointers = words + row.to(tl.int64)[:, None] * LENGTH + tl.minimum(line, LENGTH - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_inputs(inputs, is_token, word, element, LENGTH: tl.constexpr, DEPTH: tl.constexpr):
    """Load the inputs [DEPTH, TILE] for one code of each word; 0 for missing tokens.

    Loads of missing tokens are masked, not redirected: all programs would load from the same few cache lines.
    """
    if LENGTH % DEPTH == 0:
        found = tl.load(inputs, mask=is_token[None, :], other=0)
    else:
        found = tl.load(inputs, mask=(word + element < LENGTH)[:, None] & is_token[None, :], other=0)
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
    row,
    scaled_row,
    token,
    is_token,
    x_stride,
    begin,
    end,
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
    """Return the products [WIDTH, TILE] of the words from `begin` to `end`. Long because of its arguments.

    Args:
        row: [WIDTH] rows of weights; for BOXES, the first of consecutive ones.
        scaled_row: [WIDTH] the same, for scales; a scalar if all have the scales of one row.
        token, is_token: [TILE] rows of x, and whether each exists; results for missing ones are 0.
    """
    HAS_SCALES: tl.constexpr = GRID_COLUMNS > 0
    element = tl.arange(0, DEPTH)
    column = element // RUN * (2 * RUN) + element % RUN
    inputs = x + token.to(tl.int64)[None, :] * x_stride + column[:, None]
    total = tl.zeros([WIDTH, TILE], tl.float32)
    if HAS_SCALES:
        scale = block_scale(scales, scaled_row, begin, GRID_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS)
    for word in range(begin, end, DEPTH):
        low, high = decoded_pairs(load_words(words, row, word, LENGTH, DEPTH, BOXES))
        of_low = load_inputs(inputs + 2 * word, is_token, word, element, LENGTH, DEPTH)
        of_high = load_inputs(inputs + 2 * word + RUN, is_token, word, element, LENGTH, DEPTH)
        if HAS_SCALES:
            following = block_scale(scales, scaled_row, word + DEPTH, GRID_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS)
            products = multiply(low, of_low, tl.zeros([WIDTH, TILE], tl.float32))
            products = multiply(high, of_high, products)
            total += products * (scale[:, None] if scale.type.is_block() else scale)
            scale = following
        else:
            total = multiply(high, of_high, multiply(low, of_low, total))
    return total


@triton.jit
def sum_nvfp4_inputs(
    x,
    words,
    scales,
    row,
    token,
    is_token,
    x_stride,
    begin,
    end,
    LENGTH: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return the products [WIDTH, TILE] of the words from `begin` to `end`, NVFP4 weights without their factors.

    Args:
        scales: Pointers to int32, each the four scales of a run.
        row, token, is_token: As in `sum_inputs`.
    """
    RUNS: tl.constexpr = LENGTH // RUN
    element, run = tl.arange(0, DEPTH), tl.arange(0, DEPTH // RUN)
    column = element // RUN * (4 * RUN) + element % RUN
    inputs = x + token.to(tl.int64)[None, :] * x_stride + column[:, None]
    of_rows = scales + row.to(tl.int64)[:, None] * RUNS + run[None, :]
    total = tl.zeros([WIDTH, TILE], tl.float32)
    for word in range(begin, end, DEPTH):
        found = load_words(words, row, word, LENGTH, DEPTH, False)
        is_inside = word // RUN + run < RUNS
        fours = tl.load(of_rows + word // RUN, mask=is_inside[None, :], other=0)
        first, second, third, fourth = nvfp4_scales(fours)
        weights = decoded_quads(
            found, of_words(first, RUN), of_words(second, RUN), of_words(third, RUN), of_words(fourth, RUN)
        )
        for number in tl.static_range(4):
            given = load_inputs(inputs + 4 * word + number * RUN, is_token, word, element, LENGTH, DEPTH)
            total = multiply(weights[number], given, total)
    return total * 65536.0  # scales are times 2^110, and codes times 2^-126
