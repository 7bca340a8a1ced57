"""Grouped GEMM on Hopper GPUs for experts with many bf16 rows and NVFP4 weights; written in Gluon.

As `grouped_gemm_hopper`, but four warps decode the weights of a tile into the pipeline stages while tensor cores
multiply earlier ones. The same warps load the rows. Products of a code and its scale are exact in bf16, and factors
multiply the sums. Safe in CUDA graphs: no host sync, no atomics.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from ..gluon_common import await_then_release, copy_gathered, reinterpret
from ..overlap import overlapping
from ..quantized.few_token_gemm import scales_of_kernel
from ..quantized.fp4_codes import DECODE_QUADS, NVFP4_SCALES
from ..quantized.quantized_matrix import RUN, QuantizedMatrix
from .gemm_pipeline import (
    DEPTH,
    LINES_OF_ROWS,
    MOST_ROWS,
    Sizes,
    allocate_pipeline,
    copy_rows,
    find_tile,
    find_unit,
    row_of_unit,
    row_offsets,
)
from .grouped_gemm_hopper import describe, multiply_tiles, output_tiles
from .reference_experts import ExpertOrder

_STAGES = 4
_MULTIPLY_REGISTERS = 208
_FILL_REGISTERS = 88
_PAIRS = gl.constexpr(RUN // 2)
"""Pairs of words in a run; a pair is loaded and decoded at once."""
_DECODE = gl.constexpr(DECODE_QUADS.value.replace("$7", "$6").replace("$9", "$7").replace("$11", "$8"))
"""`DECODE_QUADS` with each scale as one operand."""
_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [16, 2], [4, 1], [0, 1]))
"""Layout of the words of 64 rows: eight threads with one swizzled 16-byte piece of a row each write to all banks."""
_STORED = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))
"""Layout of a unit of the pipeline's weights, as pairs."""


@aggregate
class _Codes:
    """Words [rows of all experts, STEPS * RUN] as int32 pairs, and the four scales of each run as an int32."""

    words: gl.tensor
    scales: gl.tensor

    @gluon.constexpr_function
    def __init__(self, words, scales):
        self.words = words
        self.scales = scales


@gluon.jit
def _load(codes, rows, k, sizes):
    """Return words and scales of a step of each of a tile's units."""
    found = ()
    for unit in gl.static_range(sizes.UNITS):
        run = rows[unit] * sizes.STEPS + k
        pair = gl.arange(0, _PAIRS, layout=gl.SliceLayout(0, _WORDS))
        words = gl.load(codes.words + run[:, None] * _PAIRS + pair[None, :])
        found = found + (words, gl.load(codes.scales + run))  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _decoded(words, scales):
    """Return pairs of weights [64, DEPTH / 2], times 2^-16, of pairs of words and the scales of their runs."""
    of_runs = gl.inline_asm_elementwise(NVFP4_SCALES, "=r,=r,=r,=r,r", [scales], (gl.int32,) * 4, True, 1)
    given = (words,)
    for number in gl.static_range(4):
        scale, _ = gl.broadcast(of_runs[number][:, None], words)
        given = given + (scale,)  # type: ignore[assignment]  # noqa: RUF005
    first, second, third, fourth = gl.inline_asm_elementwise(
        _DECODE, "=r,=r,=r,=r,r,r,r,r,r", given, (gl.int32,) * 4, True, 1
    )
    joined = gl.join(gl.join(first, third), gl.join(second, fourth))
    return joined.reshape([64, _PAIRS, 4]).permute([0, 2, 1]).reshape([64, 4 * _PAIRS])


@gluon.jit
def _fill(codes, rows32, x, x_stride, pairs, pipeline, tiles, sizes):
    """Decode weights and load or gather rows for all of this program's tiles into free stages; runs on four warps."""
    PIECES: gl.constexpr = MOST_ROWS // 32 if sizes.DIVISOR > 0 else 0
    step = 0
    num_tiles = gl.load(tiles) * sizes.TILES
    for number in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile = find_tile(tiles, number, num_tiles, sizes)
        num_pieces = (tile.last - tile.first + 31) // 32
        offsets = ()
        for i in gl.static_range(PIECES):
            piece = row_offsets(x_stride, pairs, tile.first + 32 * i, tile.last, sizes.DIVISOR)
            offsets = offsets + (piece,)  # type: ignore[assignment]  # noqa: RUF005
        rows = ()
        line = gl.arange(0, 64, layout=gl.SliceLayout(1, _WORDS))
        for unit in gl.static_range(sizes.UNITS):
            row = row_of_unit(tile.expert, find_unit(tile.outputs, sizes) + unit, line, sizes)
            rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
        given = _load(codes, rows, 0, sizes)
        for k in range(sizes.STEPS):
            following = _load(codes, rows, gl.minimum(k + 1, sizes.STEPS - 1), sizes)
            stage = (step + k) % sizes.STAGES
            full = pipeline.full.index(stage)
            mbarrier.wait(pipeline.empty.index(stage), ((step + k) // sizes.STAGES & 1) ^ 1)
            for i in gl.static_range(PIECES):
                if i < num_pieces:
                    copy_gathered(pipeline.rows.index(stage * (LINES_OF_ROWS // 32) + i), x + k * 64 + offsets[i])
            if sizes.DIVISOR > 0:
                async_copy.mbarrier_arrive(full, increment_count=False)
            else:
                copy_rows(rows32, pipeline, stage, tile.first, num_pieces, k * 64)
            for unit in gl.static_range(sizes.UNITS):
                weights = _decoded(given[2 * unit], given[2 * unit + 1])
                reinterpret(pipeline.weights.index(stage * sizes.UNITS + unit), gl.int32, [64, 32], _STORED).store(
                    weights
                )
            fence_async_shared()
            mbarrier.arrive(full, count=1)
            given = following
        step += sizes.STEPS


@gluon.jit
def _coded_gemm_kernel(
    words, scales, factors, rows32, x, pairs, tiles, out, x_stride,
    UNITS: gl.constexpr, NUM_WIDE: gl.constexpr, PER_UNIT: gl.constexpr, TILES: gl.constexpr, TURN: gl.constexpr,
    STAGES: gl.constexpr, STEPS: gl.constexpr, OUTPUTS: gl.constexpr, ACTIVATION: gl.constexpr, DIVISOR: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr, FILL_REGISTERS: gl.constexpr, 
    OVERLAPS: gl.constexpr,
):  # fmt: skip
    sizes = Sizes(
        UNITS, NUM_WIDE, PER_UNIT, TILES, TURN, STAGES, STEPS, OUTPUTS, ACTIVATION, DIVISOR, False, OVERLAPS, True
    )
    pipeline = allocate_pipeline(rows32, rows32, sizes)
    await_then_release(OVERLAPS)
    first, second = (pipeline, tiles, out, factors, sizes, 0), (pipeline, tiles, out, factors, sizes, 1)
    filling = (_Codes(words, scales), rows32, x, x_stride, pairs, pipeline, tiles, sizes)
    gl.warp_specialize(
        [(multiply_tiles, first), (multiply_tiles, second), (_fill, filling)],
        [4, 4],
        [MULTIPLY_REGISTERS, FILL_REGISTERS],
    )


def multiply_codes_on_hopper(
    x: Tensor, weight: QuantizedMatrix, order: ExpertOrder, out: Tensor, *, top_k: int | None, activation: str
) -> None:
    """Multiply rows by their experts' NVFP4 weights, apply the activation, and write to `out` [pairs, outputs].

    The arguments are those of `grouped_gemm`. The function is long because the kernel has many arguments.

    Args:
        x: bf16, aligned to 16 bytes. The number of inputs must be a multiple of DEPTH, and in a gated layer the number
            of outputs a multiple of 8. Each expert must have more than 64 rows of weights, including gates.
    """
    assert weight.factors is not None
    grid, sizes = output_tiles(out, order, weight.shape[0], is_gated=activation == "gated_silu")
    _coded_gemm_kernel[grid](
        words=weight.words.view(torch.int32),
        scales=scales_of_kernel(weight),
        factors=weight.factors,
        rows32=describe(x, 32),
        x=x,
        pairs=order.pairs,
        tiles=order.tiles,
        out=out,
        x_stride=x.stride(0),
        STAGES=_STAGES,
        STEPS=x.shape[1] // DEPTH,
        OUTPUTS=out.shape[1],
        ACTIVATION=activation,
        DIVISOR=top_k or 0,
        MULTIPLY_REGISTERS=_MULTIPLY_REGISTERS,
        FILL_REGISTERS=_FILL_REGISTERS,
        num_warps=4,
        enable_fp_fusion=True,
        **sizes,
        **overlapping(x.device),
    )
