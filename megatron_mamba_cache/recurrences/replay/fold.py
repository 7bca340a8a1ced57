"""Folds of ring entries into a state, in Triton, for every shape and device.

Token by token, S = exp(decay) S + B (dt x) for each entry. Period by period, with L_j the sum of the decays after
entry j of the period and L that of all,

    S = exp(L) S + sum over j of B_j (exp(L_j) dt_j x_j)

which takes half as many operations. Either one gives the same bits in every kernel: an element's operations do not
depend on the layout.
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


@triton.jit
def fold_periods(
    state, pool, x, b, steps, ring, position, end, has_n, has_p,
    HEADS: tl.constexpr, CAPACITY: tl.constexpr, X_CAPACITY: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Return what `fold_entries` does, but fold all entries of a period at once; same arguments."""
    while position < end:
        begin = position // RING * RING
        until = tl.minimum(begin + RING, end)
        total = tl.full((), 0.0, tl.float64)
        # One by one: any kernel's layout gives the same sum.
        for number in tl.static_range(RING):
            at = begin + number
            source = steps + at % CAPACITY * ring.steps_stride + HEADS
            total += tl.load(source, mask=(at >= position) & (at < until), other=0.0).to(tl.float64)
        state *= tl.exp(total.to(tl.float32))
        entry = _load_entry(x, b, steps, ring, position, until, has_n, has_p, HEADS, CAPACITY, X_CAPACITY)
        following = _load_entry(x, b, steps, ring, position + 1, until, has_n, has_p, HEADS, CAPACITY, X_CAPACITY)
        for at in range(position, until):
            values, keys, dt, decay = entry
            # Prefetched two tokens ahead: a token's arithmetic is shorter than a load.
            entry = following
            following = _load_entry(x, b, steps, ring, at + 2, until, has_n, has_p, HEADS, CAPACITY, X_CAPACITY)
            total -= decay.to(tl.float64)
            scaled = tl.exp(total.to(tl.float32)) * dt * values.to(tl.float32)
            state = tl.fma(keys.to(tl.float32)[:, None], scaled[None, :], state)
        if until % RING == 0:
            state = state.to(pool.dtype.element_ty).to(tl.float32)
        position = until
    return state
