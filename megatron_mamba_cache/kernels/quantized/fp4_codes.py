"""Values of e2m1 codes, four in a word, times the e4m3 scales of NVFP4; `quantized_matrix` has the bits of words."""

import triton
import triton.language as tl

from ..kernel_language import appended
from ..kernel_launches import INTERPRETED

_IS_INTERPRETED = tl.constexpr(INTERPRETED)

NVFP4_SCALES = tl.constexpr(
    """{
    .reg .b32 even, odd, high, higher; .reg .b16 first, second, third, fourth;
    mov.b32 high, 0x7B807B80; mov.b32 higher, 0x76807680;
    shl.b32 even, $4, 4; and.b32 even, even, 0x07F007F0; mul.bf16x2 even, even, high; mul.bf16x2 even, even, higher;
    shr.b32 odd, $4, 4; and.b32 odd, odd, 0x07F007F0; mul.bf16x2 odd, odd, high; mul.bf16x2 odd, odd, higher;
    mov.b32 {first, third}, even; mov.b32 {second, fourth}, odd;
    mov.b32 $0, {first, first}; mov.b32 $1, {second, second};
    mov.b32 $2, {third, third}; mov.b32 $3, {fourth, fourth};
    }"""
)
"""PTX of `nvfp4_scales`. Products can read one half of a register twice, so equal halves are not written."""


@triton.jit
def nvfp4_scales(scales):
    """Return the four scales of runs as pairs of equal bf16 numbers, times 2^110; exact.

    Args:
        scales: int32, each the four e4m3 scales of a run, none of which is negative.

    Returns:
        Four int32 tensors.
    """
    if _IS_INTERPRETED:
        found = ()
        for number in tl.static_range(4):
            bits = ((scales >> (8 * number)) & 0x7F) << 20
            value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36 * 1.2980742146337069e33
            found = appended(found, value.to(tl.int32, bitcast=True))  # exact in bf16: the upper half is that number
        pairs = found
    else:
        pairs = tl.inline_asm_elementwise(
            NVFP4_SCALES, "=r,=r,=r,=r,r", [scales], dtype=(tl.int32,) * 4, is_pure=True, pack=1
        )
    return pairs


def quads_ptx(*products: str, begin: str = "") -> str:
    """Return PTX for the codes of two words, $4: of each, its bits of bf16 numbers, `code`, then its product.

    `quantized_matrix` has the bits of words. With the bytes of a word swapped, codes 1 and 2 move up within it.
    """
    mask = "0x81C081C0"
    bits = (
        f"and.b32 code, $4, {mask};",
        f"shl.b32 code, swapped, 2; and.b32 code, code, {mask};",
        f"shl.b32 code, swapped, 5; and.b32 code, code, {mask};",
        f"and.b32 code, $4, 0x001B001B; mul.lo.u32 code, code, 16648; and.b32 code, code, {mask};",
    )
    steps = " ".join(f"{found} {product}" for found, product in zip(bits, products, strict=True))
    return f"{{ {begin} .reg .b32 code, swapped; prmt.b32 swapped, $4, 0, 0x2301; {steps} }}"


DECODE_QUADS = tl.constexpr(
    quads_ptx(*(f"mul.bf16x2 ${number}, code, ${scale};" for number, scale in enumerate((5, 7, 9, 11))))
)
"""PTX of `decoded_quads` for two words at once; it reads the scales of the first one."""


@triton.jit
def code_of_word(bits, NUMBER: tl.constexpr):
    """Return one of the four e2m1 codes of words; see `quantized_matrix`."""
    if NUMBER == 0:
        code = (bits >> 12) & 8 | (bits >> 6) & 7
    elif NUMBER == 1:
        code = (bits >> 2) & 8 | (bits >> 12) & 7
    elif NUMBER == 2:
        code = (bits << 1) & 8 | (bits >> 9) & 7
    else:
        code = (bits << 2) & 12 | (bits >> 3) & 3
    return code


@triton.jit
def of_words(scales, RUN: tl.constexpr):
    """Repeat what each run has, [rows, runs], for its words."""
    ROWS: tl.constexpr = scales.shape[0]
    RUNS: tl.constexpr = scales.shape[1]
    return tl.reshape(tl.broadcast_to(scales[:, :, None], [ROWS, RUNS, RUN]), [ROWS, RUNS * RUN])


@triton.jit
def decoded_quads(words, first, second, third, fourth):
    """Return the values of the four e2m1 codes of words, times a scale for each, in bf16; exact.

    The bits of a code, moved to those of a bf16 number, mean 2^-126 of its value.

    Args:
        first, second, third, fourth: The scales of each; see `nvfp4_scales`.
    """
    if _IS_INTERPRETED:
        bits = words.to(tl.int32)
        values = ()
        for number in tl.static_range(4):
            code = code_of_word(bits, number)
            found = (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True)
            scale = first if number == 0 else second if number == 1 else third if number == 2 else fourth
            values = appended(values, found * scale.to(tl.float32, bitcast=True))
        result = values
    else:
        result = tl.inline_asm_elementwise(
            DECODE_QUADS,
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
            [words, first, second, third, fourth],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return result
