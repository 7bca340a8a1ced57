"""Pipeline stages of codes and tokens for `split_token_hopper`, the warp that fills them, and the division of work.

A step is DEPTH inputs of a tile of outputs. Each program computes WHOLE tiles alone; the steps of the tiles that remain
are divided, in order, among the first SHARERS programs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from ..gluon_common import await_launcher, load_tile

DEPTH = gl.constexpr(128)
"""Inputs of a step."""
UNIT = gl.constexpr(64)
"""Outputs that a group of warps multiplies at once."""
GROUPS = gl.constexpr(2)
"""Groups of four warps that multiply."""
ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
"""Shared-memory layout of a row of scales."""


@aggregate
class Sizes:
    """Compile-time dimensions: ROWS outputs in tiles of STEPS steps, and the division of tiles.

    SHARED is the number of steps that programs share. LONGEST is the most steps of a program, rounded up to a power of
    2. UNITS is the number of units of a group.
    """

    ROWS: gl.constexpr
    STEPS: gl.constexpr
    WHOLE: gl.constexpr
    SHARED: gl.constexpr
    PROGRAMS: gl.constexpr
    SHARERS: gl.constexpr
    LONGEST: gl.constexpr
    TOKENS: gl.constexpr
    UNITS: gl.constexpr
    STAGES: gl.constexpr
    GRID_COLUMNS: gl.constexpr
    BLOCK_ROWS: gl.constexpr
    BLOCK_COLUMNS: gl.constexpr
    HAS_FACTORS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, ROWS, STEPS, WHOLE, SHARED, PROGRAMS, SHARERS, LONGEST, TOKENS, UNITS, STAGES, GRID_COLUMNS, BLOCK_ROWS,
        BLOCK_COLUMNS, HAS_FACTORS,
    ):  # fmt: skip
        self.ROWS = gl.constexpr(ROWS)
        self.STEPS = gl.constexpr(STEPS)
        self.WHOLE = gl.constexpr(WHOLE)
        self.SHARED = gl.constexpr(SHARED)
        self.PROGRAMS = gl.constexpr(PROGRAMS)
        self.SHARERS = gl.constexpr(SHARERS)
        self.LONGEST = gl.constexpr(LONGEST)
        self.TOKENS = gl.constexpr(TOKENS)
        self.UNITS = gl.constexpr(UNITS)
        self.STAGES = gl.constexpr(STAGES)
        self.GRID_COLUMNS = gl.constexpr(GRID_COLUMNS)
        self.BLOCK_ROWS = gl.constexpr(BLOCK_ROWS)
        self.BLOCK_COLUMNS = gl.constexpr(BLOCK_COLUMNS)
        self.HAS_FACTORS = gl.constexpr(HAS_FACTORS)


@aggregate
class Pipeline:
    """Stages, with barriers for full and empty ones, and the scales of weights.

    A stage has codes [GROUPS * UNITS * UNIT, DEPTH], rows of tokens [2 * TOKENS, DEPTH] and the tokens' scales, padded
    to 128 bytes. `of_weights` [GROUPS * UNITS, LONGEST] holds the scales of all the program's steps.
    """

    codes: gl.shared_memory_descriptor
    tokens: gl.shared_memory_descriptor
    of_tokens: gl.shared_memory_descriptor
    of_weights: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, codes, tokens, of_tokens, of_weights, full, empty):
        self.codes = codes
        self.tokens = tokens
        self.of_tokens = of_tokens
        self.of_weights = of_weights
        self.full = full
        self.empty = empty


@gluon.jit
def allocate_pipeline(codes, tokens, of_tokens, sizes):
    """Allocate the pipeline with all stages empty; call it before warp specialization."""
    pipeline = Pipeline(
        gl.allocate_shared_memory(gl.float8e4nv, [sizes.STAGES, GROUPS * sizes.UNITS * UNIT, DEPTH], codes.layout),
        gl.allocate_shared_memory(gl.float8e4nv, [sizes.STAGES, 2 * sizes.TOKENS, DEPTH], tokens.layout),
        gl.allocate_shared_memory(gl.float32, [sizes.STAGES, 1, of_tokens.block_shape[1]], of_tokens.layout),
        gl.allocate_shared_memory(gl.float32, [GROUPS * sizes.UNITS, sizes.LONGEST], ROW),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for stage in gl.static_range(sizes.STAGES):
        mbarrier.init(pipeline.full.index(stage), count=1)
        mbarrier.init(pipeline.empty.index(stage), count=GROUPS)
    fence_async_shared()
    return pipeline


@gluon.jit
def first_shared(sharer, SHARED: gl.constexpr, SHARERS: gl.constexpr):
    """Return the first shared step of one of the programs that share steps; their end for `sharer` = SHARERS."""
    return sharer * SHARED // SHARERS


@gluon.jit
def shared_steps(sizes):
    """Return the first shared step of this program and the end of its shared steps; both are equal if it has none."""
    begin = first_shared(gl.minimum(gl.program_id(0), sizes.SHARERS), sizes.SHARED, sizes.SHARERS)
    return begin, first_shared(gl.minimum(gl.program_id(0) + 1, sizes.SHARERS), sizes.SHARED, sizes.SHARERS)


@gluon.jit
def step_of(number, sizes):
    """Return the step, counted over all tiles, that has a number among the steps of this program."""
    ALONE: gl.constexpr = sizes.WHOLE * sizes.STEPS
    begin, _ = shared_steps(sizes)
    return number + gl.where(number < ALONE, gl.program_id(0) * ALONE, (sizes.PROGRAMS - 1) * ALONE + begin)


@gluon.jit
def _copy_codes(codes, of_tokens, pipeline, number, stage, sizes):
    """Start to load the codes of a step; its `full` barrier expects the tokens and their scales too."""
    OUTPUTS: gl.constexpr = GROUPS * sizes.UNITS * UNIT
    full, step = pipeline.full.index(stage), step_of(number, sizes)
    mbarrier.expect(full, (OUTPUTS + 2 * sizes.TOKENS) * DEPTH + 4 * of_tokens.block_shape[1])
    load_tile(codes, [step // sizes.STEPS * OUTPUTS, step % sizes.STEPS * DEPTH], full, pipeline.codes.index(stage))


@gluon.jit
def _copy_tokens(tokens, of_tokens, pipeline, number, stage, sizes):
    """Start to load the rows of the tokens of a step, and their scales."""
    full, column = pipeline.full.index(stage), step_of(number, sizes) % sizes.STEPS
    load_tile(tokens, [0, column * DEPTH], full, pipeline.tokens.index(stage))
    load_tile(of_tokens, [column, 0], full, pipeline.of_tokens.index(stage))


@gluon.jit
def fill(codes, tokens, of_tokens, pipeline, sizes, OVERLAPS: gl.constexpr):
    """Load the program's steps into free stages, the first codes while the previous kernel runs; on one warp."""
    begin, end = shared_steps(sizes)
    count = sizes.WHOLE * sizes.STEPS + end - begin
    ahead = gl.minimum(count, sizes.STAGES)
    for k in range(ahead):
        _copy_codes(codes, of_tokens, pipeline, k, k, sizes)
    await_launcher(OVERLAPS)
    for k in range(ahead):
        _copy_tokens(tokens, of_tokens, pipeline, k, k, sizes)
    for k in range(ahead, count):
        stage = k % sizes.STAGES
        mbarrier.wait(pipeline.empty.index(stage), (k // sizes.STAGES & 1) ^ 1)
        _copy_codes(codes, of_tokens, pipeline, k, stage, sizes)
        _copy_tokens(tokens, of_tokens, pipeline, k, stage, sizes)
