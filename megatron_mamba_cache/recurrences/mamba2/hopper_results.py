"""Stores of a scan's outputs and states on Hopper GPUs: TMA from shared memory, during the next tile's work; Gluon.

TMA reads what it stores after the call. Stores complete in the order in which they began: a tile's outputs, then its
state. So a float32 state, which has its own buffer, may still be in flight while the next tile is finished.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.language.core import _aggregate as aggregate

from ...kernels.gluon_common import store_tile
from ..rounded_states import LEAST_SCALE, MOST_VALUE


@aggregate
class Results:
    """The destinations of outputs and states, as pointers and as tile descriptors."""

    y: gl.tensor
    y_tiles: tma.tensor_descriptor
    pool: gl.tensor
    pool_states: tma.tensor_descriptor
    slot_stride: gl.tensor

    @gluon.constexpr_function
    def __init__(self, y, y_tiles, pool, pool_states, slot_stride):
        self.y = y
        self.y_tiles = y_tiles
        self.pool = pool
        self.pool_states = pool_states
        self.slot_stride = slot_stride


@aggregate
class Scratch:
    """What four warps hold in shared memory: weighted inputs, the state in bf16, and a state and outputs to be stored.

    A bf16 pool takes the state as it is: `leaving` is then `state`.
    """

    weighted: gl.shared_memory_descriptor
    state: gl.shared_memory_descriptor
    leaving: gl.shared_memory_descriptor
    y: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, weighted, state, leaving, y):
        self.weighted = weighted
        self.state = state
        self.leaving = leaving
        self.y = y


@gluon.jit
def await_scratch(results, kept):
    """Wait until the last tile's outputs are stored, and its state if the next one uses the same buffer.

    Args:
        kept: Slot that the last tile's state is being stored to, if not negative.
    """
    if results.pool.dtype.element_ty != gl.bfloat16 and kept >= 0:
        tma.store_wait(1)
    else:
        tma.store_wait(0)


@gluon.jit
def put_outputs(results, y_copy, y, span, token, head, channel, sizes):
    """Write a tile's outputs, for the row's tokens only."""
    OUT: gl.constexpr = y.type.layout
    is_whole = (token >= span.low) & (token + sizes.LENGTH <= span.high)
    if is_whole:
        y_copy.store(y)
    fence_async_shared()  # for the state too, which the caller has stored
    if is_whole:
        store_tile(results.y_tiles, [token, head * sizes.HEAD_DIM + channel], y_copy)
    else:
        tokens = token + gl.arange(0, sizes.LENGTH, layout=gl.SliceLayout(1, OUT))
        lane = gl.arange(0, sizes.CHANNELS, layout=gl.SliceLayout(0, OUT))
        inside = (tokens >= span.low) & (tokens < span.high)
        first = results.y + head * sizes.HEAD_DIM + channel
        places = first + tokens[:, None].to(gl.int64) * (sizes.HEADS * sizes.HEAD_DIM) + lane[None, :]
        gl.store(places, y, mask=inside[:, None])


@gluon.jit
def put_state(results, scratch, state, kept, slot, head, channel, sizes):
    """Store the state after a tile to a slot, after the tile's outputs."""
    if results.pool.dtype.element_ty != gl.bfloat16:
        if kept >= 0:
            tma.store_wait(0)  # the last tile's state may still be in flight
        scratch.leaving.store(state)
        fence_async_shared()
    first_row = slot * (results.slot_stride // sizes.HEAD_DIM) + head * sizes.D_STATE
    store_tile(results.pool_states, [first_row, channel], scratch.leaving)


@gluon.jit
def put_rounded(places, state, slot, head, channel, sizes):
    """Round the state after a tile into a slot, as `store_rounded` does; boundaries are few, and so are the bytes."""
    OUT: gl.constexpr = state.type.layout
    scale = gl.div_rn(gl.max(gl.abs(state), axis=0), MOST_VALUE)
    scale = gl.where(scale < LEAST_SCALE, 0.0, scale)
    values = gl.floor(gl.div_rn(state, gl.where(scale == 0.0, 1.0, scale)[None, :]) + 0.5)
    dim = gl.arange(0, sizes.D_STATE, layout=gl.SliceLayout(1, OUT))
    lane = channel + gl.arange(0, sizes.CHANNELS, layout=gl.SliceLayout(0, OUT))
    scales = places.scales + slot.to(gl.int64) * places.scales_slot + head * sizes.HEAD_DIM
    gl.store(scales + lane, scale)
    stored = places.stored + slot.to(gl.int64) * places.stored_slot + head * (sizes.D_STATE * sizes.HEAD_DIM)
    gl.store(stored + dim[:, None] * sizes.HEAD_DIM + lane[None, :], values.to(gl.int8))
