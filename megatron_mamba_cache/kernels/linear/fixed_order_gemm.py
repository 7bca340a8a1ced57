"""GEMM of a linear layer in bf16 with a fixed order of sums: a token's bits do not depend on the other tokens.

Tensor cores add the products of 16 inputs to an fp32 accumulator with one instruction, whose result for an output
depends on its own row of weights, its own token and its accumulator only. Every output is summed by the same
instructions, however many tokens there are: weights are the left operand, and inputs are in ascending order. Tile sizes
change only which program computes it. If a weight has few outputs, its inputs are divided into parts, each with its own
accumulator, and the parts are added in ascending order. The number of parts follows from the weight's shape.

Two kernels: with few tokens, each part of a tile has its own program, and the last program of a tile adds the parts,
whichever program that is. With many tokens, a program computes all parts of a tile. Safe in CUDA graphs: no host sync.
Counters are zero between launches, so GEMMs that share them must not run concurrently.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..activations import Activation, activated_ref
from ..kernel_launches import INTERPRETED, launches_kernel
from ..overlap import await_inputs, overlapping
from .fixed_order_tiles import DEPTH, FixedOrderTiles, choose_tiles, num_counters, num_parts

_IS_INTERPRETED = tl.constexpr(INTERPRETED)
_ROW_BYTES = 16
"""Alignment of rows that TMA requires."""
_TILES_TOGETHER = 8


@triton.jit
def _multiply(weights, given, total):
    """Return total plus weights [outputs, depth] @ given [tokens, depth].T.

    Triton's interpreter would multiply bf16 bit patterns as integers, so there, an explicit sum replaces `tl.dot`.
    """
    if _IS_INTERPRETED:
        found = total + tl.sum(weights.to(tl.float32).T[:, :, None] * given.to(tl.float32).T[:, None, :], axis=0)
    else:
        found = tl.dot(weights, given.T, total)
    return found


@triton.jit
def _sum_part(
    x, weight, token, column, part, num_steps,
    PARTS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return the sums [WIDTH, TILE] of one part of the inputs for the tile that begins at a token and an output."""
    total = tl.zeros([WIDTH, TILE], tl.float32)
    for step in range(part * num_steps // PARTS, (part + 1) * num_steps // PARTS):
        weights = weight.load([column, step * DEPTH])
        given = x.load([token, step * DEPTH])
        total = _multiply(weights, given, total)
    return total


@triton.jit
def _store(out, total, token, column, out_stride, num_tokens, num_outputs, ACTIVATION: tl.constexpr):
    """Apply the activation to sums [outputs, tokens], round them once, and store those that exist."""
    if ACTIVATION == "squared_relu":
        total = tl.maximum(total, 0, propagate_nan=tl.PropagateNan.ALL)
        total = total * total
    pointers = out + token.to(tl.int64)[None, :] * out_stride + column[:, None]
    is_stored = (token < num_tokens)[None, :] & (column < num_outputs)[:, None]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["num_tokens", "num_steps"])
def _split_kernel(
    x, weight, out, sums, counters, out_stride, num_tokens, num_outputs, num_steps,
    PARTS: tl.constexpr, ACTIVATION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Sum one part of a tile; the last program of the tile adds its parts. Grid: (tiles of outputs * PARTS, tokens)."""
    await_inputs(OVERLAPS)
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    first, first_column = tl.program_id(1) * TILE, tile * WIDTH
    total = _sum_part(x, weight, first, first_column, part, num_steps, PARTS, TILE, WIDTH, DEPTH)
    token, column = first + tl.arange(0, TILE), first_column + tl.arange(0, WIDTH)
    if PARTS == 1:
        _store(out, total, token, column, out_stride, num_tokens, num_outputs, ACTIVATION)
    else:
        number = tl.program_id(1) * (tl.num_programs(0) // PARTS) + tile
        slot = tl.arange(0, WIDTH)[:, None] * TILE + tl.arange(0, TILE)[None, :]
        own = sums + number.to(tl.int64) * (PARTS * WIDTH * TILE) + slot
        tl.store(own + part * (WIDTH * TILE), total)
        tl.debug_barrier()  # every thread's sums are written before the program counts itself
        if tl.atomic_add(counters + number, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
            tl.store(counters + number, 0)
            total = tl.load(own, cache_modifier=".cg")
            for other in tl.static_range(1, PARTS):
                total += tl.load(own + other * (WIDTH * TILE), cache_modifier=".cg")
            _store(out, total, token, column, out_stride, num_tokens, num_outputs, ACTIVATION)


@triton.jit(do_not_specialize=["num_tokens", "num_steps"])
def _whole_kernel(
    x, weight, out, out_stride, num_tokens, num_outputs, num_steps,
    PARTS: tl.constexpr, ACTIVATION: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    TOGETHER: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute a whole tile; TOGETHER tiles of tokens are next to each other and share weights in the L2 cache."""
    await_inputs(OVERLAPS)
    num_tiles = tl.cdiv(num_tokens, TILE)
    in_strip = TOGETHER * tl.cdiv(num_outputs, WIDTH)
    strip, within = tl.program_id(0) // in_strip, tl.program_id(0) % in_strip
    height = tl.minimum(num_tiles - strip * TOGETHER, TOGETHER)
    first, first_column = (strip * TOGETHER + within % height) * TILE, within // height * WIDTH
    total = _sum_part(x, weight, first, first_column, 0, num_steps, PARTS, TILE, WIDTH, DEPTH)
    for part in tl.static_range(1, PARTS):
        total += _sum_part(x, weight, first, first_column, part, num_steps, PARTS, TILE, WIDTH, DEPTH)
    token, column = first + tl.arange(0, TILE), first_column + tl.arange(0, WIDTH)
    _store(out, total, token, column, out_stride, num_tokens, num_outputs, ACTIVATION)


def fixed_order_gemm(
    x: Tensor,
    weight: Tensor,
    counters: Tensor,
    *,
    activation: Activation = "none",
    dtype: torch.dtype | None = None,
    tiles: FixedOrderTiles | None = None,
) -> Tensor:
    """Return activation(x @ weight.T), in which a token's bits depend on that token and the weight only.

    The function is long because the kernels' arguments are named one by one.

    Args:
        x: [tokens, inputs] bf16; inputs contiguous, and rows aligned to 16 bytes.
        weight: [outputs, inputs] bf16, contiguous; inputs a multiple of 8.
        counters: At least `num_counters` int32, all zero; zero again when the product is computed.
        activation: "none" or "squared_relu", applied in fp32; the result is rounded once.
        dtype: Dtype of the result; None: bf16.
        tiles: None for `choose_tiles`. They change no bit of the result.

    Returns:
        [tokens, outputs].

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree, or the activation is another one.

    Reference: `fixed_order_gemm_ref`, whose bits do not depend on other tokens either. CUDA-graph safe: no host sync,
    one launch.
    """
    _check(x, weight, counters, activation)
    if not launches_kernel(x):
        return fixed_order_gemm_ref(x, weight, activation=activation, dtype=dtype)
    num_tokens, (outputs, inputs) = len(x), weight.shape
    out = torch.empty(num_tokens, outputs, dtype=dtype or x.dtype, device=x.device)
    if not out.numel():
        return out
    tiles, parts = tiles or choose_tiles(weight, num_tokens), num_parts(outputs, inputs)
    columns, rows = triton.cdiv(outputs, tiles.outputs), triton.cdiv(num_tokens, tiles.tokens)
    arguments = {
        "x": TensorDescriptor.from_tensor(x, [tiles.tokens, DEPTH]),
        "weight": TensorDescriptor.from_tensor(weight, [tiles.outputs, DEPTH]),
        "out": out,
        "out_stride": out.stride(0),
        "num_tokens": num_tokens,
        "num_outputs": outputs,
        "num_steps": triton.cdiv(inputs, DEPTH),
        "PARTS": parts,
        "ACTIVATION": activation,
        "TILE": tiles.tokens,
        "WIDTH": tiles.outputs,
        "DEPTH": DEPTH,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **overlapping(x.device),
    }
    if tiles.is_split:
        if parts > 1 and columns * rows > len(counters):
            raise ValueError(f"need {columns * rows} counters for tiles of {tiles}, found {len(counters)}")
        num_sums = 0 if parts == 1 else columns * rows * parts * tiles.outputs * tiles.tokens
        sums = torch.empty(max(num_sums, 1), dtype=torch.float32, device=x.device)
        _split_kernel[(columns * parts, rows)](sums=sums, counters=counters, enable_fp_fusion=True, **arguments)
    else:
        _whole_kernel[(columns * rows,)](TOGETHER=_TILES_TOGETHER, enable_fp_fusion=True, **arguments)
    return out


def fixed_order_gemm_ref(
    x: Tensor, weight: Tensor, *, activation: Activation = "none", dtype: torch.dtype | None = None
) -> Tensor:
    """Torch twin of `fixed_order_gemm`: sums are exact, so neither their order nor a library's choice changes a bit.

    Each token and each row of weights is rounded to integers of so few bits, times a power of 2, that float64 holds all
    sums of their products: 20 bits for 4,096 inputs. A bf16 value has 8, so values above 2^-12 of the greatest one in
    their row are exact.
    """
    bits = (53 - (x.shape[1] - 1).bit_length()) // 2
    (tokens, of_tokens), (rows, of_rows) = _integers(x, bits), _integers(weight, bits)
    total = (tokens @ rows.t()).mul_(_power_of_2(of_tokens + of_rows.t() - 2 * bits))
    return activated_ref(total.float(), activation).to(dtype or x.dtype)


def _integers(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return bf16 values [rows, columns] times 2^(bits - exponent) as integers in float64, and exponents [rows, 1].

    All values of a row are below 2^exponent.
    """
    least, greatest = values.aminmax(dim=1, keepdim=True)
    exponents = (torch.maximum(-least, greatest).float().view(torch.int32) >> 23) - 126
    return values.double().mul_(_power_of_2(bits - exponents)).round_(), exponents


def _power_of_2(exponents: Tensor) -> Tensor:
    """Return 2^exponents in float64, exactly."""
    return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64)


def _check(x: Tensor, weight: Tensor, counters: Tensor, activation: Activation) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"need x [tokens, inputs] and weight [outputs, inputs], found {x.shape} and {weight.shape}")
    if not x.dtype == weight.dtype == torch.bfloat16 or not x.device == weight.device == counters.device:
        raise ValueError(
            f"x and weight must be bf16, and all inputs on the same device; found x {x.dtype} on {x.device}, weight "
            f"{weight.dtype} on {weight.device}, counters on {counters.device}"
        )
    is_aligned = not any(number % _ROW_BYTES for number in (x.data_ptr(), 2 * x.stride(0), 2 * x.shape[1]))
    if not weight.is_contiguous() or x.stride(1) != 1 or not is_aligned:
        raise ValueError(
            f"inputs must be contiguous and rows aligned to {_ROW_BYTES} bytes, found x {tuple(x.shape)} with strides "
            f"{x.stride()} and weight {tuple(weight.shape)} with strides {weight.stride()}"
        )
    if len(counters) < num_counters(weight) or counters.dtype != torch.int32:
        raise ValueError(f"need {num_counters(weight)} int32 counters, found {len(counters)} {counters.dtype}")
    if activation not in ("none", "squared_relu"):
        raise ValueError(f"activation must be none or squared_relu, found {activation}; apply it to the result")
