"""Product of few tokens with a quantized weight: codes are read once and dequantized in registers.

Nothing is rounded but the result: `code_tiles` multiplies exactly, and factors multiply the sum of all columns.

Grid: (tiles of WIDTH outputs) * PARTS, tiles of tokens. With PARTS > 1 each program sums one part of the inputs, and
the last program of a tile adds the parts in their order, whichever program that is. Sizes and parts depend on the
weight's shape and on the range of the number of tokens, so a token's bits do not depend on others of its range. Graph
safe: no host sync; counters of a weight are zero between launches, so its products must not run concurrently.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..kernel_launches import launches_kernel
from ..overlap import await_written, let_next_begin, overlapping
from ..reference import compute_dtype
from .code_tiles import prefetch_words, sum_inputs, sum_nvfp4_inputs
from .few_token_tiles import MOST_WORDS, SplitTokenTiles, Tiles, choose_tiles
from .quantized_matrix import RUN, QuantizedMatrix
from .split_token_hopper import multiply_split_tokens
from .split_tokens import split_tokens

MOST_TOKENS = 64
"""Most tokens that the kernel computes."""


@triton.jit(do_not_specialize=["num_tokens"])
def _few_tokens_kernel(
    x,
    words,
    scales,
    factors,
    out,
    parts,
    counters,
    x_stride,
    out_stride,
    num_tokens,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    LENGTH: tl.constexpr,
    GRID_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    BOXES: tl.constexpr,
    LINES_AHEAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Multiply TILE tokens with WIDTH rows of weights over a part of the inputs. Long because of its arguments."""
    let_next_begin(OVERLAPS)
    STEPS: tl.constexpr = (LENGTH + DEPTH - 1) // DEPTH
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    first, column = tile * WIDTH, tile * WIDTH + tl.arange(0, WIDTH)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    begin, end = part * STEPS // PARTS * DEPTH, (part + 1) * STEPS // PARTS * DEPTH
    row, is_token = tl.minimum(column, ROWS - 1), token < num_tokens
    if OVERLAPS and LINES_AHEAD > 0 and not BOXES:
        prefetch_words(words, row, begin, LENGTH, LINES_AHEAD)
    await_written(OVERLAPS)
    if BITS == 4:
        total = sum_nvfp4_inputs(
            x, words, scales, row, token, is_token, x_stride, begin, end, LENGTH, RUN, TILE, WIDTH, DEPTH
        )
    else:
        total = sum_inputs(
            x, words, scales, first if BOXES else row, first if BLOCK_ROWS % WIDTH == 0 else row,
            token, is_token, x_stride, begin, end,
            LENGTH, GRID_COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS, RUN, TILE, WIDTH, DEPTH, BOXES,
    )  # fmt: skip
    is_stored = (column < ROWS)[:, None] & is_token[None, :]
    pointers = out + token.to(tl.int64)[None, :] * out_stride + column[:, None]
    if HAS_FACTORS:
        factor = tl.load(factors + row)
    if PARTS == 1:
        if HAS_FACTORS:
            total *= factor[:, None]
        tl.store(pointers, total.to(out.dtype.element_ty), mask=is_stored)
    else:
        of_parts = parts + token.to(tl.int64)[None, :] * ROWS + column[:, None]
        of_part = num_tokens.to(tl.int64) * ROWS
        tl.store(of_parts + part * of_part, total, mask=is_stored)
        tl.debug_barrier()  # every thread's sums are written before the program counts itself
        counter = counters + tl.program_id(1) * tl.num_programs(0) // PARTS + tile
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
            tl.store(counter, 0)
            total = tl.load(of_parts, mask=is_stored, other=0, cache_modifier=".cg")
            for other in tl.static_range(1, PARTS):
                total += tl.load(of_parts + other * of_part, mask=is_stored, other=0, cache_modifier=".cg")
            if HAS_FACTORS:
                total *= factor[:, None]
            tl.store(pointers, total.to(out.dtype.element_ty), mask=is_stored)


def scales_of_kernel(weight: QuantizedMatrix) -> Tensor:
    """Return the scales as kernels read them: the four of a run of FP4 codes as an integer."""
    assert weight.scales is not None
    return weight.scales.view(torch.int32) if weight.code_bits == 4 else weight.scales


def can_multiply_few_tokens(x: Tensor, weight: QuantizedMatrix) -> bool:
    """Return True if `multiply_few_tokens` launches its kernel for tokens [..., inputs]."""
    return (
        launches_kernel(x)
        and 0 < x.numel() <= MOST_TOKENS * x.shape[-1]
        and x.dtype is torch.bfloat16
        and weight.words.dim() == 2
        and has_kernel(weight)
    )


def has_kernel(weight: QuantizedMatrix) -> bool:
    """Return True if kernels read a weight as codes: NVFP4, and FP8 if a tile of words has one scale for each row."""
    if not weight.words.is_contiguous() or (weight.scales is not None and not weight.scales.is_contiguous()):
        return False
    if weight.code_bits == 4:
        return weight.scales is not None and weight.scales.dtype is torch.float8_e4m3fn
    if weight.scales is None:
        return True
    is_divided = weight.block_columns % (2 * MOST_WORDS) == 0 or weight.block_columns in (2 * RUN, 4 * RUN)
    return is_divided and weight.scales.dtype is torch.float32


def num_counters(weight: QuantizedMatrix) -> int:
    """Return how many counters the products with a weight need at most."""
    return -(-weight.shape[-2] // 64)


def multiply_few_tokens(
    x: Tensor,
    weight: QuantizedMatrix,
    counters: Tensor,
    *,
    out: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return x @ W.T for at most MOST_TOKENS tokens. Long because the kernel's arguments are named one by one.

    Args:
        x: [tokens, inputs] bf16; inputs contiguous.
        weight: [outputs, inputs].
        counters: At least `num_counters` int32, all zero; zero again when the product is computed. Not shared by
            products that run concurrently.
        out: [tokens, outputs], written in place; outputs contiguous. None: a new one.
        tiles: None for `choose_tiles`.

    Returns:
        [tokens, outputs] in x's dtype.

    Raises:
        ValueError: If shapes, dtypes or strides disagree, or there are too many tokens for the kernel.

    Reference: `multiply_ref`. CUDA-graph safe: no host sync, up to three launches.
    """
    if x.dim() != 2 or x.shape[1] != weight.shape[-1] or x.device != weight.words.device:
        raise ValueError(f"need x [tokens, {weight.shape[-1]}] on {weight.words.device}, found {tuple(x.shape)}")
    if not launches_kernel(x):
        return multiply_ref(x, weight) if out is None else out.copy_(multiply_ref(x, weight))
    if not can_multiply_few_tokens(x, weight) or x.stride(1) != 1 or len(counters) < num_counters(weight):
        raise ValueError(
            f"need 1 to {MOST_TOKENS} bf16 tokens, an FP8 or NVFP4 weight and {num_counters(weight)} counters, "
            f"found {tuple(x.shape)} {x.dtype}, {weight.code_bits}-bit codes and {len(counters)}"
        )
    tiles = tiles or choose_tiles(weight, len(x))
    rows, num_tokens = weight.shape[0], len(x)
    out = torch.empty(num_tokens, rows, dtype=x.dtype, device=x.device) if out is None else out
    if isinstance(tiles, SplitTokenTiles):
        multiply_split_tokens(split_tokens(x, tiles.tokens), weight, out, tiles)
        return out
    of_parts = (tiles.parts, num_tokens, rows) if tiles.parts > 1 else (1,)
    box, num_tiles = [tiles.outputs, tiles.words], triton.cdiv(rows, tiles.outputs)
    _few_tokens_kernel[(num_tiles * tiles.parts, triton.cdiv(num_tokens, tiles.tokens))](
        x=x,
        words=TensorDescriptor.from_tensor(weight.words, box) if tiles.loads_boxes else weight.words,
        scales=x if weight.scales is None else scales_of_kernel(weight),
        factors=x if weight.factors is None else weight.factors,
        out=out,
        parts=torch.empty(of_parts, dtype=torch.float32, device=x.device),
        counters=counters,
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        num_tokens=num_tokens,
        ROWS=rows,
        BITS=weight.code_bits,
        LENGTH=weight.words.shape[1],
        GRID_COLUMNS=0 if weight.scales is None else weight.scales.shape[1],
        BLOCK_ROWS=weight.block_rows,
        BLOCK_COLUMNS=weight.block_columns,
        RUN=RUN,
        HAS_FACTORS=weight.factors is not None,
        PARTS=tiles.parts,
        TILE=tiles.tokens,
        WIDTH=tiles.outputs,
        DEPTH=tiles.words,
        BOXES=tiles.loads_boxes,
        LINES_AHEAD=tiles.lines_ahead,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=True,
        **overlapping(x.device),
    )
    return out


def multiply_ref(x: Tensor, weight: QuantizedMatrix) -> Tensor:
    """Torch twin of products with a quantized weight: exact weights, summed in float32 or in float64."""
    dtype = compute_dtype(x)
    return F.linear(x.to(dtype), weight.dequantized(dtype)).to(x.dtype)
