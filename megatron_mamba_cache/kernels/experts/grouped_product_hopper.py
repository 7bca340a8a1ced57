"""Products of experts with many rows each on Hopper GPUs, in Gluon; bf16.

Weights are the left operand and rows the right one, so that a tile is as long as its expert has rows, in steps of 32,
and a weight is read once for up to 224 rows. A program takes one tile after another. Two groups of four warps multiply
64 weights each with all rows of a tile; weights are read into registers once for all of them. Other warps fill the ring
of what the groups multiply: rows that have to be gathered by ordinary copies, all else by boxes.

A gated layer's gates and other outputs alternate in boxes of eight, so that a thread has both of an output. A row's
inputs are summed in the same order in any tile. Graph safe: no host sync, no atomics.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..gluon_overlap import await_then_release
from ..kernel_launches import num_multiprocessors
from ..overlap import overlapping
from .product_ring import DEPTH, GROUPS, Sizes, allocate_ring, fill_by_boxes, find_tile, gather_ahead
from .reference_routing import ExpertOrder

_STAGES = 4
_MULTIPLY_REGISTERS = 200
_GATHER_REGISTERS = 80
_BOX_REGISTERS = 32


@gluon.jit
def _activate(total, ACTIVATION: gl.constexpr):
    """Return the activated products [outputs, rows] of [weights, rows]."""
    if ACTIVATION == "squared_relu":
        total = gl.where(total < 0, 0.0, total)
        total = total * total
    if ACTIVATION == "gated_silu":
        ROWS: gl.constexpr = total.shape[1]
        gate, other = gl.split(total.reshape([4, 2, 8, ROWS]).permute([0, 2, 3, 1]))
        total = (gate / (1 + gl.exp(-gate)) * other).reshape([32, ROWS])
    return total


@gluon.jit
def _put(out, total, first, last, first_column, sizes):
    """Store the activated products of rows from `first` on, up to `last`."""
    ROWS: gl.constexpr = total.shape[1]
    WIDTH: gl.constexpr = sizes.PER_GROUP
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [WIDTH // 8, 256 // WIDTH], [1, 4], [0, 1])
    result = gl.convert_layout(_activate(total, sizes.ACTIVATION).to(gl.bfloat16), LAYOUT)
    column = first_column + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, LAYOUT))
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    places = out + row.to(gl.int64)[None, :] * sizes.OUTPUTS + column[:, None]
    gl.store(places, result, mask=(row < last)[None, :] & (column < sizes.OUTPUTS)[:, None])


@gluon.jit
def _multiply(weights, rows, total, use_acc):
    return warpgroup_mma(weights, rows.permute((1, 0)), total, use_acc=use_acc, is_async=True)


@gluon.jit
def _compute_tile(
    ring,
    step,
    out,
    tile,
    column,
    sizes,
    GROUP: gl.constexpr,
    HAS_128: gl.constexpr,
    HAS_64: gl.constexpr,
    HAS_32: gl.constexpr,
):
    """Multiply 64 weights with a tile's rows, and store the results.

    Products are awaited in the stage in which they are begun: the registers of weights are free then, and the other
    group multiplies meanwhile. Long because each piece of rows is named.
    """
    OF_128: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    OF_64: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OF_32: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OF_128 if HAS_128 else OF_64 if HAS_64 else OF_32, 2)
    total128 = gl.zeros([64, 128], gl.float32, layout=OF_128)
    total64 = gl.zeros([64, 64], gl.float32, layout=OF_64)
    total32 = gl.zeros([64, 32], gl.float32, layout=OF_32)
    for k in range(sizes.STEPS):
        stage = (step + k) % sizes.STAGES
        mbarrier.wait(ring.full.index(stage), (step + k) // sizes.STAGES & 1)
        if sizes.DIVISOR > 0:
            fence_async_shared()  # gathered rows are written by ordinary copies
        weights = ring.weights.index(stage * GROUPS + GROUP).load(OPERAND)
        if HAS_128:
            total128 = _multiply(weights, ring.rows128.index(stage), total128, k > 0)
        if HAS_64:
            total64 = _multiply(weights, ring.rows64.index(stage), total64, k > 0)
        if HAS_32:
            total32 = _multiply(weights, ring.rows32.index(stage), total32, k > 0)
        if HAS_128:
            total128 = warpgroup_mma_wait(0, deps=[total128])
        if HAS_64:
            total64 = warpgroup_mma_wait(0, deps=[total64])
        if HAS_32:
            total32 = warpgroup_mma_wait(0, deps=[total32])
        mbarrier.arrive(ring.empty.index(stage), count=1)
    if HAS_128:
        _put(out, total128, tile.first, tile.last, column, sizes)
    if HAS_64:
        _put(out, total64, tile.first + HAS_128 * 128, tile.last, column, sizes)
    if HAS_32:
        _put(out, total32, tile.first + HAS_128 * 128 + HAS_64 * 64, tile.last, column, sizes)


@gluon.jit
def _pass_over(ring, step, sizes):
    """Release what is read in a tile of whose outputs this group has none."""
    for k in range(step, step + sizes.STEPS):
        stage = k % sizes.STAGES
        mbarrier.wait(ring.full.index(stage), k // sizes.STAGES & 1)
        mbarrier.arrive(ring.empty.index(stage), count=1)


@gluon.jit
def _multiply_tiles(ring, tiles, out, sizes, GROUP: gl.constexpr):
    """Compute this program's tiles, 64 weights of each; four warps."""
    num_tiles = gl.load(tiles) * sizes.PER_EXPERT
    step = 0
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile = find_tile(tiles, number, sizes)
        column = (tile.outputs * GROUPS + GROUP) * sizes.PER_GROUP
        length = tile.last - tile.first
        if column >= sizes.OUTPUTS:
            _pass_over(ring, step, sizes)
        elif length > 192:
            _compute_tile(ring, step, out, tile, column, sizes, GROUP, 1, 1, 1)
        elif length > 160:
            _compute_tile(ring, step, out, tile, column, sizes, GROUP, 1, 1, 0)
        elif length > 128:
            _compute_tile(ring, step, out, tile, column, sizes, GROUP, 1, 0, 1)
        elif length > 96:
            _compute_tile(ring, step, out, tile, column, sizes, GROUP, 1, 0, 0)
        elif length > 64:
            _compute_tile(ring, step, out, tile, column, sizes, GROUP, 0, 1, 1)
        elif length > 32:
            _compute_tile(ring, step, out, tile, column, sizes, GROUP, 0, 1, 0)
        else:
            _compute_tile(ring, step, out, tile, column, sizes, GROUP, 0, 0, 1)
        step += sizes.STEPS


@gluon.jit
def _product_kernel(
    weight,
    x128,
    x64,
    x32,
    x,
    pairs,
    tiles,
    out,
    x_stride,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    PER_GROUP: gl.constexpr,
    PER_EXPERT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    DIVISOR: gl.constexpr,
    AHEAD: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    GATHER_REGISTERS: gl.constexpr,
    BOX_REGISTERS: gl.constexpr,
    OVERLAPS: gl.constexpr,
):
    """Long because Gluon takes descriptors one by one, and each group of warps with all its arguments."""
    sizes = Sizes(STAGES, STEPS, OUTPUTS, PER_GROUP, PER_EXPERT, ACTIVATION, DIVISOR, AHEAD, OVERLAPS)
    ring = allocate_ring(x128, sizes)
    if AHEAD == 0:
        await_then_release(OVERLAPS)
    first, second = (ring, tiles, out, sizes, 0), (ring, tiles, out, sizes, 1)
    filling = (weight, x128, x64, x32, ring, tiles, sizes)
    if DIVISOR > 0:
        gl.warp_specialize(
            [
                (_multiply_tiles, first),
                (_multiply_tiles, second),
                (gather_ahead, (x, x_stride, pairs, ring, tiles, sizes)),
                (fill_by_boxes, filling),
            ],
            [4, 4, 1],
            [MULTIPLY_REGISTERS, GATHER_REGISTERS, BOX_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [(_multiply_tiles, first), (_multiply_tiles, second), (fill_by_boxes, filling)],
            [4, 1],
            [MULTIPLY_REGISTERS, BOX_REGISTERS],
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
    """Write the activated products of rows with their experts' weights into `out` [pairs, outputs], in place.

    Long because the kernel's arguments are named one by one.

    Args:
        x, weight: bf16, aligned to 16 bytes; inputs are a multiple of DEPTH. See `grouped_product`.
        order: Of the rows.
        follows_first: See `grouped_product`.
    """
    is_gated, num_steps = activation == "gated_silu", x.shape[1] // DEPTH
    outputs, per_group = out.shape[1], 32 if is_gated else 64
    per_expert = triton.cdiv(outputs, per_group * GROUPS.value)
    most_tiles = (len(order.tiles) - 1) * per_expert
    _product_kernel[(min(num_multiprocessors(x.device), most_tiles),)](
        weight=_describe(weight.flatten(0, 1), 8 if is_gated else 64),
        x128=_describe(x, 128),
        x64=_describe(x, 64),
        x32=_describe(x, 32),
        x=x,
        pairs=order.pairs,
        tiles=order.tiles,
        out=out,
        x_stride=x.stride(0),
        STAGES=_STAGES,
        STEPS=num_steps,
        OUTPUTS=outputs,
        PER_GROUP=per_group,
        PER_EXPERT=per_expert,
        ACTIVATION=activation,
        DIVISOR=top_k or 0,
        AHEAD=min(_STAGES, num_steps) if follows_first and top_k is None else 0,
        MULTIPLY_REGISTERS=_MULTIPLY_REGISTERS,
        GATHER_REGISTERS=_GATHER_REGISTERS,
        BOX_REGISTERS=_BOX_REGISTERS,
        num_warps=4,
        **overlapping(x.device),
    )


def _describe(matrix: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, DEPTH], gl.NVMMASharedLayout(128, 16))
