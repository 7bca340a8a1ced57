"""Inverses of unit lower triangular matrices I + A of a tile, [64, 64], on Hopper GPUs.

First the 16 x 16 diagonal blocks are inverted by forward substitution in float32: each of 128 threads solves for one
column of one block. Then blocks are merged twice: if D has the inverses of the diagonal blocks, and M is -A below them,
within the next larger blocks, then the inverse of these blocks is D + D M D.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from ..request_tiles import TILE_LEN

BLOCK = gl.constexpr(16)
BLOCKS = gl.constexpr(TILE_LEN // 16)
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_LEN, 16]))  # of sums [tokens, tokens]
_LENGTH = gl.constexpr(TILE_LEN)


@gluon.jit
def _is_diagonal(LAYOUT: gl.constexpr):
    """Return 1 for the diagonal blocks of a matrix that is cut into [BLOCKS, BLOCK, BLOCKS, BLOCK], and 0 elsewhere.

    Products take fewer instructions than selections.
    """
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))
    row = gl.arange(0, BLOCKS, layout=ROW)[:, None, None, None]
    return gl.where(row == gl.arange(0, BLOCKS, layout=COLUMN)[None, None, :, None], 1.0, 0.0)


@gluon.jit
def put_blocks(matrix, blocks):
    """Store the diagonal blocks of a matrix [LENGTH, LENGTH] to shared memory [BLOCKS, BLOCK, BLOCK]."""
    cut = matrix.reshape([BLOCKS, BLOCK, BLOCKS, BLOCK])
    LAYOUT: gl.constexpr = cut.type.layout
    blocks.store(gl.sum(cut * _is_diagonal(LAYOUT), axis=2))


@gluon.jit
def invert_blocks(blocks):
    """Replace eight blocks M [8, row, column] by the inverses of I - M, as [8, column, row]: forward substitution."""
    COLUMNS: gl.constexpr = gl.BlockedLayout([1, 1, 16], [2, 16, 1], [4, 1, 1], [2, 1, 0])
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(2, COLUMNS)))[None, :, None]
    row = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, COLUMNS)))[None, None, :]
    solved = gl.zeros([2 * BLOCKS, BLOCK, BLOCK], gl.float32, layout=COLUMNS)
    for step in gl.static_range(BLOCK):
        coefficients = blocks.slice(step, 1, 1).load(COLUMNS)
        known = gl.sum(coefficients * solved, axis=2)[:, :, None]
        solved = gl.where(row == step, gl.where(column == step, 1.0, 0.0) + known, solved)
    blocks.store(solved)


@gluon.jit
def block_diagonal(inverses, LAYOUT: gl.constexpr):
    """Return the block-diagonal matrix [LENGTH, LENGTH] of inverses [BLOCKS, column, row] in shared memory."""
    blocks = inverses.permute((0, 2, 1)).load(gl.SliceLayout(2, LAYOUT))
    cut = blocks[:, :, None, :] * _is_diagonal(LAYOUT)
    return gl.convert_layout(cut.reshape([_LENGTH, _LENGTH]), SQUARE)


@gluon.jit
def merged(inverse, minus_A, copy, is_below):
    """Return D + D M D for a block-diagonal D [LENGTH, LENGTH]; `copy` receives D.

    Args:
        minus_A: All of -A, in shared memory.
        is_below: 1 for the entries of M (below the blocks of D, within the next larger blocks), 0 elsewhere.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SQUARE, 2)
    in_fp16 = inverse.to(gl.float16)
    copy.store(in_fp16)
    fence_async_shared()
    zeros = gl.zeros([_LENGTH, _LENGTH], gl.float32, layout=SQUARE)
    left = warpgroup_mma(gl.convert_layout(in_fp16, OPERAND), minus_A, zeros, use_acc=False)
    left = (left * is_below).to(gl.float16)  # D M; other entries are products with other parts of A
    return warpgroup_mma(gl.convert_layout(left, OPERAND), copy, inverse)
