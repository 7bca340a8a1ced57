"""Second GEMM of an MoE layer with FP8 weights for a few tokens, fused with the sum: as `summed_gemms`, with codes.

Grid: one program per token and output tile; it processes the token's experts in order, then the shared expert. Codes of
the first experts are loaded before it waits for the first GEMM. A token's result does not depend on other tokens. Safe
in CUDA graphs: no host sync, no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_language import appended
from ..kernel_launches import launches_kernel
from ..overlap import await_inputs, await_launcher, overlapping, release
from ..quantized.quantized_matrix import RUN, QuantizedMatrix
from .quantized_rows import (
    check_rows,
    load_inputs,
    load_pieces,
    meaning_of,
    num_columns,
    scales_of,
    sum_pieces,
    words_of_piece,
)
from .reference_experts import check_weights, summed_gemm_ref

_ROWS = 4
"""Rows of each expert's weights per program."""
_WORDS = 1024
"""Words of all experts that are loaded at once for a row."""
_TILES_AHEAD = 3
"""Tiles of words that are loaded before the kernel waits for the first GEMM."""


@triton.jit
def _load_tile(
    words, scales, ids, first_expert, row, TILE: tl.constexpr,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, OUTPUTS: tl.constexpr, LENGTH: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, HALF: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Load the pieces of a tile of a token's experts; see `load_pieces`.

    Args:
        ids: The experts of the token.

    Returns:
        Words, scales, the slots of pieces, their blocks, and whether they exist on this rank.
    """
    BLOCKS: tl.constexpr = (LENGTH + HALF - 1) // HALF
    piece = TILE * PIECES + tl.arange(0, PIECES)
    slot, block = tl.minimum(piece // BLOCKS, TOP_K - 1), piece % BLOCKS
    expert = tl.load(ids + slot).to(tl.int64) - first_expert
    exists = (piece < TOP_K * BLOCKS) & (expert >= 0) & (expert < NUM_EXPERTS)
    loaded, scale = load_pieces(words, scales, expert * OUTPUTS, block, row, exists, LENGTH, COLUMNS, BLOCK_ROWS, HALF)
    return loaded, scale, slot, block, exists


@triton.jit
def _load_shared(
    words, scales, row, TILE: tl.constexpr,
    LENGTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, HALF: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Load the pieces of a tile of the shared expert; see `_load_tile`."""
    block, origin = TILE * PIECES + tl.arange(0, PIECES), tl.zeros([PIECES], tl.int64)
    exists = block * HALF < LENGTH
    loaded, scale = load_pieces(words, scales, origin, block, row, exists, LENGTH, COLUMNS, BLOCK_ROWS, HALF)
    return loaded, scale, block, exists


@triton.jit(do_not_specialize=["first_expert"])
def _quantized_sum_kernel(
    rows, words, scales, shared_rows, shared_words, shared_scales, ids, shares, addend, out, first_expert,
    HAS_ADDEND: tl.constexpr, FOLLOWS_PAIRS: tl.constexpr, TOP_K: tl.constexpr, NUM_SHARES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, LENGTH: tl.constexpr, OUTPUTS: tl.constexpr, SHARED_LENGTH: tl.constexpr,
    COLUMNS: tl.constexpr, SHARED_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, HALF: tl.constexpr,
    PIECES: tl.constexpr, SHARED_PIECES: tl.constexpr, RUN: tl.constexpr, TILES: tl.constexpr, AHEAD: tl.constexpr,
    ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Sum ROWS elements of a token's output over all experts. The kernel is long because it has many arguments."""
    if FOLLOWS_PAIRS:
        release(OVERLAPS)  # no need to wait: routing ended before the first GEMM started
    else:
        await_inputs(OVERLAPS)
    token, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own, ahead, chosen = tl.minimum(row, OUTPUTS - 1), (), ids + token * TOP_K
    for tile in tl.static_range(AHEAD):  # these loads overlap with the wait for the first GEMM
        found = _load_tile(
            words, scales, chosen, first_expert, own, tile,
            TOP_K, NUM_EXPERTS, OUTPUTS, LENGTH, COLUMNS, BLOCK_ROWS, HALF, PIECES,
        )  # fmt: skip
        ahead = appended(ahead, found)
    if SHARED_LENGTH > 0:
        shared, shared_scale, shared_block, is_shared = _load_shared(
            shared_words, shared_scales, own, 0, SHARED_LENGTH, SHARED_COLUMNS, BLOCK_ROWS, HALF, SHARED_PIECES
        )
    if FOLLOWS_PAIRS:
        await_launcher(OVERLAPS)
    partial = tl.zeros([PIECES, ROWS], tl.float32)
    for tile in tl.static_range(TILES):
        if tile >= AHEAD:
            found = _load_tile(
                words, scales, chosen, first_expert, own, tile,
                TOP_K, NUM_EXPERTS, OUTPUTS, LENGTH, COLUMNS, BLOCK_ROWS, HALF, PIECES,
            )  # fmt: skip
            ahead = appended(ahead, found)
        loaded, scale, slot, block, exists = ahead[tile]  # type: ignore[var-annotated]
        inputs = rows + (token * TOP_K + slot) * (2 * LENGTH)
        of_low, of_high = load_inputs(inputs, block, exists, ROWS, LENGTH, HALF, RUN)
        share = tl.load(shares + token * NUM_SHARES + slot)
        partial += share[:, None] * sum_pieces(loaded, scale, of_low, of_high)
    total = tl.sum(partial, axis=0)
    if SHARED_LENGTH > 0:
        of_shared = tl.zeros([SHARED_PIECES, ROWS], tl.float32)
        inputs = shared_rows + token * (2 * SHARED_LENGTH) + tl.zeros([SHARED_PIECES], tl.int32)
        for tile in tl.static_range((SHARED_LENGTH + SHARED_PIECES * HALF - 1) // (SHARED_PIECES * HALF)):
            if tile > 0:
                shared, shared_scale, shared_block, is_shared = _load_shared(
                    shared_words, shared_scales, own, tile,
                    SHARED_LENGTH, SHARED_COLUMNS, BLOCK_ROWS, HALF, SHARED_PIECES,
                )  # fmt: skip
            of_low, of_high = load_inputs(inputs, shared_block, is_shared, ROWS, SHARED_LENGTH, HALF, RUN)
            of_shared += sum_pieces(shared, shared_scale, of_low, of_high)
        share = tl.load(shares + token * NUM_SHARES + TOP_K) if NUM_SHARES > TOP_K else 1.0
        total += share * tl.sum(of_shared, axis=0)
    if HAS_ADDEND:
        added = tl.load(addend + token * OUTPUTS + row, mask=row < OUTPUTS, other=0).to(tl.float32)
        if NUM_SHARES > TOP_K and SHARED_LENGTH == 0:
            added = (added * tl.load(shares + token * NUM_SHARES + TOP_K)).to(out.dtype.element_ty).to(tl.float32)
        total += added
    tl.store(out + token * OUTPUTS + row, total.to(out.dtype.element_ty), mask=row < OUTPUTS)


def quantized_summed_gemm(
    rows: Tensor,
    weight: QuantizedMatrix,
    ids: Tensor,
    shares: Tensor,
    addend: Tensor | None = None,
    *,
    shared_rows: Tensor | None = None,
    shared_weight: QuantizedMatrix | None = None,
    first_expert: int = 0,
    follows_pairs: bool = False,
) -> Tensor:
    """Multiply the rows of each token by their experts' weights, and return the weighted sum over experts.

    The arguments are those of `summed_gemm`, in bf16, with quantized weights of one kind; see `can_multiply_pairs`.
    Long because the kernel has many named arguments.

    Raises:
        ValueError: If dtypes, shapes or strides disagree.

    Reference: `summed_gemm_ref` of the weights in float64. CUDA-graph safe: no host sync, one launch.
    """
    check_weights(shares, *ids.shape)
    check_rows(rows, weight, shared_weight, rows.shape == (ids.numel(), weight.shape[2]) and rows.is_contiguous())
    if not launches_kernel(rows):
        plain, of_shared = weight.dequantized(torch.float64), meaning_of(shared_weight)
        found = summed_gemm_ref(
            rows.double(),
            plain,
            ids,
            shares,
            addend,
            shared_rows=shared_rows,
            shared_weight=of_shared,
            first_expert=first_expert,
        )
        return found.to(rows.dtype)
    (num_tokens, top_k), outputs = ids.shape, weight.shape[1]
    out = torch.empty(num_tokens, outputs, dtype=rows.dtype, device=rows.device)
    if out.numel() == 0:
        return out
    length, half = weight.words.shape[2], words_of_piece(weight)
    shared_length = 0 if shared_weight is None else shared_weight.words.shape[1]
    num_pieces = top_k * triton.cdiv(length, half)
    pieces = min(_WORDS // half, triton.next_power_of_2(num_pieces))
    tiles = triton.cdiv(num_pieces, pieces)
    _quantized_sum_kernel[(triton.cdiv(outputs, _ROWS), num_tokens)](
        rows=rows,
        words=weight.words,
        scales=scales_of(weight),
        shared_rows=rows if shared_rows is None else shared_rows,
        shared_words=(shared_weight or weight).words,
        shared_scales=scales_of(shared_weight or weight),
        ids=ids,
        shares=shares,
        addend=rows if addend is None else addend,
        out=out,
        first_expert=first_expert,
        HAS_ADDEND=addend is not None,
        FOLLOWS_PAIRS=follows_pairs,
        TOP_K=top_k,
        NUM_SHARES=shares.shape[1],
        NUM_EXPERTS=weight.shape[0],
        OUTPUTS=outputs,
        SHARED_LENGTH=shared_length,
        SHARED_COLUMNS=num_columns(shared_weight or weight),
        LENGTH=length,
        COLUMNS=num_columns(weight),
        BLOCK_ROWS=weight.block_rows,
        HALF=half,
        PIECES=pieces,
        SHARED_PIECES=min(_WORDS // half, triton.next_power_of_2(triton.cdiv(shared_length, half))),
        RUN=RUN,
        TILES=tiles,
        AHEAD=min(tiles, _TILES_AHEAD),
        ROWS=_ROWS,
        num_warps=4,
        enable_fp_fusion=True,
        **overlapping(rows.device),
    )
    return out
