"""Pipeline stages of FP8 codes for `prompt_gemm_hopper`, and the warp that fills them; written in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from ..gluon_common import load_tile
from .gemm_pipeline import find_tile

DEPTH = gl.constexpr(128)
"""Inputs of a step."""
HALF = gl.constexpr(64)
"""Rows that a group of warps multiplies, and half of the weights of a tile."""


@aggregate
class Sizes:
    """Compile-time dimensions of the GEMM.

    An expert has WEIGHTS rows of weights and OUTPUTS outputs, which are split into TILES tiles; from one row tile to
    the next, the first output tile advances by TURN. A tile's inputs fill STEPS of the pipeline's STAGES. SECOND is the
    distance between the two halves of a tile's weights. Blocks of weights form a grid [GRID_ROWS, GRID_COLUMNS] per
    expert; without blocks, GRID_COLUMNS is 0.
    """

    OUTPUTS: gl.constexpr
    WEIGHTS: gl.constexpr
    SECOND: gl.constexpr
    TILES: gl.constexpr
    TURN: gl.constexpr
    STEPS: gl.constexpr
    STAGES: gl.constexpr
    GRID_ROWS: gl.constexpr
    GRID_COLUMNS: gl.constexpr
    BLOCK_ROWS: gl.constexpr
    HAS_FACTORS: gl.constexpr
    ACTIVATION: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, OUTPUTS, WEIGHTS, SECOND, TILES, TURN, STEPS, STAGES, GRID_ROWS, GRID_COLUMNS, BLOCK_ROWS, HAS_FACTORS,
        ACTIVATION,
    ):  # fmt: skip
        self.OUTPUTS = gl.constexpr(OUTPUTS)
        self.WEIGHTS = gl.constexpr(WEIGHTS)
        self.SECOND = gl.constexpr(SECOND)
        self.TILES = gl.constexpr(TILES)
        self.TURN = gl.constexpr(TURN)
        self.STEPS = gl.constexpr(STEPS)
        self.STAGES = gl.constexpr(STAGES)
        self.GRID_ROWS = gl.constexpr(GRID_ROWS)
        self.GRID_COLUMNS = gl.constexpr(GRID_COLUMNS)
        self.BLOCK_ROWS = gl.constexpr(BLOCK_ROWS)
        self.HAS_FACTORS = gl.constexpr(HAS_FACTORS)
        self.ACTIVATION = gl.constexpr(ACTIVATION)


@aggregate
class Pipeline:
    """Stages of two boxes of rows and two of weights, [HALF, DEPTH] each, and barriers for full and empty stages."""

    rows: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, rows, weights, full, empty):
        self.rows = rows
        self.weights = weights
        self.full = full
        self.empty = empty


@gluon.jit
def allocate_pipeline(rows, sizes):
    """Allocate the pipeline with all stages empty; call it before warp specialization."""
    pipeline = Pipeline(
        gl.allocate_shared_memory(gl.float8e4nv, [2 * sizes.STAGES, HALF, DEPTH], rows.layout),
        gl.allocate_shared_memory(gl.float8e4nv, [2 * sizes.STAGES, HALF, DEPTH], rows.layout),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for stage in gl.static_range(sizes.STAGES):
        mbarrier.init(pipeline.full.index(stage), count=1)
        mbarrier.init(pipeline.empty.index(stage), count=2)
    fence_async_shared()
    return pipeline


@gluon.jit
def first_weight(tile, sizes):
    """Return the index, in its expert, of a tile's first weight, which is also its first output."""
    return tile.outputs * (2 * HALF if sizes.SECOND == HALF else HALF)


@gluon.jit
def fill(rows, weights, pipeline, tiles, sizes):
    """Load the codes for all of this program's tiles into free stages; runs on one warp.

    Rows and weights after the last of an expert may be those of the next one; their results are not stored.
    """
    BOX: gl.constexpr = HALF * DEPTH
    num_tiles = gl.load(tiles) * sizes.TILES
    step = 0
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile = find_tile(tiles, number, num_tiles, sizes)
        is_long = tile.last - tile.first > HALF
        weight = tile.expert * sizes.WEIGHTS + first_weight(tile, sizes)
        for k in range(sizes.STEPS):
            stage = (step + k) % sizes.STAGES
            full = pipeline.full.index(stage)
            mbarrier.wait(pipeline.empty.index(stage), ((step + k) // sizes.STAGES & 1) ^ 1)
            mbarrier.expect(full, 3 * BOX, pred=tile.last - tile.first <= HALF)
            mbarrier.expect(full, 4 * BOX, pred=is_long)
            load_tile(weights, [weight, k * DEPTH], full, pipeline.weights.index(2 * stage))
            load_tile(weights, [weight + sizes.SECOND, k * DEPTH], full, pipeline.weights.index(2 * stage + 1))
            load_tile(rows, [tile.first, k * DEPTH], full, pipeline.rows.index(2 * stage))
            if is_long:
                load_tile(rows, [tile.first + HALF, k * DEPTH], full, pipeline.rows.index(2 * stage + 1))
        step += sizes.STEPS
