"""Layouts in which tiles are loaded as the operands of bf16 products of one warp, so that nothing moves between lanes.

An operand's places are numbered by bits. With q and l the lane's two lowest and three highest bits, k = (tile, g, q, e)
is d_state, or a token, number (q, tile, g, e), and m = (tile, h, l) is column (l, tile, h).

They are made while a kernel is compiled: as arguments, hooks on compilations could not write them down.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _bits(first: int, count: int, dim: int) -> list[list[int]]:
    """Return the bases of `count` bits of a dimension of two, from bit `first` on."""
    return [[1 << bit, 0] if dim == 0 else [0, 1 << bit] for bit in range(first, first + count)]


@gluon.constexpr_function
def left_layout(depth: int, width: int) -> gl.DistributedLinearLayout:
    """Return the layout of a left operand as it lies in memory, [depth, width]: q is the high bits of depth."""
    depth_bits, width_bits = depth.bit_length() - 3, width.bit_length() - 4
    return gl.DistributedLinearLayout(
        reg_bases=_bits(0, width_bits, 1) + _bits(0, depth_bits, 0),
        lane_bases=_bits(depth_bits, 2, 0) + _bits(width_bits, 3, 1),
        warp_bases=[],
        block_bases=[],
        shape=[depth, width],
    )


@gluon.constexpr_function
def right_layout(tokens: int, depth: int) -> gl.DistributedLinearLayout:
    """Return the layout of a right operand as it lies in memory, [tokens, depth]."""
    depth_bits, token_bits = depth.bit_length() - 3, tokens.bit_length() - 4
    return gl.DistributedLinearLayout(
        reg_bases=_bits(0, depth_bits, 1) + _bits(3, token_bits, 0),
        lane_bases=_bits(depth_bits, 2, 1) + _bits(0, 3, 0),
        warp_bases=[],
        block_bases=[],
        shape=[tokens, depth],
    )


@gluon.constexpr_function
def output_layout(tokens: int, width: int) -> gl.DistributedLinearLayout:
    """Return the layout of outputs [tokens, width] in which a lane stores neighbouring columns at once."""
    width_bits, token_bits = width.bit_length() - 4, tokens.bit_length() - 4
    return gl.DistributedLinearLayout(
        reg_bases=_bits(0, width_bits, 1) + _bits(0, 1, 0) + _bits(3, token_bits, 0),
        lane_bases=_bits(1, 2, 0) + _bits(width_bits, 3, 1),
        warp_bases=[],
        block_bases=[],
        shape=[tokens, width],
    )


@gluon.jit
def as_left(tile, OPERAND: gl.constexpr):
    """Return a tile [depth, width] as a left operand [width, depth]; no data moves."""
    DEPTH: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    tile = tile.reshape([4, DEPTH // 16, 2, 2, 8, WIDTH // 16, 2])  # q, tile, g, e, l, tile, h
    return gl.convert_layout(tile.permute((5, 6, 4, 1, 2, 0, 3)).reshape([WIDTH, DEPTH]), OPERAND)


@gluon.jit
def as_right(tile, OPERAND: gl.constexpr):
    """Return a tile [tokens, depth] as a right operand [depth, tokens]; no data moves."""
    TOKENS: gl.constexpr = tile.shape[0]
    DEPTH: gl.constexpr = tile.shape[1]
    tile = tile.reshape([TOKENS, 4, DEPTH // 16, 2, 2])
    return gl.convert_layout(tile.permute((2, 3, 1, 4, 0)).reshape([DEPTH, TOKENS]), OPERAND)


@gluon.jit
def as_right_rows(tile, OPERAND: gl.constexpr):
    """Return a tile [depth, columns], loaded in `left_layout`, as a right operand [depth, columns]; no data moves.

    With l a lane's three highest bits, column (l, tile) is number (tile, l).
    """
    DEPTH: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    tile = tile.reshape([4, DEPTH // 16, 2, 2, 8, COLUMNS // 8])  # q, tile, g, e, l, tile
    return gl.convert_layout(tile.permute((1, 2, 0, 3, 5, 4)).reshape([DEPTH, COLUMNS]), OPERAND)


@gluon.jit
def from_sums(sums, TILE: gl.constexpr):
    """Return the sums [width, columns] of `as_left` and `as_right_rows` as a tile [columns, width]; no data moves."""
    WIDTH: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1]
    sums = sums.reshape([WIDTH // 16, 2, 8, COLUMNS // 8, 8])  # tile, h, l, tile of columns, column of it
    return gl.convert_layout(sums.permute((4, 3, 2, 0, 1)).reshape([COLUMNS, WIDTH]), TILE)
