"""Parts of the scans on Hopper GPUs that do not depend on the recurrence, in Gluon.

They find the tiles of a request, zero the tokens of other requests in a tile, and quantize states.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from .quantized_states import LEAST, MOST_FP8, MOST_INT8


@aggregate
class Span:
    """Tiles of one request: packed token range [low, high), start and number of the first tile, number of tiles."""

    low: gl.tensor
    high: gl.tensor
    begin: gl.tensor
    first: gl.tensor
    count: gl.tensor

    @gluon.constexpr_function
    def __init__(self, low, high, begin, first, count):
        self.low = low
        self.high = high
        self.begin = begin
        self.first = first
        self.count = count


@gluon.jit
def find_span(rows, row, LENGTH: gl.constexpr, PER_CHUNK: gl.constexpr):
    """Return the tiles of a request; see `request_tiles`."""
    low = gl.load(rows.cu_seqlens + row)
    high = gl.load(rows.cu_seqlens + row + 1)
    first_chunk = gl.load(rows.cu_request_chunks + row)
    num_chunks = gl.load(rows.cu_request_chunks + row + 1) - first_chunk
    first_end = gl.load(rows.cu_chunks + first_chunk + 1, mask=num_chunks > 0, other=0)
    in_first = (first_end - low + LENGTH - 1) // LENGTH
    begin = gl.where(num_chunks > 1, first_end - in_first * LENGTH, low)
    return Span(low, high, begin, (first_chunk + 1) * PER_CHUNK - in_first, (high - begin + LENGTH - 1) // LENGTH)


@gluon.jit
def clear_outside(tile, begin, low, high):
    """Set the tokens outside [low, high) to zero, eight at a time because one warp has few registers."""
    WIDTH: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    for eight in gl.static_range(tile.shape[0] // 8):
        token = begin + eight * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
        inside = (token >= low) & (token < high)
        part = tile.slice(eight * 8, 8, 0)
        values = part.load(layout)
        part.store(gl.where(inside[:, None], values, gl.zeros_like(values)))


@gluon.jit
def put_quantized(pointers, state, slot, head, channel, HEAD_DIM: gl.constexpr):
    """Quantize a state [d_state, channels] and store it in a slot, as `store_quantized` does in Triton.

    Args:
        channel: First channel of the state, of the HEAD_DIM channels of its head.
    """
    OUT: gl.constexpr = state.type.layout
    D_STATE: gl.constexpr = state.shape[0]
    IS_INT8: gl.constexpr = pointers.stored.dtype.element_ty == gl.int8
    MOST: gl.constexpr = MOST_INT8 if IS_INT8 else MOST_FP8
    scale = gl.div_rn(gl.max(gl.abs(state), axis=0), MOST)
    scale = gl.where(scale < LEAST, 0.0, scale)
    values = gl.div_rn(state, gl.where(scale == 0.0, 1.0, scale)[None, :])
    if IS_INT8:
        values = gl.floor(values + 0.5)
    dim = gl.arange(0, D_STATE, layout=gl.SliceLayout(1, OUT))
    lane = channel + gl.arange(0, state.shape[1], layout=gl.SliceLayout(0, OUT))
    scales = pointers.scales + slot.to(gl.int64) * pointers.scales_slot + head * HEAD_DIM
    gl.store(scales + lane, scale)
    stored = pointers.stored + slot.to(gl.int64) * pointers.stored_slot + head * (D_STATE * HEAD_DIM)
    gl.store(stored + dim[:, None] * HEAD_DIM + lane[None, :], values.to(pointers.stored.dtype.element_ty))
