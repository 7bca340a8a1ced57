"""Product of up to 16 tokens with an FP8 weight on Hopper GPUs, in Gluon: FP8 tensor cores multiply codes as they are.

`split_tokens` writes a token as two rows of FP8 values, with a scale for each 128 inputs. So no code is decoded. A step
is 128 inputs of a tile of 128 outputs. Tensor cores sum its products and keep 13 bits after the first one; the sums of
both rows, times their scales, are added in fp32.

One warp loads codes and tokens into pipeline stages with TMA. Two groups of four warps multiply 64 outputs each. The
steps of all tiles are divided among the programs as in `few_token_hopper`. A program uses few registers, so that
programs of the next kernels can start on the same multiprocessor.
"""

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from ..gluon_common import await_launcher, load_tile, reinterpret, release, thread_barrier
from ..overlap import overlapping
from .few_token_pipeline import DEPTH, GROUPS, UNIT, Sizes, first_step, init_barriers
from .few_token_results import Results, put, put_part
from .few_token_tiles import SplitTokenTiles, fits_boxes
from .quantized_matrix import QuantizedMatrix
from .split_tokens import LOW_SCALE, SplitTokens

_LOW_SCALE = gl.constexpr(LOW_SCALE)
_SCALES = gl.constexpr(32)
"""Scales of a stage: those of the tokens, padded to 128 bytes, the alignment that TMA needs."""
_ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_REGISTERS = 64
"""Of a thread, on average."""
_MULTIPLY_REGISTERS = 80
_FILL_REGISTERS = 24


@aggregate
class _Pipeline:
    """Stages, with barriers for full and empty ones, and the scales of weights.

    A stage has codes [2 * UNIT, DEPTH], rows of tokens [2 * TOKENS, DEPTH] and scales of tokens [1, _SCALES].
    `of_weights` [GROUPS, LONGEST] holds the scales of all the program's steps.
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
def _allocate_pipeline(codes, tokens, of_tokens, sizes, LONGEST: gl.constexpr):
    """Allocate the pipeline with all stages empty; call it before warp specialization."""
    pipeline = _Pipeline(
        gl.allocate_shared_memory(gl.float8e4nv, [sizes.STAGES, GROUPS * UNIT, DEPTH], codes.layout),
        gl.allocate_shared_memory(gl.float8e4nv, [sizes.STAGES, 2 * sizes.TOKENS, DEPTH], tokens.layout),
        gl.allocate_shared_memory(gl.float32, [sizes.STAGES, 1, _SCALES], of_tokens.layout),
        gl.allocate_shared_memory(gl.float32, [GROUPS, LONGEST], _ROW),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [sizes.STAGES, 1], mbarrier.MBarrierLayout()),
    )
    init_barriers(pipeline, sizes.STAGES)
    return pipeline


@gluon.jit
def _copy_codes(codes, pipeline, step, stage, sizes):
    """Start to load the codes of a step; its `full` barrier expects the tokens and their scales too."""
    full = pipeline.full.index(stage)
    mbarrier.expect(full, (GROUPS * UNIT + 2 * sizes.TOKENS) * DEPTH + 4 * _SCALES)
    corner = [step // sizes.STEPS * (GROUPS * UNIT), step % sizes.STEPS * DEPTH]
    load_tile(codes, corner, full, pipeline.codes.index(stage))


@gluon.jit
def _copy_tokens(tokens, of_tokens, pipeline, step, stage, sizes):
    """Start to load the rows of the tokens of a step, and their scales."""
    full, column = pipeline.full.index(stage), step % sizes.STEPS
    load_tile(tokens, [0, column * DEPTH], full, pipeline.tokens.index(stage))
    load_tile(of_tokens, [column, 0], full, pipeline.of_tokens.index(stage))


@gluon.jit
def _fill(codes, tokens, of_tokens, pipeline, sizes, OVERLAPS: gl.constexpr):
    """Load the program's steps into free stages, the first codes while the previous kernel runs; on one warp."""
    begin = first_step(gl.program_id(0), sizes.WORK, sizes.PROGRAMS)
    count = first_step(gl.program_id(0) + 1, sizes.WORK, sizes.PROGRAMS) - begin
    ahead = gl.minimum(count, sizes.STAGES)
    for k in range(ahead):
        _copy_codes(codes, pipeline, begin + k, k, sizes)
    await_launcher(OVERLAPS)
    for k in range(ahead):
        _copy_tokens(tokens, of_tokens, pipeline, begin + k, k, sizes)
    for k in range(ahead, count):
        stage = k % sizes.STAGES
        mbarrier.wait(pipeline.empty.index(stage), (k // sizes.STAGES & 1) ^ 1)
        _copy_codes(codes, pipeline, begin + k, stage, sizes)
        _copy_tokens(tokens, of_tokens, pipeline, begin + k, stage, sizes)


@gluon.jit
def _keep_scales(pipeline, scales, begin, sizes, GROUP: gl.constexpr, LONGEST: gl.constexpr):
    """Load the scales of this group's weights in all the program's steps from `begin` on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    step = gl.minimum(begin + gl.arange(0, LONGEST, layout=LAYOUT), sizes.WORK - 1)
    row = gl.minimum((step // sizes.STEPS * GROUPS + GROUP) * UNIT, sizes.ROWS - 1) // sizes.BLOCK_ROWS
    column = step % sizes.STEPS * DEPTH // sizes.BLOCK_COLUMNS
    pipeline.of_weights.index(GROUP).store(gl.load(scales + row * sizes.GRID_COLUMNS + column))
    thread_barrier()


@gluon.jit
def _scales_of(pipeline, number, sizes, GROUP: gl.constexpr, LONGEST: gl.constexpr, SUMS: gl.constexpr):
    """Return the scales [1, TOKENS] of the sums of the program's step `number`."""
    of_tokens = reinterpret(pipeline.of_tokens, gl.float32, [sizes.STAGES, _SCALES], _ROW)
    scale = of_tokens.index(number % sizes.STAGES).slice(0, sizes.TOKENS, 0).load(gl.SliceLayout(0, SUMS))[None, :]
    if sizes.GRID_COLUMNS > 0:
        of_weights = reinterpret(pipeline.of_weights, gl.float32, [GROUPS * LONGEST, 1], _ROW)
        scale *= of_weights.index(GROUP * LONGEST + number).load(gl.SliceLayout(1, SUMS))[:, None]
    return scale


@gluon.jit
def _sum_steps(pipeline, number, count, sizes, GROUP: gl.constexpr, LONGEST: gl.constexpr, SUMS: gl.constexpr):
    """Return the sums [UNIT, TOKENS] of a group over `count` steps of a tile, from the program's step `number` on."""
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * sizes.TOKENS, 32])
    codes = reinterpret(pipeline.codes, gl.float8e4nv, [sizes.STAGES * GROUPS, UNIT, DEPTH], pipeline.codes.layout)
    nothing = gl.zeros([UNIT, 2 * sizes.TOKENS], gl.float32, layout=PRODUCTS)
    sums = gl.zeros([UNIT, sizes.TOKENS], gl.float32, layout=SUMS)
    for k in range(number, number + count):
        stage = k % sizes.STAGES
        mbarrier.wait(pipeline.full.index(stage), k // sizes.STAGES & 1)
        tokens = pipeline.tokens.index(stage).permute((1, 0))
        products = warpgroup_mma(codes.index(stage * GROUPS + GROUP), tokens, nothing, use_acc=False, is_async=True)
        scale = _scales_of(pipeline, k, sizes, GROUP, LONGEST, SUMS)
        products = warpgroup_mma_wait(0, deps=[products])
        thread_barrier()  # every warp has read its codes
        mbarrier.arrive(pipeline.empty.index(stage), count=1)
        high, low = gl.split(products.reshape([UNIT, 2, sizes.TOKENS]).permute([0, 2, 1]))  # registers stay in place
        found = gl.fma(gl.convert_layout(low, SUMS), _LOW_SCALE, gl.convert_layout(high, SUMS))
        sums = gl.fma(found, scale, sums)
    return sums


@gluon.jit
def _multiply(pipeline, scales, results, sizes, GROUP: gl.constexpr, LONGEST: gl.constexpr):
    """Compute this group's outputs of the program's steps; on four warps."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.TOKENS, 32])
    begin = first_step(gl.program_id(0), sizes.WORK, sizes.PROGRAMS)
    end = first_step(gl.program_id(0) + 1, sizes.WORK, sizes.PROGRAMS)
    if sizes.GRID_COLUMNS > 0:
        _keep_scales(pipeline, scales, begin, sizes, GROUP, LONGEST)
    for tile in range(begin // sizes.STEPS, (end - 1) // sizes.STEPS + 1):
        low = gl.maximum(begin, tile * sizes.STEPS)
        count = gl.minimum(end, (tile + 1) * sizes.STEPS) - low
        first = (tile * GROUPS + GROUP) * UNIT
        sums = _sum_steps(pipeline, low - begin, count, sizes, GROUP, LONGEST, SUMS)
        if first < sizes.ROWS:
            if count == sizes.STEPS:
                put(results, sums, first, sizes, SUMS)
            else:
                put_part(results, (sums,), tile, first, low == tile * sizes.STEPS, sizes, GROUP, SUMS)


@gluon.jit(do_not_specialize=["num_tokens", "out_stride"])
def _split_tokens_hopper_kernel(
    codes, tokens, of_tokens, scales, factors, out, parts, counters, out_stride, num_tokens,
    ROWS: gl.constexpr, STEPS: gl.constexpr, WORK: gl.constexpr, PROGRAMS: gl.constexpr, LONGEST: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, GRID_COLUMNS: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    BLOCK_COLUMNS: gl.constexpr, HAS_FACTORS: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr,
    FILL_REGISTERS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    release(OVERLAPS)
    sizes = Sizes(
        ROWS, STEPS, WORK, PROGRAMS, TOKENS, 1, STAGES, GRID_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS, HAS_FACTORS
    )  # fmt: skip
    results = Results(out, out_stride, num_tokens, factors, parts, counters)
    pipeline = _allocate_pipeline(codes, tokens, of_tokens, sizes, LONGEST)
    gl.warp_specialize(
        [
            (_multiply, (pipeline, scales, results, sizes, 0, LONGEST)),
            (_multiply, (pipeline, scales, results, sizes, 1, LONGEST)),
            (_fill, (codes, tokens, of_tokens, pipeline, sizes, OVERLAPS)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, FILL_REGISTERS],
    )


def multiply_split_tokens(
    tokens: SplitTokens, weight: QuantizedMatrix, counters: Tensor, out: Tensor, tiles: SplitTokenTiles
) -> None:
    """Write x @ W.T to `out` [num_tokens, outputs]; other arguments are those of `multiply_few_tokens`.

    Long because the kernel has many named arguments.
    """
    rows, columns = weight.shape
    num_rows, steps, num_tiles = tokens.scales.shape[1], triton.cdiv(columns, DEPTH.value), tiles.num_tiles(weight)
    work = num_tiles * steps
    if num_rows != tiles.tokens or len(out) > num_rows or tiles.programs > work or not fits_boxes(weight):
        raise ValueError(
            f"need FP8 with blocks of units, tokens padded to {tiles.tokens} and at most {work} programs; found "
            f"{weight.code_bits}-bit codes in blocks of {weight.block_rows} x {weight.block_columns}, {len(out)} "
            f"tokens padded to {num_rows}, and {tiles.programs} programs"
        )
    size_of_parts = 2 * tiles.programs * tiles.outputs * num_rows
    codes = weight.words.view(torch.float8_e4m3fn)
    _split_tokens_hopper_kernel[(tiles.programs,)](
        codes=TensorDescriptor.from_tensor(codes, [tiles.outputs, DEPTH.value], _layout(128, 8)),
        tokens=TensorDescriptor.from_tensor(tokens.halves, [2 * num_rows, DEPTH.value], _layout(128, 8)),
        of_tokens=TensorDescriptor.from_tensor(tokens.scales, [1, _SCALES.value], _layout(0, 32)),
        scales=tokens.scales if weight.scales is None else weight.scales,
        factors=tokens.scales if weight.factors is None else weight.factors,
        out=out,
        parts=torch.empty(size_of_parts, dtype=torch.float32, device=out.device),
        counters=counters,
        out_stride=out.stride(0),
        num_tokens=len(out),
        ROWS=rows,
        STEPS=steps,
        WORK=work,
        PROGRAMS=tiles.programs,
        LONGEST=triton.next_power_of_2(triton.cdiv(work, tiles.programs)),
        TOKENS=num_rows,
        STAGES=tiles.stages,
        GRID_COLUMNS=0 if weight.scales is None else weight.scales.shape[1],
        BLOCK_ROWS=weight.block_rows,
        BLOCK_COLUMNS=weight.block_columns,
        HAS_FACTORS=weight.factors is not None,
        MULTIPLY_REGISTERS=_MULTIPLY_REGISTERS,
        FILL_REGISTERS=_FILL_REGISTERS,
        num_warps=4,
        maxnreg=_REGISTERS,
        enable_fp_fusion=True,
        **overlapping(out.device),
    )


@cache
def _layout(swizzled_bytes: int, bits: int) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a TMA box; cached because constructing it is slow."""
    return gl.NVMMASharedLayout(swizzled_bytes, bits, rank=2)
