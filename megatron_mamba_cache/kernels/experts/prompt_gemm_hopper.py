"""Grouped FP8 GEMM on Hopper GPUs for the experts of prompt tokens; written in Gluon.

Programs are persistent. A tile is up to 128 rows of one expert and 128 rows of its weights. In a program, two groups of
four warps each multiply 64 rows of the tile; another warp loads codes into pipeline stages with TMA. A step is 128
inputs: tensor cores sum its products, and these sums, times their scales, are added in fp32, while the other group
multiplies.

In a gated layer, a tile has 64 gates and the 64 outputs that they gate, so a thread holds both values that an output
needs. The inputs of a row are summed in the same order in every tile. Safe in CUDA graphs: no host sync, no atomics.
"""

from functools import cache

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

from ..gluon_common import await_then_release, reinterpret
from ..kernel_launches import num_multiprocessors
from ..overlap import overlapping
from ..quantized.activations import QuantizedActivations
from ..quantized.quantized_matrix import QuantizedMatrix
from .gemm_pipeline import find_tile
from .gemm_tiles import tile_rows
from .prompt_pipeline import DEPTH, HALF, Sizes, allocate_pipeline, fill, first_weight
from .reference_experts import ExpertOrder

MOST_ROWS = 128
"""Maximum number of rows per tile."""
_STAGES = 6
_MULTIPLY_REGISTERS = 232
_FILL_REGISTERS = 40


@aggregate
class _Scales:
    """Scales of rows [groups, num_rows] and of weights, factors of weights, and results [rows, OUTPUTS]."""

    of_rows: gl.tensor
    of_weights: gl.tensor
    factors: gl.tensor
    out: gl.tensor
    num_rows: gl.tensor

    @gluon.constexpr_function
    def __init__(self, of_rows, of_weights, factors, out, num_rows):
        self.of_rows = of_rows
        self.of_weights = of_weights
        self.factors = factors
        self.out = out
        self.num_rows = num_rows


@gluon.jit
def _halves(values, PART: gl.constexpr):
    """Return the first and the last 64 columns of values [HALF, 2 * HALF]; they only change their names."""
    first, second = gl.split(values.reshape([HALF, 2, HALF]).permute([0, 2, 1]))
    return gl.convert_layout(first, PART), gl.convert_layout(second, PART)


@gluon.jit
def _sum_steps(pipeline, scales, tile, row, step, sizes, GROUP: gl.constexpr, PART: gl.constexpr):
    """Return the sums of a group's rows with the two halves of a tile's weights, scales of blocks included."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * HALF, 32])
    weights = reinterpret(pipeline.weights, gl.float8e4nv, [sizes.STAGES, 2 * HALF, DEPTH], pipeline.weights.layout)
    nothing = gl.zeros([HALF, 2 * HALF], gl.float32, layout=SUMS)
    first = gl.zeros([HALF, HALF], gl.float32, layout=PART)
    second = gl.zeros([HALF, HALF], gl.float32, layout=PART)
    weight = first_weight(tile, sizes)
    of_expert = scales.of_weights + tile.expert * (sizes.GRID_ROWS * sizes.GRID_COLUMNS)
    of_first = of_expert + weight // sizes.BLOCK_ROWS * sizes.GRID_COLUMNS
    other = gl.minimum((weight + sizes.SECOND) // sizes.BLOCK_ROWS, sizes.GRID_ROWS - 1)
    of_second = of_expert + other * sizes.GRID_COLUMNS
    for k in range(sizes.STEPS):
        if sizes.GRID_COLUMNS > 0:
            of_row = gl.load(scales.of_rows + k * scales.num_rows + row)
            scale, other_scale = gl.load(of_first + k), gl.load(of_second + k)
        stage = (step + k) % sizes.STAGES
        mbarrier.wait(pipeline.full.index(stage), (step + k) // sizes.STAGES & 1)
        codes = pipeline.rows.index(2 * stage + GROUP)
        products = warpgroup_mma(codes, weights.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        products = warpgroup_mma_wait(0, deps=[products])
        mbarrier.arrive(pipeline.empty.index(stage), count=1)
        found, others = _halves(products, PART)
        if sizes.GRID_COLUMNS > 0:
            first = gl.fma(found, (of_row * scale)[:, None], first)
            second = gl.fma(others, (of_row * other_scale)[:, None], second)
        else:
            first += found
            second += others
    return first, second


@gluon.jit
def _skip_steps(pipeline, step, sizes):
    """Free the stages of a tile in which a group has no rows."""
    for k in range(step, step + sizes.STEPS):
        mbarrier.wait(pipeline.full.index(k % sizes.STAGES), k // sizes.STAGES & 1)
        mbarrier.arrive(pipeline.empty.index(k % sizes.STAGES), count=1)


@gluon.jit
def _scaled(total, scales, tile, weight, of_row, sizes, PART: gl.constexpr):
    """Multiply sums by the scales of their rows and the factors of their weights, if weights have no blocks."""
    if sizes.GRID_COLUMNS == 0:
        total *= of_row[:, None]
    if sizes.HAS_FACTORS:
        column = gl.minimum(weight + gl.arange(0, HALF, layout=gl.SliceLayout(0, PART)), sizes.WEIGHTS - 1)
        total *= gl.load(scales.factors + tile.expert * sizes.WEIGHTS + column)[None, :]
    if sizes.ACTIVATION == "squared_relu":
        total = gl.where(total < 0, 0.0, total)
        total = total * total
    return total


@gluon.jit
def _put(out, total, first, last, column, sizes):
    """Store 64 rows from `first` on and 64 outputs from `column` on, those that exist."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    result = gl.convert_layout(total.to(gl.bfloat16), LAYOUT)
    row = first + gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    column += gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    pointers = out + row.to(gl.int64)[:, None] * sizes.OUTPUTS + column[None, :]
    gl.store(pointers, result, mask=(row < last)[:, None] & (column < sizes.OUTPUTS)[None, :])


@gluon.jit
def _multiply(pipeline, tiles, scales, sizes, GROUP: gl.constexpr):
    """Compute this group's rows of the program's tiles; runs on four warps."""
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    num_tiles = gl.load(tiles) * sizes.TILES
    step = 0
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile = find_tile(tiles, number, num_tiles, sizes)
        own = tile.first + GROUP * HALF
        if own < tile.last:
            row = gl.minimum(own + gl.arange(0, HALF, layout=gl.SliceLayout(1, PART)), tile.last - 1)
            first, second = _sum_steps(pipeline, scales, tile, row, step, sizes, GROUP, PART)
            weight = first_weight(tile, sizes)
            of_row = gl.load(scales.of_rows + row)
            first = _scaled(first, scales, tile, weight, of_row, sizes, PART)
            second = _scaled(second, scales, tile, weight + sizes.SECOND, of_row, sizes, PART)
            if sizes.ACTIVATION == "gated_silu":
                _put(scales.out, first / (1 + gl.exp(-first)) * second, own, tile.last, weight, sizes)
            else:
                _put(scales.out, first, own, tile.last, weight, sizes)
                _put(scales.out, second, own, tile.last, weight + HALF, sizes)
        else:
            _skip_steps(pipeline, step, sizes)
        step += sizes.STEPS


@gluon.jit(do_not_specialize=["num_rows"])
def _prompt_gemm_kernel(
    rows, weights, of_rows, of_weights, factors, tiles, out, num_rows,
    OUTPUTS: gl.constexpr, WEIGHTS: gl.constexpr, SECOND: gl.constexpr, TILES: gl.constexpr, TURN: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, GRID_ROWS: gl.constexpr, GRID_COLUMNS: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, HAS_FACTORS: gl.constexpr, ACTIVATION: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr, FILL_REGISTERS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    sizes = Sizes(
        OUTPUTS, WEIGHTS, SECOND, TILES, TURN, STEPS, STAGES, GRID_ROWS, GRID_COLUMNS, BLOCK_ROWS, HAS_FACTORS,
        ACTIVATION,
    )  # fmt: skip
    scales = _Scales(of_rows, of_weights, factors, out, num_rows)
    pipeline = allocate_pipeline(rows, sizes)
    await_then_release(OVERLAPS)
    gl.warp_specialize(
        [
            (_multiply, (pipeline, tiles, scales, sizes, 0)),
            (_multiply, (pipeline, tiles, scales, sizes, 1)),
            (fill, (rows, weights, pipeline, tiles, sizes)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, FILL_REGISTERS],
    )


def multiply_prompts_on_hopper(
    x: QuantizedActivations, weight: QuantizedMatrix, codes: Tensor, order: ExpertOrder, out: Tensor, activation: str
) -> None:
    """Multiply quantized rows by their experts' weights, apply the activation, and write to `out` [pairs, outputs].

    Long because the kernel has many named arguments.

    Args:
        codes: [experts, rows, columns] float8_e4m3fn: the codes of the weight in the order of its words.
    """
    (_, num_weights, columns), is_gated, outputs = weight.shape, activation == "gated_silu", out.shape[1]
    per_tile = HALF.value if is_gated else 2 * HALF.value
    tiles = tile_rows(order.starts, len(order.pairs), MOST_ROWS, HALF.value)
    tiles_of_outputs, num_programs = triton.cdiv(outputs, per_tile), num_multiprocessors(out.device)
    grid = (0, 0) if weight.scales is None else weight.scales.shape[1:]
    _prompt_gemm_kernel[(min(num_programs, (len(tiles) - 1) * tiles_of_outputs),)](
        rows=_describe(x.codes),
        weights=_describe(codes.flatten(0, 1)),
        of_rows=x.scales,
        of_weights=x.scales if weight.scales is None else weight.scales,
        factors=x.scales if weight.factors is None else weight.factors,
        tiles=tiles,
        out=out,
        num_rows=len(x.codes),
        OUTPUTS=outputs,
        WEIGHTS=num_weights,
        SECOND=outputs if is_gated else HALF.value,
        TILES=tiles_of_outputs,
        TURN=int(num_programs % tiles_of_outputs == 0),  # if 0, a program would get the same output tile every time
        STEPS=triton.cdiv(columns, DEPTH.value),
        STAGES=_STAGES,
        GRID_ROWS=grid[0],
        GRID_COLUMNS=grid[1],
        BLOCK_ROWS=weight.block_rows,
        HAS_FACTORS=weight.factors is not None,
        ACTIVATION=activation,
        MULTIPLY_REGISTERS=_MULTIPLY_REGISTERS,
        FILL_REGISTERS=_FILL_REGISTERS,
        num_warps=4,
        enable_fp_fusion=True,
        **overlapping(out.device),
    )


def _describe(codes: Tensor) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(codes, [HALF.value, DEPTH.value], _layout())


@cache
def _layout() -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a TMA box; cached because constructing it is slow."""
    return gl.NVMMASharedLayout(128, 8, rank=2)
