"""Device functions that update a head's state by one tile, and store the state at the end of the tile.

    wanted = v - reach (k state)        written = beta wanted + solved wanted
    y = read (q state) + scores written        state = kept state + k^T (left written)

Here reach, beta, read and left are the `factors` of the tile. The state is transposed, [channels, key_dim], so all
matmuls read it, and the values computed from it, from registers.
"""

import triton
import triton.language as tl

from ..quantized_states import store_quantized


@triton.jit
def advance_tile(state, q, k, v, solved, scores, factors, kept, PRECISION: tl.constexpr):
    """Compute one tile; return its outputs [channels, width] and the state [channels, key_dim] after it.

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
def store_state(states, slot_stride, slot, state, is_state):
    if slot >= 0:
        tl.store(states + slot.to(tl.int64) * slot_stride, state.to(states.dtype.element_ty), mask=is_state)


@triton.jit
def store_boundary(
    states, slot_stride, quantized, slot, state, is_state, head, first, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr
):
    """Store the state at the end of a tile; quantize it if `quantized` is given."""
    if quantized is None:
        store_state(states, slot_stride, slot, state, is_state)
    elif slot >= 0:
        n, p = tl.arange(0, state.shape[1]), first + tl.arange(0, state.shape[0])
        no_layer = slot.to(tl.int64) * 0
        store_quantized(
            quantized, no_layer, slot.to(tl.int64), tl.trans(state), head, n, p, n < KEY_DIM, p < VALUE_DIM,
            KEY_DIM, VALUE_DIM,
        )  # fmt: skip
