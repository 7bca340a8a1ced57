"""Operands of bf16 mma of one warp: layouts, exact splits of float32, and slices of a state; Gluon.

Tiles are loaded in the layouts of the operands, so that nothing moves between lanes. An operand's elements are numbered
by bits. With q and l the lane's two lowest and three highest bits, k = (tile, g, q, e) is d_state, or a token, number
(q, tile, g, e), and m = (tile, h, l) is column (l, tile, h).

Layouts are made at compile time: compilation hooks could not serialize them as arguments.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


@gluon.constexpr_function
def _bits(first: int, count: int, dim: int) -> list[list[int]]:
    """Return the bases of `count` bits of a dimension of two, from bit `first` on."""
    return [[1 << bit, 0] if dim == 0 else [0, 1 << bit] for bit in range(first, first + count)]


@gluon.constexpr_function
def left_layout(depth: int, width: int) -> gl.DistributedLinearLayout:
    """Return the layout of a left operand in memory, [depth, width]: q is the high bits of depth."""
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
    """Return the layout of a right operand in memory, [tokens, depth]."""
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
    """Return a tile [depth, columns], loaded in `left_layout`, as a right operand; no data moves.

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


@gluon.jit
def sync_lanes():
    """Wait for all lanes of the warp, so that each may read what others wrote, and overwrite what they read."""
    gl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def split_into_bf16(values):
    """Return three bf16 tensors that add up to float32 `values`, smallest first."""
    high = values.to(gl.bfloat16)
    rest = values - high.to(gl.float32)
    middle = rest.to(gl.bfloat16)
    return (rest - middle.to(gl.float32)).to(gl.bfloat16), middle, high


@gluon.constexpr_function
def slice_len(d_state: int) -> int:
    """Return the d_state slice that a warp double-buffers."""
    return min(d_state, 32)


@gluon.jit
def prefetch_state(state, D_STATE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Prefetch a head's state, aligned to 16 bytes, to the L2 cache, because its slices are read one by one."""
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
    """Return a slice of d_state: of the state, [slice, width], and of the tokens' C, [tokens, slice]."""
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
    """Add the products of slices from FIRST (`state`, `keys`) on to `sums`; return the slice at END, and the sums."""
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
    """Return which elements of d_state a slice has: as many of each quarter, which are a lane's."""
    QUARTER: gl.constexpr = slice_len(D_STATE) // 4
    r = gl.arange(0, 4 * QUARTER, layout=LAYOUT)
    return r // QUARTER * (D_STATE // 4) + INDEX * QUARTER + r % QUARTER


@gluon.jit
def _multiply_left(left, right, sums, LEFT: gl.constexpr):
    """Add the product of a tile and a right operand of bf16 to `sums`."""
    if left.dtype == gl.bfloat16:
        sums = mma_v2(as_left(left, LEFT), right, sums)
    else:
        low, middle, high = split_into_bf16(left)
        sums = mma_v2(as_left(low, LEFT), right, sums)
        sums = mma_v2(as_left(middle, LEFT), right, sums)
        sums = mma_v2(as_left(high, LEFT), right, sums)
    return sums
