"""Products of a state's tile with the tokens' C, in slices of d_state: one is read while the one before is multiplied.

Called from inside the kernel of `state_replay_products`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .product_layouts import as_left, as_right, left_layout, right_layout
from .replay_fold_products import split_into_bf16


@gluon.constexpr_function
def slice_len(d_state: int) -> int:
    """Return how much of d_state a warp multiplies while it loads as much again."""
    return min(d_state, 32)


@gluon.jit
def prefetch_state(state, D_STATE: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Have a head's state on its way to the L2 cache: its slices are read one after another.

    Args:
        state: Where it begins, at a multiple of 16 bytes.
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
    states,
    queries,
    C_stride,
    count,
    INDEX: gl.constexpr,
    D_STATE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    OWN: gl.constexpr,
    WIDTH: gl.constexpr,
):
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
    state,
    keys,
    sums,
    states,
    queries,
    C_stride,
    count,
    FIRST: gl.constexpr,
    END: gl.constexpr,
    D_STATE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    OWN: gl.constexpr,
    WIDTH: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):
    """Add the products of slices to `sums`; return the slice after them, which is read meanwhile, and the sums.

    Args:
        state, keys: The slice FIRST.
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
