"""Product of few tokens with an FP8 weight on Hopper GPUs, in Gluon; loads, decoding and matmuls overlap.

One warp loads codes and tokens into pipeline stages with TMA. Two groups of four warps read the codes as left operands
of wgmma, decode them in registers, and multiply them with the tokens in shared memory. Each group has UNITS units of 64
outputs: it decodes the next unit while tensor cores multiply the previous one, and the other group fills the gaps.

A step is 128 inputs of a tile of outputs. The steps of all tiles, in order, are divided among the programs: one per
multiprocessor, so all of them end together. A program that computes a part of a tile writes its sums; the last one
adds the sums in the order of the inputs. The division depends on the weight's shape only, and so do a token's bits.
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

from ..gluon_common import release, thread_barrier
from ..overlap import overlapping
from .code_tiles import DECODE_PAIRS
from .few_token_pipeline import DEPTH, GROUPS, UNIT, Sizes, allocate_pipeline, fill, first_step
from .few_token_results import Results, put, put_part
from .few_token_tiles import HopperTiles, fits_boxes
from .quantized_matrix import RUN, QuantizedMatrix

_RUN = gl.constexpr(RUN)
_MULTIPLY_REGISTERS = 232
_FILL_REGISTERS = 40


@gluon.jit
def _decoded(words, WEIGHTS: gl.constexpr):
    """Return the weights [64, DEPTH] of words [64, DEPTH / 2]; values only change their register."""
    low, high = gl.inline_asm_elementwise(DECODE_PAIRS, "=r,=r,r", [words], (gl.bfloat16, gl.bfloat16), True, 2)
    runs = gl.join(low, high).reshape([UNIT, DEPTH // (2 * _RUN), _RUN, 2])
    return gl.convert_layout(runs.permute([0, 1, 3, 2]).reshape([UNIT, DEPTH]), WEIGHTS)


@gluon.jit
def _scales(scales, first, step, sizes):
    """Return the scale of each unit of a group, whose first output is `first`, in a step of its tile."""
    found = ()
    for unit in gl.static_range(sizes.UNITS):
        row = gl.minimum(first + unit * UNIT, sizes.ROWS - 1) // sizes.BLOCK_ROWS
        column = gl.minimum(step * DEPTH // sizes.BLOCK_COLUMNS, sizes.GRID_COLUMNS - 1)
        found = found + (gl.load(scales + row * sizes.GRID_COLUMNS + column),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _sum_steps(pipeline, scales, first, begin, end, offset, sizes, GROUP: gl.constexpr, SUMS: gl.constexpr):
    """Return the sums [64, TOKENS] of each unit of a group over the steps from `begin` to `end` of a tile.

    Args:
        offset: Number of the program's steps before those of the tile's `begin`.
    """
    HAS_SCALES: gl.constexpr = sizes.GRID_COLUMNS > 0
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    nothing = gl.zeros([UNIT, sizes.TOKENS], gl.float32, layout=SUMS)
    sums = (nothing,) * sizes.UNITS
    if HAS_SCALES:
        scale = _scales(scales, first, begin, sizes)
    for k in range(begin, end):
        number = k - begin + offset
        stage = number % sizes.STAGES
        mbarrier.wait(pipeline.full.index(stage), number // sizes.STAGES & 1)
        tokens = pipeline.tokens.index(stage).permute((1, 0))
        codes = pipeline.codes.index(stage)
        begun = ()
        for unit in gl.static_range(sizes.UNITS):
            words = codes.slice((GROUP * sizes.UNITS + unit) * UNIT, UNIT, 0).load(WEIGHTS)
            weights = _decoded(words, WEIGHTS)
            total = nothing if HAS_SCALES else sums[unit]
            products = warpgroup_mma(weights, tokens, total, use_acc=not HAS_SCALES, is_async=True)
            begun = begun + (products, weights)  # type: ignore[assignment]  # noqa: RUF005
        if HAS_SCALES:
            following = _scales(scales, first, k + 1, sizes)
        added = ()
        for unit in gl.static_range(sizes.UNITS):
            products, weights = warpgroup_mma_wait(sizes.UNITS - 1 - unit, deps=[begun[2 * unit], begun[2 * unit + 1]])
            if unit == sizes.UNITS - 1:
                thread_barrier()  # every warp has read its codes
                mbarrier.arrive(pipeline.empty.index(stage), count=1)
            total = gl.fma(products, scale[unit], sums[unit]) if HAS_SCALES else products
            added = added + (total,)  # type: ignore[assignment]  # noqa: RUF005
        sums = added
        if HAS_SCALES:
            scale = following
    return sums


@gluon.jit
def _multiply(pipeline, scales, results, sizes, GROUP: gl.constexpr):
    """Compute this group's outputs of the program's steps; on four warps."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.TOKENS, 16])
    begin = first_step(gl.program_id(0), sizes.WORK, sizes.PROGRAMS)
    end = first_step(gl.program_id(0) + 1, sizes.WORK, sizes.PROGRAMS)
    for tile in range(begin // sizes.STEPS, (end - 1) // sizes.STEPS + 1):
        tile_begin = tile * sizes.STEPS
        low, high = gl.maximum(begin - tile_begin, 0), gl.minimum(end - tile_begin, sizes.STEPS)
        first = (tile * GROUPS + GROUP) * (sizes.UNITS * UNIT)
        sums = _sum_steps(pipeline, scales, first, low, high, tile_begin + low - begin, sizes, GROUP, SUMS)
        if first < sizes.ROWS:
            if high - low == sizes.STEPS:
                for unit in gl.static_range(sizes.UNITS):
                    put(results, sums[unit], first + unit * UNIT, sizes, SUMS)
            else:
                put_part(results, sums, tile, first, low == 0, sizes, GROUP, SUMS)


@gluon.jit(do_not_specialize=["num_tokens", "out_stride"])
def _few_tokens_hopper_kernel(
    codes, tokens, scales, factors, out, parts, counters, out_stride, num_tokens,
    ROWS: gl.constexpr, STEPS: gl.constexpr, WORK: gl.constexpr, PROGRAMS: gl.constexpr,
    TOKENS: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, GRID_COLUMNS: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, BLOCK_COLUMNS: gl.constexpr, HAS_FACTORS: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr, FILL_REGISTERS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    release(OVERLAPS)
    sizes = Sizes(
        ROWS, STEPS, WORK, PROGRAMS, TOKENS, UNITS, STAGES, GRID_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS,
        HAS_FACTORS,
    )  # fmt: skip
    results = Results(out, out_stride, num_tokens, factors, parts, counters)
    pipeline = allocate_pipeline(codes, tokens, sizes)
    gl.warp_specialize(
        [
            (_multiply, (pipeline, scales, results, sizes, 0)),
            (_multiply, (pipeline, scales, results, sizes, 1)),
            (fill, (codes, tokens, pipeline, sizes, OVERLAPS)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, FILL_REGISTERS],
    )


def multiply_on_hopper(x: Tensor, weight: QuantizedMatrix, counters: Tensor, out: Tensor, tiles: HopperTiles) -> None:
    """Write x @ W.T to `out`; the arguments are those of `multiply_few_tokens`.

    Long because the kernel has many named arguments.
    """
    rows, columns = weight.shape
    steps = triton.cdiv(columns, DEPTH.value)
    num_tiles = triton.cdiv(rows, tiles.outputs)
    if len(x) > tiles.tokens or tiles.programs > num_tiles * steps or not fits_boxes(weight):
        raise ValueError(
            f"need FP8 with blocks of units, at most {tiles.tokens} tokens and {num_tiles * steps} programs, "
            f"found {weight.code_bits}-bit codes in blocks of {weight.block_rows} x {weight.block_columns}, "
            f"{len(x)} tokens and {tiles.programs} programs"
        )
    x = x if x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 else x.contiguous().clone()  # TMA needs 16-byte alignment
    size_of_parts = 2 * tiles.programs * tiles.outputs * tiles.tokens
    _few_tokens_hopper_kernel[(tiles.programs,)](
        codes=TensorDescriptor.from_tensor(weight.words, [tiles.outputs, DEPTH.value // 2], _layout()),
        tokens=TensorDescriptor.from_tensor(x, [tiles.tokens, DEPTH.value], _layout()),
        scales=x if weight.scales is None else weight.scales,
        factors=x if weight.factors is None else weight.factors,
        out=out,
        parts=torch.empty(size_of_parts, dtype=torch.float32, device=x.device),
        counters=counters,
        out_stride=out.stride(0),
        num_tokens=len(x),
        ROWS=rows,
        STEPS=steps,
        WORK=num_tiles * steps,
        PROGRAMS=tiles.programs,
        TOKENS=tiles.tokens,
        UNITS=tiles.outputs // (GROUPS.value * UNIT.value),
        STAGES=tiles.stages,
        GRID_COLUMNS=0 if weight.scales is None else weight.scales.shape[1],
        BLOCK_ROWS=weight.block_rows,
        BLOCK_COLUMNS=weight.block_columns,
        HAS_FACTORS=weight.factors is not None,
        MULTIPLY_REGISTERS=_MULTIPLY_REGISTERS,
        FILL_REGISTERS=_FILL_REGISTERS,
        num_warps=4,
        enable_fp_fusion=True,
        **overlapping(x.device),
    )


@cache
def _layout() -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a TMA box; cached because constructing it is slow."""
    return gl.NVMMASharedLayout(128, 16, rank=2)
