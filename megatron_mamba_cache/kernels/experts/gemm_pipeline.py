"""Shared-memory pipeline of the Hopper grouped GEMM: loads weights and rows ahead of wgmma; written in Gluon.

One warp loads weights and another loads rows, both with TMA. If rows must be gathered, four warps copy them and also
load the weights.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from ..gluon_common import await_then_release, copy_gathered, load_tile, reinterpret
from . import gemm_tiles
from .wgmma import LINE, check_addresses

DEPTH = 64
"""Number of inputs per stage; must divide the number of inputs of the layer."""
GROUPS = gl.constexpr(2)
"""Number of warp groups that multiply one tile."""
MOST_ROWS = gl.constexpr(gemm_tiles.MOST_ROWS)
LINES_OF_ROWS = gl.constexpr(256)
"""Number of rows allocated per stage; the last stage has only MOST_ROWS, to leave shared memory for results."""


@aggregate
class Sizes:
    """Compile-time dimensions of a grouped GEMM and its tiles.

    A unit is 64 rows of weights, which give PER_UNIT outputs. The outputs of an expert are split into TILES tiles: the
    first NUM_WIDE have UNITS units (2 or 3), the rest have UNITS - 1. From one row tile to the next, the first output
    tile advances by TURN. A tile's inputs fill STEPS stages; the pipeline has STAGES stages. DIVISOR is the number of
    experts per token if rows are gathered from tokens, else 0. If AHEAD, weights are loaded without waiting for the
    previous kernel; only the loads of rows wait. If IS_CODED, weights are decoded from NVFP4 codes, and sums are
    multiplied by factors.
    """

    UNITS: gl.constexpr
    NUM_WIDE: gl.constexpr
    PER_UNIT: gl.constexpr
    TILES: gl.constexpr
    TURN: gl.constexpr
    STAGES: gl.constexpr
    STEPS: gl.constexpr
    OUTPUTS: gl.constexpr
    ACTIVATION: gl.constexpr
    DIVISOR: gl.constexpr
    AHEAD: gl.constexpr
    OVERLAPS: gl.constexpr
    IS_CODED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, UNITS, NUM_WIDE, PER_UNIT, TILES, TURN, STAGES, STEPS, OUTPUTS, ACTIVATION, DIVISOR, AHEAD, OVERLAPS,
        IS_CODED=False,
    ):  # fmt: skip
        self.UNITS = gl.constexpr(UNITS)
        self.NUM_WIDE = gl.constexpr(NUM_WIDE)
        self.PER_UNIT = gl.constexpr(PER_UNIT)
        self.TILES = gl.constexpr(TILES)
        self.TURN = gl.constexpr(TURN)
        self.STAGES = gl.constexpr(STAGES)
        self.STEPS = gl.constexpr(STEPS)
        self.OUTPUTS = gl.constexpr(OUTPUTS)
        self.ACTIVATION = gl.constexpr(ACTIVATION)
        self.DIVISOR = gl.constexpr(DIVISOR)
        self.AHEAD = gl.constexpr(AHEAD)
        self.OVERLAPS = gl.constexpr(OVERLAPS)
        self.IS_CODED = gl.constexpr(IS_CODED)


@aggregate
class Tile:
    """Tile of a grouped GEMM: expert, first row, end row (exclusive), and index of the output tile."""

    expert: gl.tensor
    first: gl.tensor
    last: gl.tensor
    outputs: gl.tensor

    @gluon.constexpr_function
    def __init__(self, expert, first, last, outputs):
        self.expert = expert
        self.first = first
        self.last = last
        self.outputs = outputs


@aggregate
class TilePipeline:
    """Operands in shared memory, and barriers that signal full and free stages.

    Shapes: weights [STAGES * UNITS, *TMA box of 64 rows]; rows [boxes, 32, DEPTH], with 8 boxes per stage, 7 in the
    last.
    """

    weights: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, weights, rows, full, empty):
        self.weights = weights
        self.rows = rows
        self.full = full
        self.empty = empty


@gluon.jit
def allocate_pipeline(weight, rows32, sizes):
    """Allocate the pipeline with all stages empty; call it before warp specialization.

    Args:
        weight: TMA descriptor of weights; not used if `sizes.IS_CODED`.
    """
    # A stage is full after one arrival for weights, plus one for TMA rows or 128 (one per thread) for gathered rows.
    ARRIVALS: gl.constexpr = 1 + 128 if sizes.DIVISOR > 0 else 1 + 1
    BOXES: gl.constexpr = first_weights(sizes) // (32 * LINE)
    UNITS: gl.constexpr = sizes.STAGES * sizes.UNITS
    rows = gl.allocate_shared_memory(gl.bfloat16, [BOXES, 32, 64], rows32.layout)
    weights = gl.allocate_shared_memory(gl.bfloat16, [UNITS, 64, 64], rows32.layout)
    pipeline = TilePipeline(
        weights if sizes.IS_CODED else reinterpret(weights, gl.bfloat16, [UNITS] + weight.block_shape, weight.layout),  # noqa: RUF005
        rows,
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
    )
    check_addresses(rows.index(0), weights.index(0), first_weights(sizes))
    for stage in gl.static_range(sizes.STAGES):
        mbarrier.init(pipeline.full.index(stage), count=ARRIVALS)
        mbarrier.init(pipeline.empty.index(stage), count=GROUPS)
    fence_async_shared()
    return pipeline


@gluon.constexpr_function
def first_weights(sizes):
    """Return the byte offset of the weights from the start of the rows in shared memory."""
    return ((sizes.STAGES - 1) * LINES_OF_ROWS + MOST_ROWS) * LINE


@gluon.jit
def offsets_of_stage(stage, sizes):
    """Return the byte offsets of a stage's weights and rows, relative to the start of the pipeline."""
    weights = first_weights(sizes) + stage * (sizes.UNITS * 64 * LINE)
    return weights, stage * (LINES_OF_ROWS * LINE)


@gluon.jit
def find_tile(tiles, number, num_tiles, sizes):
    """Return tile `number`, ordered by row tile, then by output tile; return the last tile for larger numbers."""
    number = gl.minimum(number, num_tiles - 1)
    of_rows = number // sizes.TILES
    entry = tiles + (1 + of_rows) * 4
    outputs = (number + sizes.TURN * of_rows) % sizes.TILES
    return Tile(gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), outputs)


@gluon.jit
def find_unit(outputs, sizes):
    """Return the index of the first unit in an output tile."""
    return outputs * sizes.UNITS - gl.maximum(outputs - sizes.NUM_WIDE, 0)


@gluon.jit
def row_of_unit(expert, unit, line, sizes):
    """Return the rows of the weights of all experts that are the lines, 0 to 63, of a unit; within the expert."""
    if sizes.ACTIVATION == "gated_silu":
        output = gl.minimum(unit * sizes.PER_UNIT + line // 16 * 8 + line % 8, sizes.OUTPUTS - 1)
        row = expert * (2 * sizes.OUTPUTS) + line // 8 % 2 * sizes.OUTPUTS + output
    else:
        row = expert * sizes.OUTPUTS + gl.minimum(unit * sizes.PER_UNIT + line, sizes.OUTPUTS - 1)
    return row


@gluon.jit
def _copy_weights(weight, pipeline, stage, tile, begin, sizes):
    """Start the TMA copy of a tile's weights; the stage's `full` barrier signals its completion."""
    full = pipeline.full.index(stage)
    first_unit = find_unit(tile.outputs, sizes)
    num_units = gl.where(tile.outputs < sizes.NUM_WIDE, sizes.UNITS, sizes.UNITS - 1)
    for units in gl.static_range(sizes.UNITS - 1, sizes.UNITS + 1):
        mbarrier.expect(full, units * 64 * 64 * 2, pred=num_units == units)
    for unit in gl.static_range(sizes.UNITS):
        output = (first_unit + unit) * sizes.PER_UNIT
        box = pipeline.weights.index(stage * sizes.UNITS + unit)
        if unit < num_units:
            if sizes.ACTIVATION == "gated_silu":
                load_tile(weight, [tile.expert, output // 8, 0, 0, begin], full, box)
            else:
                load_tile(weight, [tile.expert * sizes.OUTPUTS + output, begin], full, box)


@gluon.jit
def copy_rows(rows32, pipeline, stage, first, num_boxes, begin):
    """Start the TMA copy of a tile's rows in boxes of 32; the stage's `full` barrier signals its completion.

    The last box may include rows of other experts, or zeros after the end of `rows32`; their results are not stored.
    """
    MOST_BOXES: gl.constexpr = MOST_ROWS // 32
    full = pipeline.full.index(stage)
    for boxes in gl.static_range(1, MOST_BOXES + 1):
        mbarrier.expect(full, boxes * 32 * 64 * 2, pred=num_boxes == boxes)
    for i in gl.static_range(MOST_BOXES):
        if i < num_boxes:
            load_tile(rows32, [first + 32 * i, begin], full, pipeline.rows.index(stage * (LINES_OF_ROWS // 32) + i))


@gluon.jit
def fill_with_weights(weight, pipeline, tiles, sizes):
    """Load the weights for all of this program's tiles into free stages; runs on one warp."""
    num_tiles = gl.load(tiles) * sizes.TILES
    step = 0
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile = find_tile(tiles, number, num_tiles, sizes)
        for k in range(sizes.STEPS):
            stage = (step + k) % sizes.STAGES
            mbarrier.wait(pipeline.empty.index(stage), ((step + k) // sizes.STAGES & 1) ^ 1)
            _copy_weights(weight, pipeline, stage, tile, k * 64, sizes)
        step += sizes.STEPS


@gluon.jit
def fill_with_rows(rows32, pipeline, tiles, sizes):
    """Load the rows for all of this program's tiles into free stages; runs on one warp."""
    num_tiles = gl.load(tiles) * sizes.TILES
    if sizes.AHEAD:
        await_then_release(sizes.OVERLAPS)
    step = 0
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile = find_tile(tiles, number, num_tiles, sizes)
        num_boxes = (tile.last - tile.first + 31) // 32
        for k in range(sizes.STEPS):
            stage = (step + k) % sizes.STAGES
            mbarrier.wait(pipeline.empty.index(stage), ((step + k) // sizes.STAGES & 1) ^ 1)
            copy_rows(rows32, pipeline, stage, tile.first, num_boxes, k * 64)
        step += sizes.STEPS


@gluon.jit
def row_offsets(x_stride, pairs, first, last, DIVISOR: gl.constexpr):
    """Return the offsets in `x` of 64 inputs of 32 rows, [32, 64]; rows past the end repeat the last row."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.minimum(first + gl.arange(0, 32, layout=gl.SliceLayout(1, LAYOUT)), last - 1)
    token = gl.load(pairs + row) // DIVISOR
    return token[:, None] * x_stride + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def gather(weight, x, x_stride, pairs, pipeline, tiles, sizes):
    """Load weights and gather rows for all of this program's tiles into free stages; runs on four warps."""
    PIECES: gl.constexpr = MOST_ROWS // 32
    step = 0
    num_tiles = gl.load(tiles) * sizes.TILES
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile = find_tile(tiles, number, num_tiles, sizes)
        num_pieces = (tile.last - tile.first + 31) // 32
        offsets = ()
        for i in gl.static_range(PIECES):
            piece = row_offsets(x_stride, pairs, tile.first + 32 * i, tile.last, sizes.DIVISOR)
            offsets = offsets + (piece,)  # type: ignore[assignment]  # noqa: RUF005 (Gluon unpacks nothing)
        for k in range(sizes.STEPS):
            stage = (step + k) % sizes.STAGES
            mbarrier.wait(pipeline.empty.index(stage), ((step + k) // sizes.STAGES & 1) ^ 1)
            _copy_weights(weight, pipeline, stage, tile, k * 64, sizes)
            for i in gl.static_range(PIECES):
                if i < num_pieces:
                    copy_gathered(pipeline.rows.index(stage * (LINES_OF_ROWS // 32) + i), x + k * 64 + offsets[i])
            async_copy.mbarrier_arrive(pipeline.full.index(stage), increment_count=False)
        step += sizes.STEPS
