"""Product of one token with an FP8 weight, and a fused activation; codes are read once and decoded in registers.

Reading the codes takes most of the time, so CUDA cores compute. Codes do not depend on the previous kernel: a program
loads its first codes before it waits for that kernel. Scales of blocks multiply the inputs, which all rows of a program
share; factors multiply the totals. Sums are in fp32.

Grid: one program for ROWS outputs; the first programs compute rows that are not quantized. Graph safe: no host sync, no
atomics.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import Activation, activated_ref
from ..kernel_language import appended
from ..kernel_launches import INTERPRETED, launches_kernel
from ..overlap import await_written, let_next_begin, overlapping
from .code_tiles import decoded_pairs
from .few_token_gemm import has_kernel, multiply_ref
from .quantized_matrix import RUN, QuantizedMatrix

_IS_INTERPRETED = tl.constexpr(INTERPRETED)
_VECTOR = tl.constexpr(4)
"""Pairs of words that a thread loads at once: 16 bytes."""


@dataclass(frozen=True, slots=True)
class OneTokenTiles:
    """Sizes of a program.

    Args:
        rows: Of the weight; of each half of it for `gated_silu`.
        pairs: Pairs of words of each row in one iteration.
        ahead: Iterations whose codes are loaded before they are needed.
    """

    rows: int
    pairs: int
    ahead: int
    num_warps: int


@triton.jit
def _load_pairs(pairs, row, begin, LENGTH: tl.constexpr, PAIRS: tl.constexpr):
    """Load [PAIRS / 4, rows, 4] pairs of words of rows, from pair `begin` on; 0 beyond their end."""
    pair = begin + (tl.arange(0, PAIRS // _VECTOR) * _VECTOR)[:, None, None] + tl.arange(0, _VECTOR)[None, None, :]
    return tl.load(pairs + row.to(tl.int64)[None, :, None] * LENGTH + pair, mask=pair < LENGTH, other=0)


@triton.jit
def _decoded_floats(pairs):
    """Return the values of the four e4m3 codes of pairs of words, the lowest bits first, in fp32; exact."""
    if _IS_INTERPRETED:
        first, second = decoded_pairs(pairs)
        third, fourth = decoded_pairs(pairs >> 16)
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            """{
            .reg .b16 lower, upper, low, high; .reg .b32 pair;
            mov.b32 {lower, upper}, $4;
            cvt.rn.f16x2.e4m3x2 pair, lower; mov.b32 {low, high}, pair; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;
            cvt.rn.f16x2.e4m3x2 pair, upper; mov.b32 {low, high}, pair; cvt.f32.f16 $2, low; cvt.f32.f16 $3, high;
            }""",
            "=f,=f,=f,=f,r",
            [pairs],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return first, second, third, fourth


@triton.jit
def _load_scales(
    scales, row, begin, LENGTH: tl.constexpr, GRID_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Load the scales [PAIRS / 4, 1, 1] of pairs of a row; 1 if there are none."""
    pair = begin + (tl.arange(0, PAIRS // _VECTOR) * _VECTOR)[:, None, None]
    if GRID_COLUMNS > 0:
        column = tl.minimum(pair, LENGTH - 1) // (BLOCK_COLUMNS // 4)
        scale = tl.load(scales + row // BLOCK_ROWS * GRID_COLUMNS + column)
    else:
        scale = 1.0
    return scale


@triton.jit
def _load_inputs(x, begin, LENGTH: tl.constexpr, PAIRS: tl.constexpr, RUN: tl.constexpr):
    """Load the inputs [PAIRS / 4, 1, 4] of the four codes of pairs, the lowest bits first, in fp32."""
    pair = begin + tl.arange(0, PAIRS // _VECTOR) * _VECTOR
    first = (pair // (RUN // 2) * RUN + pair % (RUN // 2))[:, None, None] + tl.arange(0, _VECTOR)[None, None, :]
    low = tl.load(x + first, mask=first < 2 * LENGTH, other=0)
    high = tl.load(x + RUN // 2 + first, mask=first < 2 * LENGTH, other=0)
    first, third = (low << 16).to(tl.float32, bitcast=True), (low & -65536).to(tl.float32, bitcast=True)
    return first, (high << 16).to(tl.float32, bitcast=True), third, (high & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _put_quantized_rows(
    program, x, pairs, scales, factors, out,
    OUTPUTS: tl.constexpr, LENGTH: tl.constexpr, GRID_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, RUN: tl.constexpr, HAS_FACTORS: tl.constexpr, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, AHEAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS outputs; for `gated_silu`, from rows of both halves of the weight. Long because of its arguments."""
    HALVES: tl.constexpr = 2 if ACTIVATION == "gated_silu" else 1
    first = program * ROWS
    row = tl.minimum(first + tl.arange(0, ROWS), OUTPUTS - 1)
    codes, scale, totals = (), (), ()
    for _ in tl.static_range(HALVES):
        totals = appended(totals, tl.zeros([PAIRS // _VECTOR, ROWS, _VECTOR], tl.float32))
    for step in tl.static_range(AHEAD):
        for half in tl.static_range(HALVES):
            codes = appended(codes, _load_pairs(pairs, half * OUTPUTS + row, step * PAIRS, LENGTH, PAIRS))
            found = _load_scales(
                scales, half * OUTPUTS + first, step * PAIRS, LENGTH, GRID_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS, PAIRS
            )
            scale = appended(scale, found)
    await_written(OVERLAPS)
    for begin in tl.range(0, LENGTH, PAIRS, loop_unroll_factor=AHEAD):  # so that no codes move between registers
        inputs = _load_inputs(x, begin, LENGTH, PAIRS, RUN)
        following, following_scale, added = codes[HALVES:], scale[HALVES:], ()
        for half in tl.static_range(HALVES):
            values, total = _decoded_floats(codes[half]), totals[half]  # type: ignore[var-annotated]
            for number in tl.static_range(4):
                total += values[number] * (inputs[number] * scale[half] if GRID_COLUMNS > 0 else inputs[number])
            added = appended(added, total)
            ahead = begin + AHEAD * PAIRS
            following = appended(following, _load_pairs(pairs, half * OUTPUTS + row, ahead, LENGTH, PAIRS))
            found = _load_scales(
                scales, half * OUTPUTS + first, ahead, LENGTH, GRID_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS, PAIRS
            )
            following_scale = appended(following_scale, found)
        codes, scale, totals = following, following_scale, added  # type: ignore[assignment]
    result = tl.sum(tl.sum(totals[0], axis=2), axis=0)  # type: ignore[misc]
    if HAS_FACTORS:
        result *= tl.load(factors + row)
    if ACTIVATION == "squared_relu":
        result = tl.maximum(result, 0, propagate_nan=tl.PropagateNan.ALL)
        result = result * result
    if ACTIVATION == "gated_silu":
        other = tl.sum(tl.sum(totals[1], axis=2), axis=0)  # type: ignore[misc]
        if HAS_FACTORS:
            other *= tl.load(factors + OUTPUTS + row)
        result = result / (1 + tl.exp(-result)) * other
    row = first + tl.arange(0, ROWS)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < OUTPUTS)


@triton.jit
def _put_plain_rows(
    program, x, pairs, out, OUTPUTS: tl.constexpr, LENGTH: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS outputs of a bf16 weight, given as pairs of inputs."""
    row, pair = program * ROWS + tl.arange(0, ROWS), tl.arange(0, PAIRS)
    pointers = pairs + tl.minimum(row, OUTPUTS - 1).to(tl.int64)[:, None] * LENGTH + pair[None, :]
    weights = tl.load(pointers, mask=(pair < LENGTH)[None, :], other=0)
    await_written(OVERLAPS)
    total = tl.zeros([ROWS, PAIRS], tl.float32)
    for begin in range(0, LENGTH, PAIRS):
        given = tl.load(x + begin + pair, mask=begin + pair < LENGTH, other=0)[None, :]
        following = tl.load(pointers + begin + PAIRS, mask=(begin + PAIRS + pair < LENGTH)[None, :], other=0)
        total += (weights << 16).to(tl.float32, bitcast=True) * (given << 16).to(tl.float32, bitcast=True)
        total += (weights & -65536).to(tl.float32, bitcast=True) * (given & -65536).to(tl.float32, bitcast=True)
        weights = following
    tl.store(out + row, tl.sum(total, axis=1).to(out.dtype.element_ty), mask=row < OUTPUTS)


@triton.jit
def _one_quantized_token_kernel(
    x, pairs, scales, factors, plain, out,
    OUTPUTS: tl.constexpr, LENGTH: tl.constexpr, GRID_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, RUN: tl.constexpr, HAS_FACTORS: tl.constexpr, ACTIVATION: tl.constexpr,
    PLAIN_ROWS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, AHEAD: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    let_next_begin(OVERLAPS)
    PLAIN_PROGRAMS: tl.constexpr = (PLAIN_ROWS + ROWS - 1) // ROWS
    program = tl.program_id(0)
    if PLAIN_ROWS > 0 and program < PLAIN_PROGRAMS:
        _put_plain_rows(program, x, plain, out + OUTPUTS, PLAIN_ROWS, 2 * LENGTH, ROWS, 2 * PAIRS, OVERLAPS)
    else:
        _put_quantized_rows(
            program - PLAIN_PROGRAMS, x, pairs, scales, factors, out, OUTPUTS, LENGTH, GRID_COLUMNS, BLOCK_ROWS,
            BLOCK_COLUMNS, RUN, HAS_FACTORS, ACTIVATION, ROWS, PAIRS, AHEAD, OVERLAPS,
        )  # fmt: skip


def can_multiply_one_quantized_token(x: Tensor, weight: QuantizedMatrix, activation: Activation = "none") -> bool:
    """Return True if `multiply_one_quantized_token` launches its kernel: one bf16 token and an FP8 weight."""
    rows, columns = weight.shape[-2:]
    outputs = rows // 2 if activation == "gated_silu" else rows
    return (
        launches_kernel(x)
        and x.numel() == columns
        and x.dtype is torch.bfloat16
        and x.is_contiguous()
        and x.data_ptr() % 4 == 0
        and weight.code_bits == 8
        and weight.words.dim() == 2
        and has_kernel(weight)
        and (weight.scales is None or _fits_blocks(weight, outputs, one_token_tiles(weight).rows))
        and (INTERPRETED or torch.cuda.get_device_capability(x.device) >= (8, 9))  # converts e4m3
    )


def multiply_one_quantized_token(
    x: Tensor,
    weight: QuantizedMatrix,
    activation: Activation = "none",
    *,
    plain_weight: Tensor | None = None,
    out: Tensor | None = None,
    tiles: OneTokenTiles | None = None,
) -> Tensor:
    """Return activation(x @ W.T) for one token. Long because the kernel's arguments are named one by one.

    Args:
        x: [..., inputs], one token.
        weight: [outputs, inputs]; for `gated_silu` [2 * outputs, inputs], gates first.
        activation: Applied in fp32; the result is rounded once.
        plain_weight: [more outputs, inputs] bf16: rows that follow those of `weight`. Only without an activation.
        out: Contiguous, as the result, written in place. None: a new one.
        tiles: None for `one_token_tiles`.

    Returns:
        [..., outputs], more outputs included.

    Raises:
        ValueError: If the kernel would be launched, but `can_multiply_one_quantized_token` is False.

    Reference: `multiply_one_quantized_token_ref`. CUDA-graph safe: no host sync, one launch.
    """
    num_plain = 0 if plain_weight is None else len(plain_weight)
    if activation != "none" and num_plain:
        raise ValueError("rows that are not quantized have no activation: multiply them by themselves")
    outputs = weight.shape[0] // (2 if activation == "gated_silu" else 1)
    out = x.new_empty(*x.shape[:-1], outputs + num_plain) if out is None else out
    if not launches_kernel(x):
        return out.copy_(multiply_one_quantized_token_ref(x, weight, activation, plain_weight=plain_weight))
    if not can_multiply_one_quantized_token(x, weight, activation):
        raise ValueError(
            f"need one bf16 token and an FP8 weight in blocks of whole programs, found {tuple(x.shape)} {x.dtype} "
            f"and {weight.code_bits}-bit codes of {tuple(weight.shape)}"
        )
    tiles = tiles or one_token_tiles(weight, activation)
    _one_quantized_token_kernel[(triton.cdiv(outputs, tiles.rows) + triton.cdiv(num_plain, tiles.rows),)](
        x=x.view(torch.int32),
        pairs=weight.words.view(torch.int32),
        scales=x if weight.scales is None else weight.scales,
        factors=x if weight.factors is None else weight.factors,
        plain=x if plain_weight is None else plain_weight.view(torch.int32),
        out=out,
        OUTPUTS=outputs,
        LENGTH=weight.words.shape[1] // 2,
        GRID_COLUMNS=0 if weight.scales is None else weight.scales.shape[1],
        BLOCK_ROWS=weight.block_rows,
        BLOCK_COLUMNS=weight.block_columns,
        RUN=RUN,
        HAS_FACTORS=weight.factors is not None,
        ACTIVATION=activation,
        PLAIN_ROWS=num_plain,
        ROWS=tiles.rows,
        PAIRS=tiles.pairs,
        AHEAD=tiles.ahead,
        num_warps=tiles.num_warps,
        enable_fp_fusion=True,
        **overlapping(x.device),
    )
    return out


def one_token_tiles(weight: QuantizedMatrix, activation: Activation = "none") -> OneTokenTiles:
    """Return the sizes of a program: two warps, whose threads have eight loads of 16 bytes in flight."""
    pairs = min(256, triton.next_power_of_2(weight.words.shape[1]) // 2)
    return OneTokenTiles(rows=4, pairs=pairs, ahead=1 if activation == "gated_silu" else 2, num_warps=2)


def _fits_blocks(weight: QuantizedMatrix, outputs: int, rows: int) -> bool:
    """Return True if the rows of a program have one scale in each block of columns."""
    is_divided = len(weight.words) == outputs or outputs % rows == 0
    return weight.block_rows % rows == 0 and weight.block_columns % (2 * RUN) == 0 and is_divided


def multiply_one_quantized_token_ref(
    x: Tensor, weight: QuantizedMatrix, activation: Activation = "none", *, plain_weight: Tensor | None = None
) -> Tensor:
    """Torch twin of `multiply_one_quantized_token`; computes in fp32."""
    found = activated_ref(multiply_ref(x.float(), weight), activation)
    if plain_weight is not None:
        found = torch.cat((found, x.float() @ plain_weight.float().T), dim=-1)
    return found.to(x.dtype)
