"""Product of few tokens with an FP8 weight on Hopper GPUs, in Gluon: FP8 tensor cores multiply codes as they are.

`split_tokens` writes a token as two rows of FP8 values, with a scale for each 128 inputs. So no code is decoded. A step
is 128 inputs of a tile of outputs. Tensor cores sum its products and keep 13 bits after the first one; the sums of both
rows, times their scales, are added in fp32.

One warp loads codes and tokens into pipeline stages with TMA. Two groups of four warps multiply UNITS units of 64
outputs each; a group adds its sums while tensor cores multiply for the other one. A program leaves registers free, so
that programs of the next kernels can start on the same multiprocessor.

Programs that share a tile write their sums, and a second kernel, `part_sums`, adds them in the order of the inputs. The
division depends on the weight's shape and on the range of the number of tokens only, and so do a token's bits.
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

from ..gluon_common import reinterpret, release, thread_barrier
from ..overlap import overlapping
from .few_token_tiles import SplitTokenTiles, fits_boxes
from .part_sums import Parts, add_parts
from .quantized_matrix import QuantizedMatrix
from .split_token_pipeline import DEPTH, GROUPS, ROW, UNIT, Sizes, allocate_pipeline, fill, shared_steps, step_of
from .split_tokens import LOW_SCALE, SplitTokens

_LOW_SCALE = gl.constexpr(LOW_SCALE)
_LEAST_SCALES = 32
"""Of a box of tokens' scales: TMA writes multiples of 128 bytes."""
_REGISTERS = {
    (16, 128): (80, 64), (16, 256): (104, 80), (32, 128): (80, 64), (32, 256): (128, 96),
    (64, 128): (128, 96), (64, 256): (224, 160),
}  # fmt: skip
"""Of a thread that multiplies, and of a thread on average, by tokens and outputs of a tile."""
_FILL_REGISTERS = 24


@aggregate
class _Results:
    """Where sums go: `out` [tokens, outputs], and `parts` of shared tiles, with two slots for each program."""

    out: gl.tensor
    out_stride: gl.tensor
    num_tokens: gl.tensor
    factors: gl.tensor
    parts: gl.tensor

    @gluon.constexpr_function
    def __init__(self, out, out_stride, num_tokens, factors, parts):
        self.out = out
        self.out_stride = out_stride
        self.num_tokens = num_tokens
        self.factors = factors
        self.parts = parts


@gluon.jit
def _keep_scales(pipeline, scales, sizes, GROUP: gl.constexpr):
    """Load the scales of this group's weights in all the program's steps."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    step = step_of(gl.arange(0, sizes.LONGEST, layout=LAYOUT), sizes)
    column = step % sizes.STEPS * DEPTH // sizes.BLOCK_COLUMNS
    for unit in gl.static_range(sizes.UNITS):
        row = ((step // sizes.STEPS * GROUPS + GROUP) * sizes.UNITS + unit) * UNIT
        of_row = gl.minimum(row, sizes.ROWS - 1) // sizes.BLOCK_ROWS * sizes.GRID_COLUMNS
        pipeline.of_weights.index(GROUP * sizes.UNITS + unit).store(gl.load(scales + of_row + column))
    thread_barrier()


@gluon.jit
def _scale_of_weights(pipeline, number, unit: gl.constexpr, sizes, SUMS: gl.constexpr):
    """Return the scale [1, 1] of a unit's weights in the program's step `number`."""
    SHAPE: gl.constexpr = [GROUPS * sizes.UNITS * sizes.LONGEST, 1]
    of_weights = reinterpret(pipeline.of_weights, gl.float32, SHAPE, ROW)
    return of_weights.index(unit * sizes.LONGEST + number).load(gl.SliceLayout(1, SUMS))[:, None]


@gluon.jit
def _sum_steps(pipeline, first, count, sizes, GROUP: gl.constexpr, SUMS: gl.constexpr):
    """Return the sums [UNIT, TOKENS] of each unit of a group over `count` steps, from the program's step `first` on."""
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * sizes.TOKENS, 32])
    SHAPE: gl.constexpr = [sizes.STAGES * GROUPS * sizes.UNITS, UNIT, DEPTH]
    codes = reinterpret(pipeline.codes, gl.float8e4nv, SHAPE, pipeline.codes.layout)
    of_tokens = reinterpret(pipeline.of_tokens, gl.float32, [sizes.STAGES, pipeline.of_tokens.shape[2]], ROW)
    nothing = gl.zeros([UNIT, 2 * sizes.TOKENS], gl.float32, layout=PRODUCTS)
    sums = (gl.zeros([UNIT, sizes.TOKENS], gl.float32, layout=SUMS),) * sizes.UNITS
    for number in range(first, first + count):
        stage = number % sizes.STAGES
        mbarrier.wait(pipeline.full.index(stage), number // sizes.STAGES & 1)
        tokens = pipeline.tokens.index(stage).permute((1, 0))
        of_token = of_tokens.index(stage).slice(0, sizes.TOKENS, 0).load(gl.SliceLayout(0, SUMS))[None, :]
        added = ()
        for unit in gl.static_range(sizes.UNITS):
            of_unit = codes.index((stage * GROUPS + GROUP) * sizes.UNITS + unit)
            products = warpgroup_mma(of_unit, tokens, nothing, use_acc=False, is_async=True)
            scale = of_token
            if sizes.GRID_COLUMNS > 0:
                scale = of_token * _scale_of_weights(pipeline, number, GROUP * sizes.UNITS + unit, sizes, SUMS)
            products = warpgroup_mma_wait(0, deps=[products])
            if unit == sizes.UNITS - 1:
                thread_barrier()  # every warp has read its codes
                mbarrier.arrive(pipeline.empty.index(stage), count=1)
            high, low = gl.split(products.reshape([UNIT, 2, sizes.TOKENS]).permute([0, 2, 1]))  # in the same registers
            found = gl.fma(gl.convert_layout(low, SUMS), _LOW_SCALE, gl.convert_layout(high, SUMS))
            added = added + (gl.fma(found, scale, sums[unit]),)  # type: ignore[assignment]  # noqa: RUF005
        sums = added
    return sums


@gluon.jit
def _put(results, total, first, sizes, SUMS: gl.constexpr):
    """Multiply sums [UNIT, TOKENS] by their rows' factors and store them."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    if sizes.HAS_FACTORS:
        row = first + gl.arange(0, UNIT, layout=gl.SliceLayout(1, SUMS))
        total *= gl.load(results.factors + gl.minimum(row, sizes.ROWS - 1))[:, None]
    result = gl.convert_layout(total.to(gl.bfloat16), LAYOUT)
    row = first + gl.arange(0, UNIT, layout=gl.SliceLayout(1, LAYOUT))
    token = gl.arange(0, sizes.TOKENS, layout=gl.SliceLayout(0, LAYOUT))
    pointers = results.out + (token[None, :] * results.out_stride + row[:, None])
    gl.store(pointers, result, mask=(row < sizes.ROWS)[:, None] & (token < results.num_tokens)[None, :])


@gluon.jit
def _put_part(results, sums, slot, sizes, GROUP: gl.constexpr, SUMS: gl.constexpr):
    """Store the sums of a part of a tile."""
    output = gl.arange(0, UNIT, layout=gl.SliceLayout(1, SUMS))
    token = gl.arange(0, sizes.TOKENS, layout=gl.SliceLayout(0, SUMS))
    OUTPUTS: gl.constexpr = GROUPS * sizes.UNITS * UNIT
    of_token = slot * (OUTPUTS * sizes.TOKENS) + token // 8 * (8 * OUTPUTS) + token % 8
    for unit in gl.static_range(sizes.UNITS):
        row = (GROUP * sizes.UNITS + unit) * UNIT + output
        gl.store(results.parts + (of_token[None, :] + row[:, None] * 8), sums[unit])


@gluon.jit
def _multiply(pipeline, scales, results, sizes, GROUP: gl.constexpr):
    """Compute this group's outputs of the program's steps; on four warps."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.TOKENS, 32])
    begin, end = shared_steps(sizes)
    if sizes.GRID_COLUMNS > 0:
        _keep_scales(pipeline, scales, sizes, GROUP)
    number = 0
    num_tiles = sizes.WHOLE + (end + sizes.STEPS - 1) // sizes.STEPS - begin // sizes.STEPS
    for index in range(num_tiles):
        tile = step_of(number, sizes) // sizes.STEPS
        shared = (tile - sizes.PROGRAMS * sizes.WHOLE) * sizes.STEPS
        of_shared = gl.minimum(end, shared + sizes.STEPS) - gl.maximum(begin, shared)
        count = gl.where(index < sizes.WHOLE, sizes.STEPS, of_shared)
        sums = _sum_steps(pipeline, number, count, sizes, GROUP, SUMS)
        number += count
        first = (tile * GROUPS + GROUP) * (sizes.UNITS * UNIT)
        if first < sizes.ROWS:
            if count == sizes.STEPS:
                for unit in gl.static_range(sizes.UNITS):
                    _put(results, sums[unit], first + unit * UNIT, sizes, SUMS)
            else:
                _put_part(results, sums, 2 * gl.program_id(0) + (begin <= shared).to(gl.int32), sizes, GROUP, SUMS)


@gluon.jit(do_not_specialize=["num_tokens"])
def _split_tokens_hopper_kernel(
    codes, tokens, of_tokens, scales, factors, out, parts, out_stride, num_tokens,
    ROWS: gl.constexpr, STEPS: gl.constexpr, WHOLE: gl.constexpr, SHARED: gl.constexpr, PROGRAMS: gl.constexpr,
    SHARERS: gl.constexpr, LONGEST: gl.constexpr, TOKENS: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
    GRID_COLUMNS: gl.constexpr, BLOCK_ROWS: gl.constexpr, BLOCK_COLUMNS: gl.constexpr, HAS_FACTORS: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr, FILL_REGISTERS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    release(OVERLAPS)
    sizes = Sizes(
        ROWS, STEPS, WHOLE, SHARED, PROGRAMS, SHARERS, LONGEST, TOKENS, UNITS, STAGES, GRID_COLUMNS, BLOCK_ROWS,
        BLOCK_COLUMNS, HAS_FACTORS,
    )  # fmt: skip
    results = _Results(out, out_stride, num_tokens, factors, parts)
    pipeline = allocate_pipeline(codes, tokens, of_tokens, sizes)
    gl.warp_specialize(
        [
            (_multiply, (pipeline, scales, results, sizes, 0)),
            (_multiply, (pipeline, scales, results, sizes, 1)),
            (fill, (codes, tokens, of_tokens, pipeline, sizes, OVERLAPS)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, FILL_REGISTERS],
    )


def multiply_split_tokens(tokens: SplitTokens, weight: QuantizedMatrix, out: Tensor, tiles: SplitTokenTiles) -> None:
    """Write x @ W.T to `out` [num_tokens, outputs]; other arguments are those of `multiply_few_tokens`.

    Long because the kernel has many named arguments.
    """
    rows, columns = weight.shape
    num_rows, steps = tokens.scales.shape[1], triton.cdiv(columns, DEPTH.value)
    num_tiles = triton.cdiv(rows, tiles.outputs)
    whole, remaining = divmod(num_tiles - 1, tiles.programs)
    if num_rows != tiles.tokens or len(out) > num_rows or tiles.programs > num_tiles * steps or not fits_boxes(weight):
        raise ValueError(
            f"need FP8 with blocks of units, tokens padded to {tiles.tokens} and at most {num_tiles * steps} programs; "
            f"found {weight.code_bits}-bit codes in blocks of {weight.block_rows} x {weight.block_columns}, {len(out)} "
            f"tokens padded to {num_rows}, and {tiles.programs} programs"
        )
    shared = (remaining + 1) * steps  # Triton 3.6 does not compile programs without shared steps
    sharers = min(tiles.sharers, shared)
    sums = torch.empty(2 * sharers, num_rows // 8, tiles.outputs, 8, dtype=torch.float32, device=out.device)
    multiply_registers, registers = _REGISTERS[num_rows, tiles.outputs]
    codes = weight.words.view(torch.float8_e4m3fn)
    _split_tokens_hopper_kernel[(tiles.programs,)](
        codes=TensorDescriptor.from_tensor(codes, [tiles.outputs, DEPTH.value], _layout(128, 8)),
        tokens=TensorDescriptor.from_tensor(tokens.halves, [2 * num_rows, DEPTH.value], _layout(128, 8)),
        of_tokens=TensorDescriptor.from_tensor(tokens.scales, [1, max(num_rows, _LEAST_SCALES)], _layout(0, 32)),
        scales=tokens.scales if weight.scales is None else weight.scales,
        factors=tokens.scales if weight.factors is None else weight.factors,
        out=out,
        parts=sums,
        out_stride=out.stride(0),
        num_tokens=len(out),
        ROWS=rows,
        STEPS=steps,
        WHOLE=whole,
        SHARED=shared,
        PROGRAMS=tiles.programs,
        SHARERS=sharers,
        LONGEST=triton.next_power_of_2(whole * steps + triton.cdiv(shared, sharers)),
        TOKENS=num_rows,
        UNITS=tiles.outputs // (GROUPS.value * UNIT.value),
        STAGES=tiles.stages,
        GRID_COLUMNS=0 if weight.scales is None else weight.scales.shape[1],
        BLOCK_ROWS=weight.block_rows,
        BLOCK_COLUMNS=weight.block_columns,
        HAS_FACTORS=weight.factors is not None,
        MULTIPLY_REGISTERS=multiply_registers,
        FILL_REGISTERS=_FILL_REGISTERS,
        num_warps=4,
        maxnreg=registers,
        enable_fp_fusion=True,
        **overlapping(out.device),
    )
    if shared != sharers * steps:  # a tile has several parts
        add_parts(Parts(sums, steps, shared, whole * tiles.programs), weight.factors, out)


@cache
def _layout(swizzled_bytes: int, bits: int) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a TMA box; cached because constructing it is slow."""
    return gl.NVMMASharedLayout(swizzled_bytes, bits, rank=2)
