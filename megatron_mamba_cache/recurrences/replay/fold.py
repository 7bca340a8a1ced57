"""Fold ring entries into a state, in Triton, for every shape and device.

Each entry advances the state by one token: S = exp(decay) * S + B (factor * x). All kernels that fold in this way
compute bit-identical states, because the arithmetic for an element does not depend on the tile.
"""

import triton
import triton.language as tl

from ...kernels.kernel_language import only_if
from ..stochastic_rounding import cast_state


@triton.jit
def _load_entry(
    x, b, steps, ring, position, end, has_n, has_p,
    HEADS: tl.constexpr, CAPACITY: tl.constexpr, X_CAPACITY: tl.constexpr,
):  # fmt: skip
    """Load the ring entry of one head at `position`: x, B, factor and decay; zeros from position `end` on."""
    exists = position < end
    index = position % CAPACITY
    values = tl.load(x + position % X_CAPACITY * ring.x_stride, mask=only_if(exists, has_p), other=0.0)
    keys = tl.load(b + index * ring.B_stride, mask=only_if(exists, has_n), other=0.0)
    factor = tl.load(steps + index * ring.steps_stride, mask=exists, other=0.0)
    decay = tl.load(steps + index * ring.steps_stride + HEADS, mask=exists, other=0.0)
    return values, keys, factor, decay


@triton.jit
def fold_entries(
    state, pool, seed, row, column, x, b, steps, ring, position, end, has_n, has_p,
    HEADS: tl.constexpr, CAPACITY: tl.constexpr, X_CAPACITY: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Fold the ring entries from `position` to `end` - 1 into the float32 `state` [d_state, width], and return it.

    `state` is cast to the pool's dtype at every multiple of RING, and nowhere else.

    Args:
        seed, row, column: As in `cast_state`.
        x, b, steps: Pointers to the head's inputs at index 0 of the ring.
        has_n, has_p: Masks of the rows and columns that exist in the state.
    """
    entry = _load_entry(x, b, steps, ring, position, end, has_n, has_p, HEADS, CAPACITY, X_CAPACITY)
    following = _load_entry(x, b, steps, ring, position + 1, end, has_n, has_p, HEADS, CAPACITY, X_CAPACITY)
    while position < end:
        until = tl.minimum((position // RING + 1) * RING, end)
        for at in range(position, until):
            values, keys, factor, decay = entry
            # Load two tokens ahead, because the arithmetic for one token takes less time than a load.
            entry = following
            following = _load_entry(x, b, steps, ring, at + 2, end, has_n, has_p, HEADS, CAPACITY, X_CAPACITY)
            increment = keys.to(tl.float32)[:, None] * (factor * values.to(tl.float32))[None, :]
            # Explicit fma, because the compiler may fuse differently in each compiled variant.
            state = tl.fma(tl.exp(decay), state, increment)
        if until % RING == 0:
            state = cast_state(state, pool.dtype.element_ty, seed, until, row, column).to(tl.float32)
        position = until
    return state
