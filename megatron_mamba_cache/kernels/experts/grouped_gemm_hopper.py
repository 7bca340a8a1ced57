"""Grouped GEMM on Hopper GPUs for experts with many rows; bf16, written in Gluon.

Weights are the left operand and rows the right one, so a tile can have any multiple of 32 rows, up to 224, and each
weight is read once per tile. Programs are persistent. In a program, two groups of four warps compute a tile. Each group
multiplies 64 rows of weights by all rows of the tile. A further 64 rows of weights may be shared: each group
multiplies them by half of the rows. This reduces reads from shared memory. The matmul of a stage is awaited only
after that of the next stage has started. Other warps fill the pipeline stages.

In a gated layer, eight gates alternate with eight gated outputs, so a thread holds both values that an output needs.
The inputs of a row are summed in the same order in every tile. Safe in CUDA graphs: no host sync, no atomics.
"""

from functools import cache

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..gluon_common import await_then_release
from ..kernel_launches import num_multiprocessors
from ..overlap import overlapping
from .gemm_pipeline import (
    DEPTH,
    GROUPS,
    MOST_ROWS,
    Sizes,
    allocate_pipeline,
    fill_with_rows,
    fill_with_weights,
    find_tile,
    find_unit,
    gather,
    offsets_of_stage,
    row_of_unit,
)
from .reference_experts import ExpertOrder
from .wgmma import LINE, ROW_STEP, SUMS_LAYOUT, await_mma, begin_mma, no_sums

_STAGES = 4
_MULTIPLY_REGISTERS = 208
"""Registers per thread in the multiplying warps, of which 168 hold sums."""
_FILL_REGISTERS = 88
CODED_SCALE = gl.constexpr(65536.0)
"""By which products of codes and scales are too small: scales are times 2^110, and codes times 2^-126."""
_FEW_ROWS = 64
"""Mean number of rows per expert up to which loading weights limits the GEMM."""


@gluon.jit
def _activate(total, ACTIVATION: gl.constexpr):
    """Apply the activation to sums [weights, rows]; return [outputs, rows]."""
    if ACTIVATION == "squared_relu":
        total = gl.where(total < 0, 0.0, total)
        total = total * total
    if ACTIVATION == "gated_silu":
        ROWS: gl.constexpr = total.shape[1]
        gate, other = gl.split(total.reshape([4, 2, 8, ROWS]).permute([0, 2, 3, 1]))
        total = (gate / (1 + gl.exp(-gate)) * other).reshape([32, ROWS])
    return total


@gluon.jit
def _put(out, total, factor, first, last, column, sizes):
    """Apply factors and the activation and store ROW_STEP rows from `first` on; rows from `last` on are not stored."""
    if sizes.IS_CODED:
        total *= factor[:, None]
    WIDTH: gl.constexpr = sizes.PER_UNIT
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [WIDTH // 32, 1024 // WIDTH], [4, 1], [0, 1])
    result = gl.convert_layout(_activate(total, sizes.ACTIVATION).to(gl.bfloat16), LAYOUT)
    column += gl.arange(0, WIDTH, layout=gl.SliceLayout(1, LAYOUT))
    row = first + gl.arange(0, ROW_STEP, layout=gl.SliceLayout(0, LAYOUT))
    pointers = out + row.to(gl.int64)[None, :] * sizes.OUTPUTS + column[:, None]
    gl.store(pointers, result, mask=(row < last)[None, :] & (column < sizes.OUTPUTS)[:, None])


@gluon.jit
def _load_factors(factors, expert, unit, sizes):
    """Return the factors of a unit's weights, [64], if weights are coded."""
    if sizes.IS_CODED:
        line = gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS_LAYOUT))
        found = gl.load(factors + row_of_unit(expert, unit, line, sizes)) * CODED_SCALE
    else:
        found = 1
    return found


@gluon.jit
def _release(pipeline, step, sizes):
    """Signal that the pipeline stage used by a step is free."""
    mbarrier.arrive(pipeline.empty.index(step % sizes.STAGES), count=1)


@gluon.jit
def _compute_tile(
    pipeline, step, out, factors, tile, sizes, GROUP: gl.constexpr, UNITS: gl.constexpr, STEPS: gl.constexpr
):
    """Multiply this group's share of 64 * UNITS rows of weights by up to 32 * STEPS rows, and store the results."""
    OWN: gl.constexpr = GROUPS * STEPS if UNITS >= GROUPS else 0
    SHARED: gl.constexpr = STEPS if UNITS % GROUPS else 0
    UNIT: gl.constexpr = 64 * LINE
    gl.static_assert(UNITS <= GROUPS + 1)
    first, last, half = tile.first, tile.last, GROUP * STEPS * ROW_STEP
    sums = no_sums(OWN + SHARED)
    for k in range(step, step + sizes.STEPS):
        stage = k % sizes.STAGES
        mbarrier.wait(pipeline.full.index(stage), k // sizes.STAGES & 1)
        if sizes.DIVISOR > 0:
            fence_async_shared()  # gathered rows are not written by TMA, so wgmma needs a fence
        weights, rows = offsets_of_stage(stage, sizes)
        shared_weights, shared_rows = weights + (UNITS - 1) * UNIT, rows + half * LINE
        sums = begin_mma(sums, weights + GROUP * UNIT, rows, shared_weights, shared_rows, OWN, SHARED)
        sums = await_mma(sums, 1, OWN + SHARED)
        if k > step:
            _release(pipeline, k - 1, sizes)
    sums = await_mma(sums, 0, OWN + SHARED)
    _release(pipeline, step + sizes.STEPS - 1, sizes)
    own, shared = find_unit(tile.outputs, sizes) + GROUP, find_unit(tile.outputs, sizes) + UNITS - 1
    if OWN > 0:
        factor = _load_factors(factors, tile.expert, own, sizes)
        for i in gl.static_range(OWN):
            _put(out, sums[i], factor, first + ROW_STEP * i, last, own * sizes.PER_UNIT, sizes)
    if SHARED > 0:
        factor = _load_factors(factors, tile.expert, shared, sizes)
        for i in gl.static_range(SHARED):
            _put(out, sums[OWN + i], factor, first + half + ROW_STEP * i, last, shared * sizes.PER_UNIT, sizes)


@gluon.jit
def multiply_tiles(pipeline, tiles, out, factors, sizes, GROUP: gl.constexpr):
    """Compute this warp group's share of the program's tiles; runs on four warps."""
    PER_STEP: gl.constexpr = GROUPS * ROW_STEP
    num_tiles = gl.load(tiles) * sizes.TILES
    tile = find_tile(tiles, gl.program_id(0), num_tiles, sizes)
    step = 0
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        following = find_tile(tiles, number + gl.num_programs(0), num_tiles, sizes)  # loaded early to hide latency
        for STEPS in gl.static_range(1, MOST_ROWS // PER_STEP + 1):
            if (tile.last - tile.first + PER_STEP - 1) // PER_STEP == STEPS:
                if sizes.NUM_WIDE == sizes.TILES:  # noqa: SIM114 (a compile-time branch)
                    _compute_tile(pipeline, step, out, factors, tile, sizes, GROUP, sizes.UNITS, STEPS)
                elif tile.outputs < sizes.NUM_WIDE:
                    _compute_tile(pipeline, step, out, factors, tile, sizes, GROUP, sizes.UNITS, STEPS)
                else:
                    _compute_tile(pipeline, step, out, factors, tile, sizes, GROUP, sizes.UNITS - 1, STEPS)
        step += sizes.STEPS
        tile = following


@gluon.jit
def _gemm_kernel(
    weight, rows32, x, pairs, tiles, out, x_stride,
    UNITS: gl.constexpr, NUM_WIDE: gl.constexpr, PER_UNIT: gl.constexpr, TILES: gl.constexpr, TURN: gl.constexpr,
    STAGES: gl.constexpr, STEPS: gl.constexpr, OUTPUTS: gl.constexpr, ACTIVATION: gl.constexpr, DIVISOR: gl.constexpr,
    AHEAD: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr, FILL_REGISTERS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    sizes = Sizes(UNITS, NUM_WIDE, PER_UNIT, TILES, TURN, STAGES, STEPS, OUTPUTS, ACTIVATION, DIVISOR, AHEAD, OVERLAPS)
    pipeline = allocate_pipeline(weight, rows32, sizes)
    if not AHEAD:
        await_then_release(OVERLAPS)
    first, second = (pipeline, tiles, out, out, sizes, 0), (pipeline, tiles, out, out, sizes, 1)
    if DIVISOR > 0:
        gl.warp_specialize(
            [
                (multiply_tiles, first),
                (multiply_tiles, second),
                (gather, (weight, x, x_stride, pairs, pipeline, tiles, sizes)),
            ],
            [4, 4],
            [MULTIPLY_REGISTERS, FILL_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (multiply_tiles, first),
                (multiply_tiles, second),
                (fill_with_weights, (weight, pipeline, tiles, sizes)),
                (fill_with_rows, (rows32, pipeline, tiles, sizes)),
            ],
            [4, 1, 1],
            [MULTIPLY_REGISTERS, FILL_REGISTERS, FILL_REGISTERS],
        )


def multiply_on_hopper(
    x: Tensor,
    weight: Tensor,
    order: ExpertOrder,
    out: Tensor,
    *,
    top_k: int | None,
    activation: str,
    follows_first: bool,
) -> None:
    """Multiply rows by their experts' weights, apply the activation, and write to `out` [pairs, outputs].

    The arguments are those of `grouped_gemm`. The function is long because the kernel has many arguments.

    Args:
        x, weight: bf16, aligned to 16 bytes. The number of inputs must be a multiple of DEPTH, and in a gated layer the
            number of outputs a multiple of 8. Each expert must have more than 64 rows of weights, including gates.
    """
    is_gated, num_steps = activation == "gated_silu", x.shape[1] // DEPTH
    grid, sizes = output_tiles(out, order, len(weight), is_gated=is_gated)
    _gemm_kernel[grid](
        weight=_describe_gated(weight) if is_gated else describe(weight.flatten(0, 1), 64),
        rows32=describe(x, 32),
        x=x,
        pairs=order.pairs,
        tiles=order.tiles,
        out=out,
        x_stride=x.stride(0),
        STAGES=_STAGES,
        STEPS=num_steps,
        OUTPUTS=out.shape[1],
        ACTIVATION=activation,
        DIVISOR=top_k or 0,
        AHEAD=follows_first and top_k is None,
        MULTIPLY_REGISTERS=_MULTIPLY_REGISTERS,
        FILL_REGISTERS=_FILL_REGISTERS,
        num_warps=4,
        enable_fp_fusion=True,
        **sizes,
        **overlapping(x.device),
    )


def output_tiles(
    out: Tensor, order: ExpertOrder, num_experts: int, *, is_gated: bool
) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid, and the kernel's sizes of the tiles into which outputs [rows, outputs] are cut."""
    per_unit = 32 if is_gated else 64
    num_units, num_programs = triton.cdiv(out.shape[1], per_unit), num_multiprocessors(out.device)
    units = _units_of_a_tile(num_units, num_experts, num_programs, len(order.pairs) / num_experts)
    tiles = triton.cdiv(num_units, units)
    return (min(num_programs, (len(order.tiles) - 1) * tiles),), {
        "UNITS": units,
        "NUM_WIDE": num_units - tiles * (units - 1),
        "PER_UNIT": per_unit,
        "TILES": tiles,
        "TURN": int(num_programs % tiles == 0),  # if 0, a program would get the same output tile every time
    }


def _units_of_a_tile(num_units: int, num_experts: int, num_programs: int, mean_rows: float) -> int:
    """Return the number of units (64 rows of weights) per output tile: 2 or 3.

    Tiles of 3 units read rows less often, but need enough tiles to fill the GPU. If num_units % 3 is 1, they leave two
    narrow tiles. With many rows per expert, these cost more than tiles of 2 units would. With few rows, loading weights
    limits the GEMM, and wider tiles keep more loads in flight.
    """
    if num_units < 3 or num_units == 4 or num_experts * num_units < 12 * num_programs:
        return 2
    return 2 if num_units % 3 == 1 and mean_rows > _FEW_ROWS else 3


def describe(matrix: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, DEPTH], _layout(2))


def _describe_gated(weight: Tensor) -> TensorDescriptor:
    """Return a TMA descriptor whose boxes alternate eight gates and the eight outputs that they gate."""
    experts, outputs, inputs = weight.shape[0], weight.shape[1] // 2, weight.shape[2]
    shape, box = [experts, outputs // 8, 2, 8, inputs], [1, 4, 2, 8, DEPTH]
    strides = [2 * outputs * inputs, 8 * inputs, outputs * inputs, inputs, 1]
    return TensorDescriptor(weight, shape, strides, box, _layout(5))


@cache
def _layout(rank: int) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a TMA box; cached because constructing it is slow."""
    return gl.NVMMASharedLayout(128, 16, rank=rank)
