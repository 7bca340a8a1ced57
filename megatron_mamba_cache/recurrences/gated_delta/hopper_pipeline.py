"""Shared memory of the scan on Hopper GPUs, and the warps that fill it, in Gluon.

One warp loads tiles ahead with TMA. A tile may include tokens of other requests: their k and v are set to zero before
the stage is full, because a NaN would propagate even with weight 0. Four more warps compute the scores of each tile,
which do not depend on the state, ahead of the warps that carry the state.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from ...kernels.gluon_common import load_tile, reinterpret, store_tile
from ..hopper_tiles import clear_outside, put_quantized
from .tile_systems_hopper import NUM_FACTORS, SOURCE, TARGET

CHANNELS = gl.constexpr(64)
"""Number of channels that four warps scan."""
_FACTORS = gl.constexpr(NUM_FACTORS)
_BOX = gl.constexpr(NUM_FACTORS // 2)
"""Number of factors per TMA box, which may have at most 256 numbers in a dimension."""


@aggregate
class Sizes:
    """Compile-time dimensions of the layer and of the work per program.

    A program scans PARTS * CHANNELS channels of a head in tiles of LENGTH tokens, with STAGES pipeline stages.
    """

    HEADS: gl.constexpr
    HEADS_A_KEY: gl.constexpr
    KEY_DIM: gl.constexpr
    VALUE_DIM: gl.constexpr
    PARTS: gl.constexpr
    LENGTH: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, HEADS, HEADS_A_KEY, KEY_DIM, VALUE_DIM, PARTS, LENGTH, STAGES):
        self.HEADS = gl.constexpr(HEADS)
        self.HEADS_A_KEY = gl.constexpr(HEADS_A_KEY)
        self.KEY_DIM = gl.constexpr(KEY_DIM)
        self.VALUE_DIM = gl.constexpr(VALUE_DIM)
        self.PARTS = gl.constexpr(PARTS)
        self.LENGTH = gl.constexpr(LENGTH)
        self.STAGES = gl.constexpr(STAGES)


@aggregate
class PackedTiles:
    """TMA descriptors for the tiles of packed tokens, of `solved` and of factors."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    solved: tma.tensor_descriptor
    factors: tma.tensor_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, solved, factors):
        self.q = q
        self.k = k
        self.v = v
        self.solved = solved
        self.factors = factors


@aggregate
class Pipeline:
    """Pipeline stages for the inputs and scores of tiles, and barriers that signal full and free stages.

    Shapes: q, k [STAGES, LENGTH, KEY_DIM]; v [STAGES * PARTS, LENGTH, CHANNELS]; solved and scores
    [STAGES, LENGTH, LENGTH]; factors [STAGES * 8, LENGTH], as two TMA boxes per stage.
    """

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    solved: gl.shared_memory_descriptor
    factor_boxes: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    scores: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    clearing: gl.shared_memory_descriptor
    scored: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, solved, factor_boxes, factors, scores, full, empty, clearing, scored):
        self.q = q
        self.k = k
        self.v = v
        self.solved = solved
        self.factor_boxes = factor_boxes
        self.factors = factors
        self.scores = scores
        self.full = full
        self.empty = empty
        self.clearing = clearing
        self.scored = scored


@gluon.jit
def allocate_pipeline(tiles, sizes):
    """Allocate the pipeline with all stages empty; call it before warp specialization."""
    L: gl.constexpr = sizes.LENGTH
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys: gl.constexpr = [sizes.STAGES, L, sizes.KEY_DIM]
    boxes = gl.allocate_shared_memory(gl.float32, [2 * sizes.STAGES, 1, _BOX * L], tiles.factors.layout)
    pipeline = Pipeline(
        gl.allocate_shared_memory(gl.bfloat16, keys, tiles.q.layout),
        gl.allocate_shared_memory(gl.bfloat16, keys, tiles.k.layout),
        gl.allocate_shared_memory(gl.bfloat16, [sizes.STAGES * sizes.PARTS, L, CHANNELS], tiles.v.layout),
        gl.allocate_shared_memory(gl.bfloat16, [sizes.STAGES, L, L], tiles.solved.layout),
        boxes,
        reinterpret(boxes, gl.float32, [sizes.STAGES * _FACTORS, L], PLAIN),
        gl.allocate_shared_memory(gl.float16, [sizes.STAGES, L, L], tiles.solved.layout),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for stage in gl.static_range(sizes.STAGES):
        mbarrier.init(pipeline.full.index(stage), count=1)
        mbarrier.init(pipeline.scored.index(stage), count=1)
        mbarrier.init(pipeline.empty.index(stage), count=sizes.PARTS)
    mbarrier.init(pipeline.clearing, count=1)
    fence_async_shared()
    return pipeline


@gluon.jit
def fill(tiles, pipeline, span, head, channel, num_tiles, sizes):
    """Load the tiles of a request into free stages, in order; runs on one warp."""
    clear_phase = 0
    for t in range(span.count):
        stage = t % sizes.STAGES
        full = pipeline.full.index(stage)
        token = span.begin + t * sizes.LENGTH
        tile = head * num_tiles + span.first + t
        mbarrier.wait(pipeline.empty.index(stage), (t // sizes.STAGES & 1) ^ 1)
        if (token >= span.low) & (token + sizes.LENGTH <= span.high):
            _copy_tile(tiles, pipeline, stage, full, token, tile, head, channel, sizes)
        else:
            _copy_tile(tiles, pipeline, stage, pipeline.clearing, token, tile, head, channel, sizes)
            mbarrier.wait(pipeline.clearing, clear_phase)
            clear_phase ^= 1
            clear_outside(pipeline.k.index(stage), token, span.low, span.high)
            for part in gl.static_range(sizes.PARTS):
                clear_outside(pipeline.v.index(stage * sizes.PARTS + part), token, span.low, span.high)
            fence_async_shared()
            mbarrier.arrive(full, count=1)


@gluon.jit
def _copy_tile(tiles, pipeline, stage, barrier, token, tile, head, channel, sizes):
    """Start the TMA copy of a tile; `barrier` signals its completion."""
    L: gl.constexpr = sizes.LENGTH
    mbarrier.expect(barrier, 2 * L * (2 * sizes.KEY_DIM + sizes.PARTS * CHANNELS + L) + 4 * _FACTORS * L)
    dim = head // sizes.HEADS_A_KEY * sizes.KEY_DIM
    load_tile(tiles.k, [token, dim], barrier, pipeline.k.index(stage))
    load_tile(tiles.q, [token, dim], barrier, pipeline.q.index(stage))
    for box in gl.static_range(2):
        load_tile(tiles.factors, [2 * tile + box, 0], barrier, pipeline.factor_boxes.index(2 * stage + box))
    load_tile(tiles.solved, [tile * L, 0], barrier, pipeline.solved.index(stage))
    for part in gl.static_range(sizes.PARTS):
        of_part = head * sizes.VALUE_DIM + channel + part * CHANNELS
        load_tile(tiles.v, [token, of_part], barrier, pipeline.v.index(stage * sizes.PARTS + part))


@gluon.jit
def score(pipeline, span, sizes):
    """Compute the scores of a request's tiles, in order; runs on four warps."""
    L: gl.constexpr = sizes.LENGTH
    SQUARE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L, 16])
    TARGETS: gl.constexpr = gl.SliceLayout(1, SQUARE)
    SOURCES: gl.constexpr = gl.SliceLayout(0, SQUARE)
    zeros = gl.zeros([L, L], gl.float32, layout=SQUARE)
    is_earlier = gl.arange(0, L, layout=TARGETS)[:, None] >= gl.arange(0, L, layout=SOURCES)[None, :]
    for t in range(span.count):
        stage = t % sizes.STAGES
        mbarrier.wait(pipeline.full.index(stage), t // sizes.STAGES & 1)
        k = pipeline.k.index(stage).permute((1, 0))
        scores = warpgroup_mma(pipeline.q.index(stage), k, zeros, use_acc=False, is_async=True)
        target = pipeline.factors.index(stage * _FACTORS + TARGET).load(TARGETS)
        source = pipeline.factors.index(stage * _FACTORS + SOURCE).load(SOURCES)
        weights = gl.where(is_earlier, gl.exp2(target[:, None] + source[None, :]), 0.0)
        scores = warpgroup_mma_wait(0, deps=[scores])
        pipeline.scores.index(stage).store((scores * weights).to(gl.float16))
        fence_async_shared()
        mbarrier.arrive(pipeline.scored.index(stage), count=1)


@aggregate
class Results:
    """Destinations of outputs and states."""

    y: gl.tensor
    y_tiles: tma.tensor_descriptor
    pool: gl.tensor
    slot_stride: gl.tensor

    @gluon.constexpr_function
    def __init__(self, y, y_tiles, pool, slot_stride):
        self.y = y
        self.y_tiles = y_tiles
        self.pool = pool
        self.slot_stride = slot_stride


@gluon.jit
def put_outputs(results, y_copy, y, span, token, head, channel, sizes):
    """Store the outputs [CHANNELS, LENGTH] of a tile, but only for tokens of the request."""
    L: gl.constexpr = sizes.LENGTH
    if (token >= span.low) & (token + L <= span.high):
        tma.store_wait(0)
        y_copy.permute((1, 0)).store(y)
        fence_async_shared()
        store_tile(results.y_tiles, [token, head * sizes.VALUE_DIM + channel], y_copy)
    else:
        OUT: gl.constexpr = y.type.layout
        tokens = token + gl.arange(0, L, layout=gl.SliceLayout(0, OUT))
        lane = gl.arange(0, CHANNELS, layout=gl.SliceLayout(1, OUT))
        inside = (tokens >= span.low) & (tokens < span.high)
        first = results.y + head * sizes.VALUE_DIM + channel
        pointers = first + tokens[None, :].to(gl.int64) * (sizes.HEADS * sizes.VALUE_DIM) + lane[:, None]
        gl.store(pointers, y, mask=inside[None, :])


@gluon.jit
def put_state(results, quantized, states, offsets, state, slot, head, channel, sizes):
    """Store the state [CHANNELS, KEY_DIM] after a tile in a slot."""
    if quantized is None:
        gl.store(states + slot.to(gl.int64) * results.slot_stride + offsets, state.to(results.pool.dtype.element_ty))
    else:
        put_quantized(quantized, state.permute((1, 0)), slot, head, channel, sizes.VALUE_DIM)
