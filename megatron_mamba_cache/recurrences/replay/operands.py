"""Operands of bf16 mma instructions of one warp, in Gluon: layouts, exact splits of float32, and slices of a state.

Tiles are loaded in layouts that match the operands, so no data moves between lanes. This permutes the rows and columns
of the operands. In the formulas, an index is a tuple of bit fields, highest first, and a lane is (l, q), with three and
two bits:

    element k = (tile, g, q, e) of the inner dimension is d_state element or token (q, tile, g, e)
    row m = (tile, h, l) of the left operand is column (l, tile, h) of the head

Layouts are constructed during compilation, because compilation hooks cannot serialize them as kernel arguments.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


@gluon.constexpr_function
def _bits(first: int, count: int, dim: int) -> list[list[int]]:
    """Return the layout bases for `count` bits, from bit `first` on, of dimension `dim` (0 or 1)."""
    return [[1 << bit, 0] if dim == 0 else [0, 1 << bit] for bit in range(first, first + count)]


@gluon.constexpr_function
def left_layout(depth: int, width: int) -> gl.DistributedLinearLayout:
    """Return the layout for loading a left operand, [depth, width]; q is the two highest bits of depth."""
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
    """Return the layout for loading a right operand, [tokens, depth]; q is the two highest bits of depth."""
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
    """Return the layout for storing outputs [tokens, width], in which each lane has adjacent columns."""
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
    """Convert a tile [depth, width] to a left operand [width, depth]; no data moves between lanes."""
    DEPTH: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    tile = tile.reshape([4, DEPTH // 16, 2, 2, 8, WIDTH // 16, 2])  # [q, tile, g, e, l, tile, h]
    return gl.convert_layout(tile.permute((5, 6, 4, 1, 2, 0, 3)).reshape([WIDTH, DEPTH]), OPERAND)


@gluon.jit
def as_right(tile, OPERAND: gl.constexpr):
    """Convert a tile [tokens, depth] to a right operand [depth, tokens]; no data moves between lanes."""
    TOKENS: gl.constexpr = tile.shape[0]
    DEPTH: gl.constexpr = tile.shape[1]
    tile = tile.reshape([TOKENS, 4, DEPTH // 16, 2, 2])
    return gl.convert_layout(tile.permute((2, 3, 1, 4, 0)).reshape([DEPTH, TOKENS]), OPERAND)


@gluon.jit
def as_right_rows(tile, OPERAND: gl.constexpr):
    """Convert a tile [depth, columns] in `left_layout` to a right operand; no data moves between lanes.

    Column (tile, l) of the operand is column (l, tile) of the tile.
    """
    DEPTH: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    tile = tile.reshape([4, DEPTH // 16, 2, 2, 8, COLUMNS // 8])  # [q, tile, g, e, l, tile]
    return gl.convert_layout(tile.permute((1, 2, 0, 3, 5, 4)).reshape([DEPTH, COLUMNS]), OPERAND)


@gluon.jit
def from_sums(sums, TILE: gl.constexpr):
    """Convert accumulators [width, columns] of `as_left` and `as_right_rows` operands to a tile [columns, width]."""
    WIDTH: gl.constexpr = sums.shape[0]
    COLUMNS: gl.constexpr = sums.shape[1]
    sums = sums.reshape([WIDTH // 16, 2, 8, COLUMNS // 8, 8])  # [tile, h, l, tile of columns, column in the tile]
    return gl.convert_layout(sums.permute((4, 3, 2, 0, 1)).reshape([COLUMNS, WIDTH]), TILE)


@gluon.jit
def sync_lanes():
    """Synchronize the warp: lanes may then read what others wrote before, and overwrite what others read."""
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def split_into_bf16(values):
    """Return three bf16 tensors whose sum is the float32 tensor `values`, smallest first."""
    high = values.to(gl.bfloat16)
    rest = values - high.to(gl.float32)
    middle = rest.to(gl.bfloat16)
    return (rest - middle.to(gl.float32)).to(gl.bfloat16), middle, high


@gluon.constexpr_function
def slice_len(d_state: int) -> int:
    """Return the number of d_state elements per slice, of which a warp holds two at a time."""
    return min(d_state, 32)


@gluon.jit
def prefetch_state(state, D_STATE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Prefetch a head's state to the L2 cache as a whole, because its slices are loaded one at a time.

    The state must be aligned to 16 bytes.
    """
    BYTES: gl.constexpr = D_STATE * HEAD_DIM * state.dtype.element_ty.primitive_bitwidth // 8
    gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; "
        "@first cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [state, gl.full([], BYTES, gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_slice(
    states, queries, C_stride, count,
    INDEX: gl.constexpr, D_STATE: gl.constexpr, HEAD_DIM: gl.constexpr, OWN: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Load a slice of the state, [slice, width], and of C for the step's tokens, [tokens, slice]."""
    SLICE: gl.constexpr = slice_len(D_STATE)
    STATE: gl.constexpr = left_layout(SLICE, WIDTH)
    KEYS: gl.constexpr = right_layout(OWN, SLICE)
    t = gl.arange(0, OWN, layout=gl.SliceLayout(1, KEYS))
    keys = gl.load(
        queries + t[:, None] * C_stride + _elements(INDEX, D_STATE, gl.SliceLayout(0, KEYS))[None, :],
        mask=(t < count)[:, None],
        other=0.0,
    )
    n = _elements(INDEX, D_STATE, gl.SliceLayout(1, STATE))
    p = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, STATE))
    return gl.load(states + n[:, None] * HEAD_DIM + p[None, :]), keys


@gluon.jit
def multiply_slices(
    state, keys, sums, states, queries, C_stride, count,
    FIRST: gl.constexpr, END: gl.constexpr, D_STATE: gl.constexpr, HEAD_DIM: gl.constexpr, OWN: gl.constexpr,
    WIDTH: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """Add the products of the slices FIRST to END - 1 to `sums`, loading each slice one iteration ahead.

    Args:
        state, keys: Slice FIRST of the state and of C.

    Returns:
        The state and C of slice END, if it exists, and the sums.
    """
    SLICES: gl.constexpr = D_STATE // slice_len(D_STATE)
    for index in gl.static_range(FIRST, END):
        if index + 1 < SLICES:
            following = load_slice(states, queries, C_stride, count, index + 1, D_STATE, HEAD_DIM, OWN, WIDTH)
        sums = _multiply_left(state, as_right(keys, RIGHT), sums, LEFT)
        if index + 1 < SLICES:
            state, keys = following
    return state, keys, sums


@gluon.jit
def _elements(INDEX: gl.constexpr, D_STATE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the d_state indices of a slice: equally many from each quarter of d_state; each lane loads one quarter."""
    QUARTER: gl.constexpr = slice_len(D_STATE) // 4
    r = gl.arange(0, 4 * QUARTER, layout=LAYOUT)
    return r // QUARTER * (D_STATE // 4) + INDEX * QUARTER + r % QUARTER


@gluon.jit
def _multiply_left(left, right, sums, LEFT: gl.constexpr):
    """Add the product of a float32, fp16 or bf16 tile and a bf16 right operand to `sums`."""
    if left.dtype == gl.bfloat16:
        sums = mma_v2(as_left(left, LEFT), right, sums)
    elif left.dtype == gl.float16:
        high = left.to(gl.float32).to(gl.bfloat16)
        low = (left.to(gl.float32) - high.to(gl.float32)).to(gl.bfloat16)  # exact: fp16 numbers have 11 bits
        sums = mma_v2(as_left(low, LEFT), right, sums)
        sums = mma_v2(as_left(high, LEFT), right, sums)
    else:
        low, middle, high = split_into_bf16(left)
        sums = mma_v2(as_left(low, LEFT), right, sums)
        sums = mma_v2(as_left(middle, LEFT), right, sums)
        sums = mma_v2(as_left(high, LEFT), right, sums)
    return sums
