"""Product of quantized tokens with an FP8 weight: FP8 tensor cores, sums in two levels.

Tensor cores sum the products of at most 128 columns, with fewer bits than fp32; these sums are multiplied by their
scales and added in fp32. On Hopper, torch computes the forms that it has. The portable kernel computes every form.

Grid: tiles of outputs and tokens, those of 8 tiles of tokens next to each other, which share weights in the L2 cache. A
token's bits do not depend on other tokens. Graph safe: no host sync.
"""

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import INTERPRETED, is_hopper, launches_kernel
from ..reference import compute_dtype
from .activations import QuantizedActivations
from .quantized_matrix import RUN, QuantizedMatrix

_IS_INTERPRETED = tl.constexpr(INTERPRETED)
_BLOCK = 128
_TOKENS, _OUTPUTS, _COLUMNS = (128, 128, 128) if not INTERPRETED else (32, 32, 128)
_TILES_TOGETHER = 8
_GROUPS = (32, 64, 128)
"""Columns of a group for which there is a product."""


@triton.jit
def sum_products(codes, weights):
    """Return codes [tokens, depth] @ weights [outputs, depth].T in fp32, of at most 128 columns."""
    if _IS_INTERPRETED:
        found = tl.dot(codes.to(tl.float32), weights.to(tl.float32).T, input_precision="ieee")
    else:
        found = tl.dot(codes, weights.T)
    return found


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _prompt_gemm_kernel(
    codes,
    token_scales,
    words,
    scales,
    factors,
    out,
    out_stride,
    num_tokens,
    num_rows,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GRID_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    TILES_TOGETHER: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply TILE tokens with WIDTH rows of weights; a block of columns is DEPTH long if weights have blocks.

    Long because of its arguments.
    """
    num_tiles = tl.cdiv(num_tokens, TILE)
    in_strip = TILES_TOGETHER * tl.cdiv(OUTPUTS, WIDTH)
    strip = tl.program_id(0) // in_strip
    height = tl.minimum(num_tiles - strip * TILES_TOGETHER, TILES_TOGETHER)
    within = tl.program_id(0) % in_strip
    token = (strip * TILES_TOGETHER + within % height) * TILE + tl.arange(0, TILE)
    column = within // height * WIDTH + tl.arange(0, WIDTH)
    own_token, row = tl.minimum(token, num_tokens - 1), tl.minimum(column, OUTPUTS - 1)
    depth = tl.arange(0, DEPTH)
    of_tokens = codes + own_token.to(tl.int64)[:, None] * COLUMNS + depth[None, :]
    of_weights = words + row.to(tl.int64)[:, None] * COLUMNS + depth[None, :]
    total = tl.zeros([TILE, WIDTH], tl.float32)
    for begin in range(0, COLUMNS, DEPTH):
        if COLUMNS % DEPTH == 0:
            found, weights = tl.load(of_tokens + begin), tl.load(of_weights + begin)
        else:
            is_here = (begin + depth < COLUMNS)[None, :]
            found = tl.load(of_tokens + begin, mask=is_here, other=0.0)
            weights = tl.load(of_weights + begin, mask=is_here, other=0.0)
        products = sum_products(found, weights)
        if GRID_COLUMNS > 0:
            by_token = tl.load(token_scales + begin // DEPTH * num_rows + own_token)
            by_row = tl.load(scales + row // BLOCK_ROWS * GRID_COLUMNS + begin // DEPTH)
            products *= by_token[:, None] * by_row[None, :]
        total += products
    if GRID_COLUMNS == 0:
        total *= tl.load(token_scales + own_token)[:, None]
    if HAS_FACTORS:
        total *= tl.load(factors + row)[None, :]
    pointers = out + token.to(tl.int64)[:, None] * out_stride + column[None, :]
    is_stored = (token < num_tokens)[:, None] & (column < OUTPUTS)[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=is_stored)


def has_prompt_gemm(weight: QuantizedMatrix) -> bool:
    """Return True if tokens of a weight's inputs can be quantized: FP8, with factors or fp32 scales of whole groups."""
    if weight.code_bits != 8:
        return False
    if weight.scales is None:
        return True
    is_divided = weight.block_columns in _GROUPS and weight.scales.dtype is torch.float32
    return is_divided and weight.factors is None


def multiply_prompt_tokens(
    x: QuantizedActivations, weight: QuantizedMatrix, *, out: Tensor | torch.dtype, uses_torch: bool = True
) -> Tensor:
    """Return x @ W.T. Long because the kernel's arguments are named one by one.

    Args:
        x: One group if the weight has no scales of blocks, otherwise groups of their columns.
        weight: [outputs, inputs], as `has_prompt_gemm` accepts.
        out: [tokens, outputs], outputs contiguous, to which the result is written; or the dtype of a new tensor, which
            saves a copy if torch computes it.
        uses_torch: False for the portable kernel only.

    Raises:
        ValueError: If the weight or the groups do not fit.

    Reference: `multiply_prompt_tokens_ref`. CUDA-graph safe: no host sync.
    """
    outputs, columns = weight.shape
    group = columns if weight.scales is None else weight.block_columns
    if not has_prompt_gemm(weight) or x.columns != group or x.codes.shape[1] != columns:
        raise ValueError(
            f"need an FP8 weight and tokens [.., {columns}] in groups of {group}, found {weight.code_bits}-bit codes "
            f"in blocks of {weight.block_columns}, tokens {tuple(x.codes.shape)} in groups of {x.columns}"
        )
    dtype = out if isinstance(out, torch.dtype) else out.dtype
    if not launches_kernel(x.codes) or dtype is torch.float64:
        return _written(multiply_prompt_tokens_ref(x, weight, dtype), out)
    if uses_torch and x.num_tokens and x.codes.is_cuda and _has_torch_form(weight) and is_hopper(x.codes.device):
        return (_multiply_rows_by_torch if weight.scales is None else _multiply_blocks_by_torch)(x, weight, out)
    if isinstance(out, torch.dtype):
        out = torch.empty(x.num_tokens, outputs, dtype=dtype, device=x.codes.device)
    if not x.num_tokens:
        return out
    has_blocks = weight.scales is not None
    _prompt_gemm_kernel[(triton.cdiv(x.num_tokens, _TOKENS) * triton.cdiv(outputs, _OUTPUTS),)](
        codes=x.codes,
        token_scales=x.scales,
        words=codes_of(weight),
        scales=weight.scales if has_blocks else x.scales,
        factors=x.scales if weight.factors is None else weight.factors,
        out=out,
        out_stride=out.stride(0),
        num_tokens=x.num_tokens,
        num_rows=len(x.codes),
        OUTPUTS=outputs,
        COLUMNS=columns,
        GRID_COLUMNS=0 if weight.scales is None else weight.scales.shape[1],
        BLOCK_ROWS=weight.block_rows,
        HAS_FACTORS=weight.factors is not None,
        TILES_TOGETHER=_TILES_TOGETHER,
        TILE=_TOKENS,
        WIDTH=_OUTPUTS,
        DEPTH=weight.block_columns if has_blocks else _COLUMNS,
        num_warps=8,
        num_stages=4,
        enable_fp_fusion=True,
    )
    return out


def _written(found: Tensor, out: Tensor | torch.dtype) -> Tensor:
    return found.to(out) if isinstance(out, torch.dtype) else out.copy_(found)


def multiply_prompt_tokens_ref(x: QuantizedActivations, weight: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """Torch twin: products of the values that codes and scales mean, in fp32 or in fp64, rounded once to `dtype`."""
    computed = compute_dtype(torch.empty(0, dtype=dtype))
    return F.linear(x.dequantized(computed), values_in_order_of_words(weight, computed)).to(dtype)


def codes_of(weight: QuantizedMatrix) -> Tensor:
    """Return the codes [..., outputs, columns] in the order of the words."""
    return weight.words.view(torch.float8_e4m3fn)


def values_in_order_of_words(weight: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """Return the weight [..., outputs, columns], with columns in the order of its words."""
    return weight.dequantized(dtype).unflatten(-1, (-1, 2, RUN)).transpose(-1, -2).flatten(-3)


def _has_torch_form(weight: QuantizedMatrix) -> bool:
    """Return True if torch has the product: scales of rows, or of blocks whose grid has rows of 16 bytes."""
    outputs, columns = weight.shape
    if outputs % 16 or columns % 16:
        return False
    if weight.scales is None:
        return weight.factors is not None
    is_whole = outputs % _BLOCK == 0 and columns % (4 * _BLOCK) == 0
    return weight.block_rows == weight.block_columns == _BLOCK and is_whole and hasattr(F, "scaled_mm")


def _multiply_rows_by_torch(x: QuantizedActivations, weight: QuantizedMatrix, out: Tensor | torch.dtype) -> Tensor:
    assert weight.factors is not None
    scales = x.scales.view(-1, 1), weight.factors.view(1, -1)
    found = torch._scaled_mm(x.codes, codes_of(weight).t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=False)
    return _written(found[: x.num_tokens], out)


def _multiply_blocks_by_torch(x: QuantizedActivations, weight: QuantizedMatrix, out: Tensor | torch.dtype) -> Tensor:
    """Return the product; it is written directly to `out` if that is possible, which may be part of a wider tensor."""
    assert weight.scales is not None
    if _can_write_blocks(out) and len(out) == len(x.codes):
        found = out
    else:
        found = x.scales.new_empty(len(x.codes), len(weight.words), dtype=torch.bfloat16)
    forms: Any = F.ScalingType  # type: ignore[attr-defined]
    of_tokens: tuple[Any, ...] = [x.scales.t()], [forms.BlockWise1x128.value], []
    of_weights: tuple[Any, ...] = [weight.scales.t()], [forms.BlockWise128x128.value], []
    product: Any = torch.ops.aten._scaled_mm_v2.out  # `F.scaled_mm` has no output argument
    product(x.codes, codes_of(weight).t(), *of_tokens, *of_weights, None, torch.bfloat16, out=found)
    return found if found is out else _written(found[: x.num_tokens], out)


def _can_write_blocks(out: Tensor | torch.dtype) -> TypeGuard[Tensor]:
    if isinstance(out, torch.dtype) or out.dtype is not torch.bfloat16:
        return False
    return out.data_ptr() % 16 == 0 and out.stride(0) % 8 == 0
