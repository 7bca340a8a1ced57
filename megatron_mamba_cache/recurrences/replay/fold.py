"""Folds of ring entries into a state, in Triton, for every shape and device.

Token by token, S = exp(decay) S + B (dt x) for each entry. Every kernel that folds this way gives the same bits: an
element's operations do not depend on the tile.
"""

import triton
import triton.language as tl

from ...kernels.kernel_language import only_if


@triton.jit
def _load_entry(
    x,
    b,
    steps,
    ring,
    position,
    end,
    has_n,
    has_p,
    HEADS: tl.constexpr,
    CAPACITY: tl.constexpr,
    X_CAPACITY: tl.constexpr,
):
    """Load x, B, the time step and its product with A of one head at a position; zeros from `end` on."""
    exists = position < end
    index = position % CAPACITY
    values = tl.load(x + position % X_CAPACITY * ring.x_stride, mask=only_if(exists, has_p), other=0.0)
    keys = tl.load(b + index * ring.B_stride, mask=only_if(exists, has_n), other=0.0)
    dt = tl.load(steps + index * ring.steps_stride, mask=exists, other=0.0)
    decay = tl.load(steps + index * ring.steps_stride + HEADS, mask=exists, other=0.0)
    return values, keys, dt, decay


@triton.jit
def fold_entries(
    state,
    pool,
    x,
    b,
    steps,
    ring,
    position,
    end,
    has_n,
    has_p,
    HEADS: tl.constexpr,
    CAPACITY: tl.constexpr,
    X_CAPACITY: tl.constexpr,
    RING: tl.constexpr,
):
    """Return float32 `state` [d_state, width] after a ring's entries from `position` to `end`.

    It is rounded to the pool's dtype at every multiple of RING on the way, and nowhere else.

    Args:
        x, b, steps: Where the head's inputs at index 0 of the ring are.
        has_n, has_p: Which rows and columns of the state exist.
    """
    entry = _load_entry(x, b, steps, ring, position, end, has_n, has_p, HEADS, CAPACITY, X_CAPACITY)
    following = _load_entry(x, b, steps, ring, position + 1, end, has_n, has_p, HEADS, CAPACITY, X_CAPACITY)
    while position < end:
        until = tl.minimum((position // RING + 1) * RING, end)
        for at in range(position, until):
            values, keys, dt, decay = entry
            # Prefetched two tokens ahead: a token's arithmetic is shorter than a load.
            entry = following
            following = _load_entry(x, b, steps, ring, at + 2, end, has_n, has_p, HEADS, CAPACITY, X_CAPACITY)
            increment = keys.to(tl.float32)[:, None] * (dt * values.to(tl.float32))[None, :]
            # Fused by hand: the compiler's choice may differ between compiled variants.
            state = tl.fma(tl.exp(decay), state, increment)
        if until % RING == 0:
            state = state.to(pool.dtype.element_ty).to(tl.float32)
        position = until
    return state
