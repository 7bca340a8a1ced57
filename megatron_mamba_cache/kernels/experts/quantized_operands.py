"""Left operands of wgmma from quantized weights: codes decoded in registers, and the scales of boxes of weights."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..quantized.code_tiles import DECODE_PAIRS
from ..quantized.fp4_codes import DECODE_QUADS, NVFP4_SCALES, quads_ptx
from .quantized_pipeline import BOX_ROWS, RUN_WORDS, RUNS, WORDS, Unit, weights_of


@gluon.jit
def decoded_fp8(words, WEIGHTS: gl.constexpr):
    """Return the weights [64, 128] of words [64, 64]; values only change their register."""
    low, high = gl.inline_asm_elementwise(DECODE_PAIRS, "=r,=r,r", [words], (gl.bfloat16, gl.bfloat16), True, 2)
    runs = gl.join(low, high).reshape([BOX_ROWS, RUNS, RUN_WORDS, 2])
    return gl.convert_layout(runs.permute([0, 1, 3, 2]).reshape([BOX_ROWS, WORDS * 2]), WEIGHTS)


@gluon.constexpr_function
def _four(dtype):
    return (dtype,) * 4


@gluon.jit
def decoded_nvfp4(words, fours, WEIGHTS: gl.constexpr):
    """Return the weights [64, 256] of words [64, 4, 16], times their scales; values only change their register."""
    found = gl.inline_asm_elementwise(NVFP4_SCALES, "=r,=r,=r,=r,r", [fours], _four(gl.int32), True, 1)
    LAYOUT: gl.constexpr = words.type.layout
    zero = gl.zeros([BOX_ROWS, RUNS, RUN_WORDS], gl.int32, layout=LAYOUT)
    first, second = found[0][:, :, None] + zero, found[1][:, :, None] + zero
    third, fourth = found[2][:, :, None] + zero, found[3][:, :, None] + zero
    given = [words, first, second, third, fourth]
    values = gl.inline_asm_elementwise(
        DECODE_QUADS, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", given, _four(gl.bfloat16), True, 2
    )
    return _joined(values, WEIGHTS)


@gluon.jit
def _joined(values, WEIGHTS: gl.constexpr):
    """Return weights [64, 256] of the four values of words [64, 4, 16]."""
    quads = gl.join(gl.join(values[0], values[1]), gl.join(values[2], values[3]))
    return gl.convert_layout(quads.permute([0, 1, 4, 3, 2]).reshape([BOX_ROWS, WORDS * 4]), WEIGHTS)


MXFP4_SCALES = gl.constexpr(
    """{
    prmt.b32 $0, $2, 0, 0x4040; prmt.b32 $1, $2, 0, 0x4141; shl.b32 $0, $0, 7; shl.b32 $1, $1, 7;
    }"""
)
"""PTX for the two E8M0 scales of a run, as pairs of equal bf16 numbers."""
DECODE_MXFP4 = gl.constexpr(
    quads_ptx(
        *(
            f"mul.bf16x2 code, code, high; mul.bf16x2 ${number}, code, ${scale};"
            for number, scale in enumerate((5, 5, 7, 7))
        ),
        begin=".reg .b32 high; mov.b32 high, 0x7E807E80;",
    )
)
"""PTX for the codes of two words times the scales of the first one: as `DECODE_QUADS`, with the whole range of E8M0."""


@gluon.jit
def decoded_mxfp4(words, twos, WEIGHTS: gl.constexpr):
    """Return the weights [64, 256] of words [64, 4, 16], times their scales; values only change their register."""
    found = gl.inline_asm_elementwise(MXFP4_SCALES, "=&r,=&r,r", [twos], (gl.int32, gl.int32), True, 1)
    LAYOUT: gl.constexpr = words.type.layout
    zero = gl.zeros([BOX_ROWS, RUNS, RUN_WORDS], gl.int32, layout=LAYOUT)
    given = [words, found[0][:, :, None] + zero, found[1][:, :, None] + zero]
    values = gl.inline_asm_elementwise(DECODE_MXFP4, "=&r,=&r,=&r,=r,r,r,r,r,r", given, _four(gl.bfloat16), True, 2)
    return _joined(values, WEIGHTS)


@gluon.jit
def _load_twos(scales, unit, BOX: gl.constexpr, k, sizes, LAYOUT: gl.constexpr):
    """Load the scales of MXFP4's runs of a box in step `k`, [64, 4] integers; 0 for missing runs."""
    OF_EXPERT: gl.constexpr = (2 if sizes.IS_GATED else 1) * sizes.OUTPUTS
    OF_ROW: gl.constexpr = sizes.INPUTS // (4 * RUN_WORDS)
    row = gl.arange(0, BOX_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    run = k * RUNS + gl.arange(0, RUNS, layout=gl.SliceLayout(0, LAYOUT))
    first = (unit.expert * OF_EXPERT + weights_of(unit, BOX, sizes)).to(gl.int64)
    pointers = scales + first * OF_ROW + (row[:, None] * OF_ROW + run[None, :])
    return gl.load(pointers, mask=(row >= 0)[:, None] & (run < OF_ROW)[None, :], other=0).to(gl.int32)


@gluon.jit
def _load_scale(scales, unit, BOX: gl.constexpr, k, sizes):
    """Load the scale of a box of FP8 in step `k`."""
    OF_EXPERT: gl.constexpr = (2 if sizes.IS_GATED else 1) * sizes.OUTPUTS // sizes.BLOCK_ROWS
    COLUMNS: gl.constexpr = (sizes.INPUTS + sizes.BLOCK_COLUMNS - 1) // sizes.BLOCK_COLUMNS
    row = unit.expert * OF_EXPERT + weights_of(unit, BOX, sizes) // sizes.BLOCK_ROWS
    return gl.load(scales + row * COLUMNS + gl.minimum(k * sizes.DEPTH // sizes.BLOCK_COLUMNS, COLUMNS - 1))


@gluon.jit
def load_scales(scales, unit, following, k, sizes, OF_RUNS: gl.constexpr):
    """Return what the weights of both boxes in step `k` are multiplied with; two zeros if it is not in global memory.

    Step STEPS is the first one of the following unit.
    """
    is_last = k == sizes.STEPS
    expert, output = gl.where(is_last, following.expert, unit.expert), gl.where(is_last, following.output, unit.output)
    its = Unit(expert, unit.first, unit.last, output)
    k = gl.where(is_last, 0, k)
    if sizes.BITS == 4 and not sizes.IS_NVFP4:
        found = (_load_twos(scales, its, 0, k, sizes, OF_RUNS), _load_twos(scales, its, 1, k, sizes, OF_RUNS))
    elif sizes.HAS_BLOCKS:
        found = (_load_scale(scales, its, 0, k, sizes), _load_scale(scales, its, 1, k, sizes))
    else:
        found = (0, 0)
    return found
