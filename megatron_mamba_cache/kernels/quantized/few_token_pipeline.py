"""Pipeline stages of codes and tokens for `few_token_hopper`, the warp that fills them, and the division of work.

A step is DEPTH inputs of a tile of outputs. The steps of all tiles, in order, are divided among the programs.
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


@aggregate
class Sizes:
    """Compile-time dimensions: ROWS outputs in STEPS steps of inputs, WORK steps of all tiles, and those of a tile."""

    ROWS: gl.constexpr
    STEPS: gl.constexpr
    WORK: gl.constexpr
    PROGRAMS: gl.constexpr
    TOKENS: gl.constexpr
    UNITS: gl.constexpr
    STAGES: gl.constexpr
    GRID_COLUMNS: gl.constexpr
    BLOCK_ROWS: gl.constexpr
    BLOCK_COLUMNS: gl.constexpr
    HAS_FACTORS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, ROWS, STEPS, WORK, PROGRAMS, TOKENS, UNITS, STAGES, GRID_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS,
        HAS_FACTORS,
    ):  # fmt: skip
        self.ROWS = gl.constexpr(ROWS)
        self.STEPS = gl.constexpr(STEPS)
        self.WORK = gl.constexpr(WORK)
        self.PROGRAMS = gl.constexpr(PROGRAMS)
        self.TOKENS = gl.constexpr(TOKENS)
        self.UNITS = gl.constexpr(UNITS)
        self.STAGES = gl.constexpr(STAGES)
        self.GRID_COLUMNS = gl.constexpr(GRID_COLUMNS)
        self.BLOCK_ROWS = gl.constexpr(BLOCK_ROWS)
        self.BLOCK_COLUMNS = gl.constexpr(BLOCK_COLUMNS)
        self.HAS_FACTORS = gl.constexpr(HAS_FACTORS)


@aggregate
class Pipeline:
    """Stages of codes [outputs, words] and of tokens [TOKENS, DEPTH], and barriers for full and empty ones."""

    codes: gl.shared_memory_descriptor
    tokens: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, codes, tokens, full, empty):
        self.codes = codes
        self.tokens = tokens
        self.full = full
        self.empty = empty


@gluon.jit
def init_barriers(pipeline, STAGES: gl.constexpr):
    """Initialize the barriers of a pipeline with all stages empty; both groups release a stage."""
    for stage in gl.static_range(STAGES):
        mbarrier.init(pipeline.full.index(stage), count=1)
        mbarrier.init(pipeline.empty.index(stage), count=GROUPS)
    fence_async_shared()


@gluon.jit
def allocate_pipeline(codes, tokens, sizes):
    """Allocate the pipeline with all stages empty; call it before warp specialization."""
    pipeline = Pipeline(
        gl.allocate_shared_memory(gl.int16, [sizes.STAGES, GROUPS * sizes.UNITS * UNIT, DEPTH // 2], codes.layout),
        gl.allocate_shared_memory(gl.bfloat16, [sizes.STAGES, sizes.TOKENS, DEPTH], tokens.layout),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
    )
    init_barriers(pipeline, sizes.STAGES)
    return pipeline


@gluon.jit
def first_step(program, WORK: gl.constexpr, PROGRAMS: gl.constexpr):
    """Return the first step of a program; steps of all tiles are counted in order."""
    return program * WORK // PROGRAMS


@gluon.jit
def program_of(step, WORK: gl.constexpr, PROGRAMS: gl.constexpr):
    """Return the program that computes a step: the last one with `first_step` <= step."""
    return ((step + 1) * PROGRAMS - 1) // WORK


@gluon.jit
def _copy_codes(codes, pipeline, step, stage, sizes):
    """Start to load the codes of a step; its `full` barrier expects the tokens too."""
    OUTPUTS: gl.constexpr = GROUPS * sizes.UNITS * UNIT
    full = pipeline.full.index(stage)
    mbarrier.expect(full, OUTPUTS * DEPTH + sizes.TOKENS * DEPTH * 2)
    corner = [step // sizes.STEPS * OUTPUTS, step % sizes.STEPS * (DEPTH // 2)]
    load_tile(codes, corner, full, pipeline.codes.index(stage))


@gluon.jit
def _copy_tokens(tokens, pipeline, step, stage, sizes):
    """Start to load the tokens of a step; missing ones are 0."""
    corner = [0, step % sizes.STEPS * DEPTH]
    load_tile(tokens, corner, pipeline.full.index(stage), pipeline.tokens.index(stage))


@gluon.jit
def fill(codes, tokens, pipeline, sizes, OVERLAPS: gl.constexpr):
    """Load the program's steps into free stages, the first codes while the previous kernel runs; on one warp."""
    begin = first_step(gl.program_id(0), sizes.WORK, sizes.PROGRAMS)
    count = first_step(gl.program_id(0) + 1, sizes.WORK, sizes.PROGRAMS) - begin
    ahead = gl.minimum(count, sizes.STAGES)
    for k in range(ahead):
        _copy_codes(codes, pipeline, begin + k, k, sizes)
    await_launcher(OVERLAPS)
    for k in range(ahead):
        _copy_tokens(tokens, pipeline, begin + k, k, sizes)
    for k in range(ahead, count):
        stage = k % sizes.STAGES
        mbarrier.wait(pipeline.empty.index(stage), (k // sizes.STAGES & 1) ^ 1)
        _copy_codes(codes, pipeline, begin + k, stage, sizes)
        _copy_tokens(tokens, pipeline, begin + k, stage, sizes)
