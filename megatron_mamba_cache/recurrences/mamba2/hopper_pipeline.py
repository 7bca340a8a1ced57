"""TMA loads and stores for the scan on Hopper GPUs, overlapped with computation, in Gluon.

Loads: one warp fills pipeline stages ahead of the warps that scan. The TMA box of a tile may include tokens of other
requests. The loading warp sets them to zero before it signals that the stage is full, because a NaN in another request
would propagate even with weight 0.

Stores: TMA reads the source buffer after the call returns. Stores complete in the order in which they were started:
first a tile's outputs, then its state. A float32 state has its own buffer, so its store may overlap with the next tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate

from ...kernels.gluon_common import load_tile, store_tile
from ..hopper_tiles import clear_outside
from ..stochastic_rounding import cast_scanned


@aggregate
class Sizes:
    """Compile-time dimensions of the layer and of the work per program.

    A program scans CHANNELS channels of each of TOGETHER heads, in tiles of LENGTH tokens, with STAGES pipeline stages.
    """

    HEADS: gl.constexpr
    GROUPS: gl.constexpr
    HEAD_DIM: gl.constexpr
    D_STATE: gl.constexpr
    CHANNELS: gl.constexpr
    TOGETHER: gl.constexpr
    LENGTH: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, HEADS, GROUPS, HEAD_DIM, D_STATE, CHANNELS, TOGETHER, LENGTH, STAGES):
        self.HEADS = gl.constexpr(HEADS)
        self.GROUPS = gl.constexpr(GROUPS)
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.D_STATE = gl.constexpr(D_STATE)
        self.CHANNELS = gl.constexpr(CHANNELS)
        self.TOGETHER = gl.constexpr(TOGETHER)
        self.LENGTH = gl.constexpr(LENGTH)
        self.STAGES = gl.constexpr(STAGES)


@aggregate
class PackedTiles:
    """TMA descriptors for tiles of the packed tokens and of their decays."""

    x: tma.tensor_descriptor
    B: tma.tensor_descriptor
    C: tma.tensor_descriptor
    decays: tma.tensor_descriptor

    @gluon.constexpr_function
    def __init__(self, x, B, C, decays):
        self.x = x
        self.B = B
        self.C = C
        self.decays = decays


@aggregate
class Pipeline:
    """Pipeline stages for input tiles, and barriers that signal full and free stages.

    Shapes: C, B [STAGES, LENGTH, D_STATE]; x [STAGES * TOGETHER, LENGTH, CHANNELS];
    decays [2 * STAGES * TOGETHER, 1, LENGTH], for each head its decays, then its gains.
    """

    C: gl.shared_memory_descriptor
    B: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    decays: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    clearing: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, C, B, x, decays, full, empty, clearing):
        self.C = C
        self.B = B
        self.x = x
        self.decays = decays
        self.full = full
        self.empty = empty
        self.clearing = clearing


@gluon.jit
def allocate_pipeline(tiles, sizes):
    """Allocate the pipeline with all stages empty; call it before warp specialization."""
    tokens_by_dim: gl.constexpr = [sizes.STAGES, sizes.LENGTH, sizes.D_STATE]
    heads: gl.constexpr = sizes.STAGES * sizes.TOGETHER
    pipeline = Pipeline(
        gl.allocate_shared_memory(gl.bfloat16, tokens_by_dim, tiles.C.layout),
        gl.allocate_shared_memory(gl.bfloat16, tokens_by_dim, tiles.B.layout),
        gl.allocate_shared_memory(gl.bfloat16, [heads, sizes.LENGTH, sizes.CHANNELS], tiles.x.layout),
        gl.allocate_shared_memory(gl.float32, [2 * heads, 1, sizes.LENGTH], tiles.decays.layout),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
    )
    for stage in gl.static_range(sizes.STAGES):
        mbarrier.init(pipeline.full.index(stage), count=1)
        mbarrier.init(pipeline.empty.index(stage), count=sizes.TOGETHER)
    mbarrier.init(pipeline.clearing, count=1)
    fence_async_shared()
    return pipeline


@gluon.jit
def fill(tiles, pipeline, span, head, channel, num_tiles, sizes):
    """Load the tiles of a request into free stages, in order; runs on one warp."""
    clear_phase = 0
    for k in range(span.count):
        stage = k % sizes.STAGES
        full = pipeline.full.index(stage)
        token = span.begin + k * sizes.LENGTH
        mbarrier.wait(pipeline.empty.index(stage), (k // sizes.STAGES & 1) ^ 1)
        if (token >= span.low) & (token + sizes.LENGTH <= span.high):
            _copy_tile(tiles, pipeline, stage, full, token, span.first + k, head, channel, num_tiles, sizes)
        else:
            _copy_tile(
                tiles, pipeline, stage, pipeline.clearing, token, span.first + k, head, channel, num_tiles, sizes
            )
            mbarrier.wait(pipeline.clearing, clear_phase)
            clear_phase ^= 1
            clear_outside(pipeline.B.index(stage), token, span.low, span.high)
            for part in gl.static_range(sizes.TOGETHER):
                clear_outside(pipeline.x.index(stage * sizes.TOGETHER + part), token, span.low, span.high)
            fence_async_shared()
            mbarrier.arrive(full, count=1)


@gluon.jit
def _copy_tile(tiles, pipeline, stage, barrier, token, tile, head, channel, num_tiles, sizes):
    """Start the TMA copy of a tile; `barrier` signals its completion."""
    SHARED_BYTES: gl.constexpr = 2 * 2 * sizes.LENGTH * sizes.D_STATE
    HEAD_BYTES: gl.constexpr = 2 * sizes.LENGTH * sizes.CHANNELS + 2 * 4 * sizes.LENGTH
    mbarrier.expect(barrier, SHARED_BYTES + sizes.TOGETHER * HEAD_BYTES)
    dim = head // (sizes.HEADS // sizes.GROUPS) * sizes.D_STATE
    load_tile(tiles.C, [token, dim], barrier, pipeline.C.index(stage))
    load_tile(tiles.B, [token, dim], barrier, pipeline.B.index(stage))
    for part in gl.static_range(sizes.TOGETHER):
        index = stage * sizes.TOGETHER + part
        x_channel = (head + part) * sizes.HEAD_DIM + channel
        load_tile(tiles.x, [token, x_channel], barrier, pipeline.x.index(index))
        vector = ((head + part) * num_tiles + tile) * 2
        load_tile(tiles.decays, [vector, 0], barrier, pipeline.decays.index(2 * index))
        load_tile(tiles.decays, [vector + 1, 0], barrier, pipeline.decays.index(2 * index + 1))


@aggregate
class Results:
    """Destinations of outputs and states, each as a pointer and as a TMA descriptor."""

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
    """Shared memory of one group of four warps: weighted inputs, the state in bf16, and store buffers.

    `leaving` is the buffer for storing the state, in the pool's dtype. For a bf16 pool it is the same as `state`.
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
    """Wait until the store buffers of the previous tile can be reused; `kept` is the slot of its state, or -1.

    The store of a float32 state may stay in flight, because it has a separate buffer.
    """
    if results.pool.dtype.element_ty != gl.bfloat16 and kept >= 0:
        tma.store_wait(1)
    else:
        tma.store_wait(0)


@gluon.jit
def put_outputs(results, y_copy, y, span, token, head, channel, sizes):
    """Store the outputs of a tile, but only for tokens of the request."""
    OUT: gl.constexpr = y.type.layout
    is_whole = (token >= span.low) & (token + sizes.LENGTH <= span.high)
    if is_whole:
        y_copy.store(y)
    fence_async_shared()  # also makes the state in shared memory, written by the caller, visible to TMA
    if is_whole:
        store_tile(results.y_tiles, [token, head * sizes.HEAD_DIM + channel], y_copy)
    else:
        tokens = token + gl.arange(0, sizes.LENGTH, layout=gl.SliceLayout(1, OUT))
        lane = gl.arange(0, sizes.CHANNELS, layout=gl.SliceLayout(0, OUT))
        inside = (tokens >= span.low) & (tokens < span.high)
        first = results.y + head * sizes.HEAD_DIM + channel
        pointers = first + tokens[:, None].to(gl.int64) * (sizes.HEADS * sizes.HEAD_DIM) + lane[None, :]
        gl.store(pointers, y, mask=inside[:, None])


@gluon.jit
def put_state(results, scratch, state, kept, slot, rounding, position, row, column, head, channel, sizes):
    """Store the state after a tile in a slot; call it after `put_outputs`."""
    if results.pool.dtype.element_ty != gl.bfloat16:
        if kept >= 0:
            tma.store_wait(0)  # the previous tile's state may still be read from the buffer
        scratch.leaving.store(cast_scanned(state, results.pool.dtype.element_ty, rounding, position, row, column))
        fence_async_shared()
    first_row = slot * (results.slot_stride // sizes.HEAD_DIM) + head * sizes.D_STATE
    store_tile(results.pool_states, [first_row, channel], scratch.leaving)
