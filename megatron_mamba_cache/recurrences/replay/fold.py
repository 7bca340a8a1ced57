"""Folds of ring entries into a state, in Triton, for every shape and device.

Token by token, S = exp(decay) S + B (dt x) for each entry. Period by period, with L_j the sum of the decays after
entry j of the period and L that of all,

    S = exp(L) S + sum over j of B_j (exp(L_j) dt_j x_j)

on tensor cores. Either one gives the same bits in every kernel: an element's operations do not depend on the tile, and
float64 holds the sum of a period's decays exactly, in any order.
"""

import triton
import triton.language as tl

from ...kernels.kernel_language import only_if

_HIGH_HALF = tl.constexpr(-65536)


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
def _as_bf16(bits):
    """Return the high halves of float32 bits as bf16."""
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def multiply(left, right, sums):
    """Add the matmul of stored tokens, `left`, and float32 `right` to `sums`, float32.

    `right` is split into three bf16 tensors that add up to it, so that every product of bf16 tokens is exact. Truncated
    ones: to round them takes the GPU many times as long.
    """
    if left.dtype != tl.bfloat16:
        return tl.dot(left.to(tl.float32), right, sums, input_precision="ieee")
    high = right.to(tl.int32, bitcast=True)
    rest = right - (high & _HIGH_HALF).to(tl.float32, bitcast=True)
    middle = rest.to(tl.int32, bitcast=True)
    low = (rest - (middle & _HIGH_HALF).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    sums = tl.dot(left, _as_bf16(low), sums)
    return tl.dot(left, _as_bf16(high), tl.dot(left, _as_bf16(middle), sums))


@triton.jit
def fold_periods(
    state, pool, x, b, steps, ring, position, end, has_n, has_p,
    HEADS: tl.constexpr, CAPACITY: tl.constexpr, X_CAPACITY: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Return what `fold_entries` does, but fold all entries of a period at once, by matmul; same arguments.

    `state` may be some rows of a state. One warp.
    """
    ENTRIES: tl.constexpr = RING if RING > 16 else 16
    j = tl.arange(0, ENTRIES)
    while position < end:
        begin = position // RING * RING
        until = tl.minimum(begin + RING, end)
        at = begin + j
        exists = (at >= position) & (at < until)
        keys = b[:, None] + (at % CAPACITY * ring.B_stride)[None, :]
        keys = tl.load(keys, mask=has_n[:, None] & exists[None, :], other=0.0)  # [rows, entries]
        values = x[None, :] + (at % X_CAPACITY * ring.x_stride)[:, None]
        values = tl.load(values, mask=exists[:, None] & has_p[None, :], other=0.0)  # [entries, width]
        of_entries = steps + at % CAPACITY * ring.steps_stride
        dt = tl.load(of_entries, mask=exists, other=0.0)
        decays = tl.load(of_entries + HEADS, mask=exists, other=0.0).to(tl.float64)
        total = tl.sum(decays, axis=0)
        later = (total - tl.cumsum(decays, axis=0)).to(tl.float32)
        scaled = (tl.exp(later) * dt)[:, None] * values.to(tl.float32)
        added = multiply(keys, scaled, tl.zeros_like(state))
        state = tl.fma(tl.exp(total.to(tl.float32)), state, added)
        if until % RING == 0:
            state = state.to(pool.dtype.element_ty).to(tl.float32)
        position = until
    return state


@triton.jit
def fold(
    state, pool, x, b, steps, ring, position, end, has_n, has_p,
    HEADS: tl.constexpr, CAPACITY: tl.constexpr, X_CAPACITY: tl.constexpr, RING: tl.constexpr, BY_PERIOD: tl.constexpr,
):  # fmt: skip
    """Return the state after a ring's entries by `fold_periods` or by `fold_entries`."""
    if BY_PERIOD:
        state = fold_periods(
            state, pool, x, b, steps, ring, position, end, has_n, has_p, HEADS, CAPACITY, X_CAPACITY, RING
        )
    else:
        state = fold_entries(
            state, pool, x, b, steps, ring, position, end, has_n, has_p, HEADS, CAPACITY, X_CAPACITY, RING
        )
    return state
