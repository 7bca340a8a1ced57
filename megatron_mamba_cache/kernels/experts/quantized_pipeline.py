"""Pipeline of `quantized_experts_hopper`: stages of codes and rows, warps that fill them, and the order of work.

A unit of work is a tile of rows of one expert, and the outputs of two times 64 rows of its weights; in a gated layer
these are 64 gates and the 64 outputs that they gate. Units of one tile are consecutive. A step is DEPTH inputs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from ..gluon_common import await_then_release, copy_gathered, load_tile
from ..quantized.quantized_matrix import RUN

WORDS = gl.constexpr(64)
"""Words of each row of weights in a step."""
RUN_WORDS = gl.constexpr(RUN)
"""Words of a run."""
RUNS = gl.constexpr(64 // RUN)
"""Runs that a step takes of each row of weights."""
BOX_ROWS = gl.constexpr(64)
"""Rows of weights that are multiplied at once; a unit has two times as many."""


@aggregate
class Sizes:
    """Compile-time dimensions of an expert, of units of work and of the pipeline.

    HAS_BLOCKS is True for FP8 with scales of blocks. DIVISOR is the number of experts of a token if rows are gathered
    from tokens, else 0.
    """

    INPUTS: gl.constexpr
    OUTPUTS: gl.constexpr
    ACTIVATION: gl.constexpr
    IS_GATED: gl.constexpr
    BITS: gl.constexpr
    BLOCK_ROWS: gl.constexpr
    BLOCK_COLUMNS: gl.constexpr
    HAS_BLOCKS: gl.constexpr
    HAS_FACTORS: gl.constexpr
    IS_NVFP4: gl.constexpr
    DEPTH: gl.constexpr
    STEPS: gl.constexpr
    TILES: gl.constexpr
    ROWS: gl.constexpr
    STAGES: gl.constexpr
    DIVISOR: gl.constexpr
    OVERLAPS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, INPUTS, OUTPUTS, ACTIVATION, BITS, BLOCK_ROWS, BLOCK_COLUMNS, HAS_BLOCKS, HAS_FACTORS, ROWS, STAGES,
        DIVISOR, OVERLAPS,
    ):  # fmt: skip
        depth, is_gated = 64 * 16 // BITS, ACTIVATION == "gated_silu"
        outputs = 64 if is_gated else 128
        self.INPUTS = gl.constexpr(INPUTS)
        self.OUTPUTS = gl.constexpr(OUTPUTS)
        self.ACTIVATION = gl.constexpr(ACTIVATION)
        self.IS_GATED = gl.constexpr(is_gated)
        self.BITS = gl.constexpr(BITS)
        self.BLOCK_ROWS = gl.constexpr(BLOCK_ROWS)
        self.BLOCK_COLUMNS = gl.constexpr(BLOCK_COLUMNS)
        self.HAS_BLOCKS = gl.constexpr(HAS_BLOCKS)
        self.HAS_FACTORS = gl.constexpr(HAS_FACTORS)
        self.IS_NVFP4 = gl.constexpr(BITS == 4 and BLOCK_COLUMNS == 16)
        self.DEPTH = gl.constexpr(depth)
        self.STEPS = gl.constexpr((INPUTS + depth - 1) // depth)
        self.TILES = gl.constexpr((OUTPUTS + outputs - 1) // outputs)
        self.ROWS = gl.constexpr(ROWS)
        self.STAGES = gl.constexpr(STAGES)
        self.DIVISOR = gl.constexpr(DIVISOR)
        self.OVERLAPS = gl.constexpr(OVERLAPS)


@aggregate
class Unit:
    """A unit of work: its expert, the first row and the end row of its tile, and its first output."""

    expert: gl.tensor
    first: gl.tensor
    last: gl.tensor
    output: gl.tensor

    @gluon.constexpr_function
    def __init__(self, expert, first, last, output):
        self.expert = expert
        self.first = first
        self.last = last
        self.output = output


@gluon.jit
def find_unit(tiles, number, num_units, sizes):
    """Return unit `number`, or the last one for larger numbers."""
    number = gl.minimum(number, num_units - 1)
    entry = tiles + (1 + number // sizes.TILES) * 4
    output = number % sizes.TILES * (64 if sizes.IS_GATED else 128)
    return Unit(gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), output)


@gluon.jit
def weights_of(unit, BOX: gl.constexpr, sizes):
    """Return the first row of one of a unit's two boxes, within its expert's weights; boxes overlap at the end."""
    if sizes.IS_GATED:
        row = BOX * sizes.OUTPUTS + unit.output
    else:
        row = gl.minimum(unit.output + BOX * BOX_ROWS, sizes.OUTPUTS - BOX_ROWS)
    return row


@aggregate
class Pipeline:
    """Stages of codes [2 * BOX_ROWS, WORDS] and of rows [ROWS, DEPTH], and barriers for full and empty ones.

    With NVFP4 also the scales of runs [2 * BOX_ROWS, RUNS], four each: memory takes longer to answer than a step takes.
    """

    codes: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, codes, scales, rows, full, empty):
        self.codes = codes
        self.scales = scales
        self.rows = rows
        self.full = full
        self.empty = empty


@gluon.jit
def allocate_pipeline(codes, rows, sizes):
    """Allocate the pipeline with all stages empty; call it before warp specialization."""
    # A stage is full after one arrival for codes, one for TMA rows, and one per thread that copies rows or scales.
    ARRIVALS: gl.constexpr = 1 + 128 if sizes.DIVISOR > 0 else 1 + 1 + (32 if sizes.IS_NVFP4 else 0)
    SCALES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SHAPE: gl.constexpr = [sizes.STAGES, 2 * BOX_ROWS, RUNS] if sizes.IS_NVFP4 else [1, 1, RUNS]
    pipeline = Pipeline(
        gl.allocate_shared_memory(gl.int16, [sizes.STAGES * 2, BOX_ROWS, WORDS], codes.layout),
        gl.allocate_shared_memory(gl.int32, SHAPE, SCALES),
        gl.allocate_shared_memory(gl.bfloat16, [sizes.STAGES, sizes.ROWS, sizes.DEPTH], rows.layout),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for stage in gl.static_range(sizes.STAGES):
        mbarrier.init(pipeline.full.index(stage), count=ARRIVALS)
        mbarrier.init(pipeline.empty.index(stage), count=1)
    fence_async_shared()
    return pipeline


@gluon.jit
def _await_empty(pipeline, step, sizes):
    """Wait until the stage of a step is empty."""
    mbarrier.wait(pipeline.empty.index(step % sizes.STAGES), (step // sizes.STAGES & 1) ^ 1)


@gluon.jit
def _copy_codes(codes, pipeline, stage, unit, k, sizes):
    """Start to load the codes of step `k` of a unit; missing ones are 0."""
    OF_EXPERT: gl.constexpr = (2 if sizes.IS_GATED else 1) * sizes.OUTPUTS
    full = pipeline.full.index(stage)
    mbarrier.expect(full, 2 * BOX_ROWS * WORDS * 2)
    for box in gl.static_range(2):
        row = unit.expert * OF_EXPERT + weights_of(unit, box, sizes)
        load_tile(codes, [row, k * WORDS], full, pipeline.codes.index(stage * 2 + box))


@gluon.jit
def _copy_scales(scales, pipeline, stage, unit, k, sizes, WARPS: gl.constexpr):
    """Start to load the scales of step `k` of a unit; missing ones are 0."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // RUNS, RUNS], [WARPS, 1], [1, 0])
    OF_EXPERT: gl.constexpr = (2 if sizes.IS_GATED else 1) * sizes.OUTPUTS
    OF_ROW: gl.constexpr = sizes.INPUTS // (4 * RUN_WORDS)
    row = gl.arange(0, 2 * BOX_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    run = k * RUNS + gl.arange(0, RUNS, layout=gl.SliceLayout(0, LAYOUT))
    is_here = (row >= 0)[:, None] & (run < OF_ROW)[None, :]
    row += gl.where(row < BOX_ROWS, weights_of(unit, 0, sizes), weights_of(unit, 1, sizes) - BOX_ROWS)
    pointers = scales + (unit.expert * OF_EXPERT).to(gl.int64) * OF_ROW + (row[:, None] * OF_ROW + run[None, :])
    copy_gathered(pipeline.scales.index(stage), pointers, mask=is_here)


@gluon.jit
def fill_with_codes(codes, scales, pipeline, tiles, sizes):
    """Load the codes, and the scales of NVFP4, of all units of this program into empty stages; on one warp."""
    num_units = gl.load(tiles) * sizes.TILES
    step = 0
    for number in range(gl.program_id(0), num_units, gl.num_programs(0)):
        unit = find_unit(tiles, number, num_units, sizes)
        for k in range(sizes.STEPS):
            stage = (step + k) % sizes.STAGES
            _await_empty(pipeline, step + k, sizes)
            _copy_codes(codes, pipeline, stage, unit, k, sizes)
            if sizes.IS_NVFP4:
                _copy_scales(scales, pipeline, stage, unit, k, sizes, 1)
                async_copy.mbarrier_arrive(pipeline.full.index(stage), increment_count=False)
        step += sizes.STEPS


@gluon.jit
def fill_with_rows(rows, pipeline, tiles, sizes):
    """Load the rows of all units of this program into empty stages, after the previous kernel; on one warp.

    A tile may include rows of other experts, whose results are not stored.
    """
    num_units = gl.load(tiles) * sizes.TILES
    await_then_release(sizes.OVERLAPS)
    step = 0
    for number in range(gl.program_id(0), num_units, gl.num_programs(0)):
        unit = find_unit(tiles, number, num_units, sizes)
        for k in range(sizes.STEPS):
            stage = (step + k) % sizes.STAGES
            _await_empty(pipeline, step + k, sizes)
            mbarrier.expect(pipeline.full.index(stage), sizes.ROWS * sizes.DEPTH * 2)
            load_tile(rows, [unit.first, k * sizes.DEPTH], pipeline.full.index(stage), pipeline.rows.index(stage))
        step += sizes.STEPS


@gluon.jit
def gather(codes, scales, x, x_stride, pairs, pipeline, tiles, sizes):
    """Load codes and scales and gather rows for all units of this program into empty stages; on four warps."""
    LANES: gl.constexpr = sizes.DEPTH // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    column = gl.arange(0, sizes.DEPTH, layout=gl.SliceLayout(0, LAYOUT))
    num_units = gl.load(tiles) * sizes.TILES
    step = 0
    for number in range(gl.program_id(0), num_units, gl.num_programs(0)):
        unit = find_unit(tiles, number, num_units, sizes)
        row = gl.minimum(unit.first + gl.arange(0, sizes.ROWS, layout=gl.SliceLayout(1, LAYOUT)), unit.last - 1)
        offsets = (gl.load(pairs + row) // sizes.DIVISOR * x_stride)[:, None] + column[None, :]
        for k in range(sizes.STEPS):
            stage = (step + k) % sizes.STAGES
            _await_empty(pipeline, step + k, sizes)
            _copy_codes(codes, pipeline, stage, unit, k, sizes)
            if sizes.IS_NVFP4:
                _copy_scales(scales, pipeline, stage, unit, k, sizes, 4)
            if sizes.INPUTS % sizes.DEPTH == 0:
                copy_gathered(pipeline.rows.index(stage), x + k * sizes.DEPTH + offsets)
            else:
                inside = (row >= 0)[:, None] & (k * sizes.DEPTH + column < sizes.INPUTS)[None, :]
                copy_gathered(pipeline.rows.index(stage), x + k * sizes.DEPTH + offsets, mask=inside)
            async_copy.mbarrier_arrive(pipeline.full.index(stage), increment_count=False)
        step += sizes.STEPS
