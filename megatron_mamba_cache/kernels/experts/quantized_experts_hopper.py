"""Grouped GEMM of few rows with quantized weights on Hopper GPUs, in Gluon; loads, decoding and matmuls overlap.

Other warps fill pipeline stages, across units of work. Four warps read the codes as left operands of wgmma, decode them
in registers, and multiply them with rows in shared memory. While tensor cores multiply one box of weights, the warps
decode the other one. Two programs share a multiprocessor: one of them decodes while the other one waits.

The inputs of a row are summed in the same order in every tile. Safe in CUDA graphs: no host sync, no atomics.
"""

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..activations import Activation
from ..gluon_common import await_then_release, thread_barrier
from ..kernel_launches import INTERPRETED, has_tested_gluon, is_hopper, resident_programs
from ..overlap import overlapping
from ..quantized.few_token_gemm import scales_of_kernel
from ..quantized.quantized_matrix import QuantizedMatrix
from .gemm_tiles import rows_of_short_tile
from .quantized_operands import decoded_fp8, decoded_mxfp4, decoded_nvfp4, load_scales
from .quantized_pipeline import (
    BOX_ROWS,
    RUN_WORDS,
    RUNS,
    WORDS,
    Sizes,
    allocate_pipeline,
    fill_with_codes,
    fill_with_rows,
    find_unit,
    gather,
    weights_of,
)
from .reference_experts import ExpertOrder

_REGISTERS = 128
"""Per thread, on average: two programs of eight warps share a multiprocessor."""
_FILL_REGISTERS = 40
_SHARED_BYTES = 110 * 1024
"""Of a program's pipeline."""
_MOST_STAGES = 6


@gluon.jit
def _decoded(pipeline, stage, BOX: gl.constexpr, scale, sizes, WEIGHTS: gl.constexpr, OF_RUNS: gl.constexpr):
    """Return the weights of a box of a stage; those of FP8 without its scale."""
    words = pipeline.codes.index(stage * 2 + BOX).load(WEIGHTS)
    if sizes.BITS == 8:
        weights = decoded_fp8(words, WEIGHTS)
    elif sizes.IS_NVFP4:
        fours = pipeline.scales.index(stage).slice(BOX * BOX_ROWS, BOX_ROWS).load(OF_RUNS)
        weights = decoded_nvfp4(words.reshape([BOX_ROWS, RUNS, RUN_WORDS]), fours, WEIGHTS)
    else:
        weights = decoded_mxfp4(words.reshape([BOX_ROWS, RUNS, RUN_WORDS]), scale, WEIGHTS)
    return weights


@gluon.jit
def _empty(pipeline, step, sizes, is_used):
    """Release the stage of a step, if it is used, after every warp has read its codes and rows."""
    thread_barrier()
    mbarrier.arrive(pipeline.empty.index(step % sizes.STAGES), count=1, pred=is_used)


@gluon.jit
def _sum_steps(pipeline, scales, scale, unit, following, step, sizes, SUMS: gl.constexpr, OF_RUNS: gl.constexpr):
    """Return the sums [64, ROWS] of both boxes of a unit, and the scales of the first step of the following unit.

    Tensor cores multiply a box while the warps decode the next one, also from step to step.

    Args:
        scale: Scales of the unit's first step.
        step: Number of the unit's first step.
    """
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    HAS_BLOCKS: gl.constexpr = sizes.HAS_BLOCKS  # products of a step are multiplied by its scale
    nothing = gl.zeros([BOX_ROWS, sizes.ROWS], gl.float32, layout=SUMS)
    first, second = nothing, nothing if HAS_BLOCKS else warpgroup_mma_init(nothing)
    weights = gl.zeros([BOX_ROWS, sizes.DEPTH], gl.bfloat16, layout=WEIGHTS)
    for k in range(sizes.STEPS):
        stage = (step + k) % sizes.STAGES
        found = load_scales(scales, unit, following, k + 1, sizes, OF_RUNS)
        mbarrier.wait(pipeline.full.index(stage), (step + k) // sizes.STAGES & 1)
        if sizes.DIVISOR > 0:
            fence_async_shared()  # gathered rows are not written by TMA, so wgmma needs a fence
        rows = pipeline.rows.index(stage).permute((1, 0))
        of_first = _decoded(pipeline, stage, 0, scale[0], sizes, WEIGHTS, OF_RUNS)
        if not HAS_BLOCKS:  # the second box of the previous step
            second, weights = warpgroup_mma_wait(0, deps=[second, weights])
            _empty(pipeline, step + k - 1, sizes, k > 0)
        begun = warpgroup_mma(of_first, rows, nothing if HAS_BLOCKS else first, use_acc=not HAS_BLOCKS, is_async=True)
        weights = _decoded(pipeline, stage, 1, scale[1], sizes, WEIGHTS, OF_RUNS)
        products = warpgroup_mma(
            weights, rows, nothing if HAS_BLOCKS else second, use_acc=not HAS_BLOCKS, is_async=True
        )
        begun, of_first = warpgroup_mma_wait(1, deps=[begun, of_first])
        first = gl.fma(begun, scale[0], first) if HAS_BLOCKS else begun
        if HAS_BLOCKS:
            products, weights = warpgroup_mma_wait(0, deps=[products, weights])
            _empty(pipeline, step + k, sizes, k >= 0)
            products = gl.fma(products, scale[1], second)
        second = products
        scale = found
    if not HAS_BLOCKS:
        second, weights = warpgroup_mma_wait(0, deps=[second, weights])
        _empty(pipeline, step + sizes.STEPS - 1, sizes, step >= 0)
    return first, second, scale


@gluon.jit
def _load_factors(factors, unit, BOX: gl.constexpr, sizes, SUMS: gl.constexpr):
    """Load the factors [64] of the rows of a box."""
    OF_EXPERT: gl.constexpr = (2 if sizes.IS_GATED else 1) * sizes.OUTPUTS
    row = weights_of(unit, BOX, sizes) + gl.arange(0, BOX_ROWS, layout=gl.SliceLayout(1, SUMS))
    return gl.load(factors + unit.expert * OF_EXPERT + row)


@gluon.jit
def _put(out, total, unit, output, sizes):
    """Store results [64, ROWS] from an output on; rows of other experts are not stored."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    result = gl.convert_layout(total.to(gl.bfloat16), LAYOUT)
    column = output + gl.arange(0, BOX_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    row = unit.first + gl.arange(0, sizes.ROWS, layout=gl.SliceLayout(0, LAYOUT))
    pointers = out + row.to(gl.int64)[None, :] * sizes.OUTPUTS + column[:, None]
    gl.store(pointers, result, mask=(column >= 0)[:, None] & (row < unit.last)[None, :])


@gluon.jit
def _multiply(pipeline, tiles, scales, factors, out, sizes):
    """Compute all units of this program; on four warps."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, sizes.ROWS, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    any_words = gl.zeros([BOX_ROWS, WORDS], gl.int16, layout=WEIGHTS).reshape([BOX_ROWS, RUNS, RUN_WORDS])
    OF_RUNS: gl.constexpr = gl.SliceLayout(2, any_words.type.layout)  # of the scales of the runs of words
    num_units = gl.load(tiles) * sizes.TILES
    unit = find_unit(tiles, gl.program_id(0), num_units, sizes)
    scale = load_scales(scales, unit, unit, 0, sizes, OF_RUNS)
    step = 0
    for number in range(gl.program_id(0), num_units, gl.num_programs(0)):
        following = find_unit(tiles, number + gl.num_programs(0), num_units, sizes)  # loaded early to hide latency
        if sizes.HAS_FACTORS:
            factor, other = _load_factors(factors, unit, 0, sizes, SUMS), _load_factors(factors, unit, 1, sizes, SUMS)
        first, second, scale = _sum_steps(pipeline, scales, scale, unit, following, step, sizes, SUMS, OF_RUNS)
        if sizes.IS_NVFP4:
            first, second = first * 65536.0, second * 65536.0  # scales are times 2^110, and codes times 2^-126
        if sizes.HAS_FACTORS:
            first, second = first * factor[:, None], second * other[:, None]
        if sizes.IS_GATED:
            _put(out, first / (1 + gl.exp(-first)) * second, unit, unit.output, sizes)
        else:
            if sizes.ACTIVATION == "squared_relu":
                first, second = gl.where(first < 0, 0.0, first), gl.where(second < 0, 0.0, second)
                first, second = first * first, second * second
            _put(out, first, unit, weights_of(unit, 0, sizes), sizes)
            _put(out, second, unit, weights_of(unit, 1, sizes), sizes)
        step += sizes.STEPS
        unit = following


@gluon.jit
def _quantized_experts_hopper_kernel(
    codes, rows, x, pairs, tiles, scales, factors, out, x_stride,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, BITS: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    BLOCK_COLUMNS: gl.constexpr, HAS_BLOCKS: gl.constexpr, HAS_FACTORS: gl.constexpr, ACTIVATION: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr, DIVISOR: gl.constexpr, AHEAD: gl.constexpr,
    FILL_REGISTERS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    sizes = Sizes(
        INPUTS, OUTPUTS, ACTIVATION, BITS, BLOCK_ROWS, BLOCK_COLUMNS, HAS_BLOCKS, HAS_FACTORS, ROWS, STAGES, DIVISOR,
        OVERLAPS,
    )  # fmt: skip
    pipeline = allocate_pipeline(codes, rows, sizes)
    if not AHEAD:
        await_then_release(OVERLAPS)
    work = (pipeline, tiles, scales, factors, out, sizes)
    if DIVISOR > 0:
        gl.warp_specialize(
            [(_multiply, work), (gather, (codes, scales, x, x_stride, pairs, pipeline, tiles, sizes))],
            [4],
            [FILL_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, work),
                (fill_with_codes, (codes, scales, pipeline, tiles, sizes)),
                (fill_with_rows, (rows, pipeline, tiles, sizes)),
            ],
            [1, 1],
            [FILL_REGISTERS, FILL_REGISTERS],
        )


def can_multiply_on_hopper(x: Tensor, weight: QuantizedMatrix, num_pairs: int, activation: Activation) -> bool:
    """Return True if `multiply_on_hopper` computes these tensors, in forms that kernels read, or in MXFP4."""
    if INTERPRETED or not x.is_cuda or not is_hopper(x.device) or not has_tested_gluon():
        return False
    num_experts, rows, _ = weight.shape
    has_units = weight.block_rows % 64 == 0 and weight.block_columns % 128 == 0
    return (
        num_pairs > 0
        and rows_of_short_tile(num_pairs, num_experts) > 0
        and rows % (128 if activation == "gated_silu" else 64) == 0
        and (weight.code_bits == 4 or weight.scales is None or has_units)
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.words.data_ptr() % 16 == 0
        and x.shape[0] * x.stride(0) < 2**31  # the kernel has 32-bit row offsets
    )


def multiply_on_hopper(
    x: Tensor,
    weight: QuantizedMatrix,
    order: ExpertOrder,
    out: Tensor,
    *,
    top_k: int | None,
    activation: Activation,
    follows_first: bool,
) -> None:
    """Write the activated GEMM of rows and their experts' weights to `out` [pairs, outputs].

    The arguments are those of `quantized_grouped_gemm`; the function is long because the kernel has many arguments.

    Args:
        follows_first: True if the previous launch is this kernel for the layer's first GEMM. Codes are then loaded
            before it ends.
    """
    tiles, rows = order.short_tiles, rows_of_short_tile(len(order.pairs), len(weight.words))
    is_gated, is_fp4 = activation == "gated_silu", weight.code_bits == 4
    depth = 64 * 16 // weight.code_bits
    scale_bytes = 2 * 64 * 4 * 4 if weight.block_columns == 16 else 0
    stages = min(_SHARED_BYTES // (2 * 64 * 64 * 2 + rows * depth * 2 + scale_bytes), _MOST_STAGES)
    outputs = out.shape[1]
    most_units = (len(tiles) - 1) * triton.cdiv(outputs, 64 if is_gated else 128)
    _quantized_experts_hopper_kernel[(min(resident_programs(x.device, 2), most_units),)](
        codes=TensorDescriptor.from_tensor(weight.words.flatten(0, 1), [64, 64], _layout()),
        rows=TensorDescriptor.from_tensor(x, [rows, depth], _layout()),
        x=x,
        pairs=order.pairs,
        tiles=tiles,
        scales=_scales(weight, x),
        factors=x if weight.factors is None else weight.factors,
        out=out,
        x_stride=x.stride(0),
        INPUTS=x.shape[1],
        OUTPUTS=outputs,
        BITS=weight.code_bits,
        BLOCK_ROWS=weight.block_rows,
        BLOCK_COLUMNS=weight.block_columns,
        HAS_BLOCKS=not is_fp4 and weight.scales is not None,
        HAS_FACTORS=weight.factors is not None,
        ACTIVATION=activation,
        ROWS=rows,
        STAGES=stages,
        DIVISOR=top_k or 0,
        AHEAD=follows_first and top_k is None,
        FILL_REGISTERS=_FILL_REGISTERS,
        num_warps=4,
        maxnreg=_REGISTERS,
        enable_fp_fusion=True,
        **overlapping(x.device),
    )


def _scales(weight: QuantizedMatrix, other: Tensor) -> Tensor:
    """Return the scales as the kernel reads them, those of a run of FP4 codes as an integer; `other` for none."""
    if weight.scales is None:
        return other
    return weight.scales.view(torch.int16) if is_mxfp4(weight) else scales_of_kernel(weight)


def is_mxfp4(weight: QuantizedMatrix) -> bool:
    """Return True for FP4 with scales that are powers of 2, and a layout that kernels read."""
    is_dense = weight.words.is_contiguous() and weight.scales is not None and weight.scales.is_contiguous()
    return weight.code_bits == 4 and is_dense and weight.block_columns == 32


@cache
def _layout() -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a TMA box; cached because constructing it is slow."""
    return gl.NVMMASharedLayout(128, 16, rank=2)
