"""Device functions that update a head's state by one tile, and store the state at the end of the tile.

    wanted = v - reach (k state)        written = beta wanted + solved wanted
    y = read (q state) + scores written        state = kept state + k^T (left written)

Here reach, beta, read and left are the tile's `factors`, in this order. The state is transposed, [channels, key_dim],
so all matmuls read it, and the values computed from it, from registers.
"""

import triton
import triton.language as tl

from ..quantized_states import store_quantized
from ..stochastic_rounding import cast_scanned, round_boundary


@triton.jit
def advance_tile(state, q, k, v, solved, scores, factors, kept, PRECISION: tl.constexpr):
    """Run the recurrence over one tile; return its outputs [channels, width] and the new state [channels, key_dim].

    Args:
        v: [channels, width].
    """
    WIDTH: tl.constexpr = k.shape[0]
    token = tl.arange(0, WIDTH)
    # Load each factor only when it is needed: together they would take as many registers as the state.
    cast_state = state.to(k.dtype)
    held = tl.dot(cast_state, tl.trans(k), input_precision=PRECISION)
    from_state = tl.dot(cast_state, tl.trans(q), input_precision=PRECISION)
    # Explicit fma, so that all compiled variants round alike.
    wanted = tl.fma(-tl.load(factors + token)[None, :], held, v.to(tl.float32))
    beta = tl.load(factors + WIDTH + token)
    written = tl.dot(wanted.to(k.dtype), tl.trans(solved), wanted * beta[None, :], input_precision=PRECISION)
    read = tl.load(factors + 2 * WIDTH + token)
    y = tl.dot(written.to(k.dtype), tl.trans(scores), from_state * read[None, :], input_precision=PRECISION)
    weighted = written * tl.load(factors + 3 * WIDTH + token)[None, :]
    state = tl.dot(weighted.to(k.dtype), k, state * kept, input_precision=PRECISION)
    return y, state


@triton.jit
def store_state(states, slot_stride, rounding, slot, state, position, is_state, head, first, KEY_DIM: tl.constexpr):
    if slot >= 0:
        targets = states + slot.to(tl.int64) * slot_stride
        row = head * KEY_DIM + tl.arange(0, state.shape[1])[None, :]
        column = first + tl.arange(0, state.shape[0])[:, None]
        stored = cast_scanned(state, states.dtype.element_ty, rounding, position, row, column)
        tl.store(targets, stored, mask=is_state)


@triton.jit
def end_tile(
    states, slot_stride, quantized, rounding, slot, state, position, is_state, head, first,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Round the state at the end of a tile if due, store it, quantized if `quantized` is given, and return it."""
    n, p = tl.arange(0, state.shape[1]), first + tl.arange(0, state.shape[0])
    state = round_boundary(state, states.dtype.element_ty, rounding, position, head * KEY_DIM + n[None, :], p[:, None])
    if quantized is None:
        store_state(states, slot_stride, rounding, slot, state, position, is_state, head, first, KEY_DIM)
    elif slot >= 0:
        no_layer = slot.to(tl.int64) * 0
        store_quantized(
            quantized, no_layer, slot.to(tl.int64), tl.trans(state), head, n, p, n < KEY_DIM, p < VALUE_DIM,
            KEY_DIM, VALUE_DIM,
        )  # fmt: skip
    return state
