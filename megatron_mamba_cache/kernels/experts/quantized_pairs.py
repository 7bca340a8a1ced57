"""First GEMM of an MoE layer with FP8 weights for a few tokens: as `pair_gemms`, with codes.

Grid: first one program per token and output tile of the shared expert, then one per (token, expert) pair and output
tile. A token's result does not depend on other tokens. Safe in CUDA graphs: no host sync, no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activations import Activation
from ..kernel_launches import launches_kernel
from ..overlap import await_then_release, overlapping
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
from .reference_experts import pair_gemm_ref

_ROWS = 8
"""Rows of weights per program."""
_WORDS = 1024
"""Words of a row that are loaded at once."""


@triton.jit
def _multiply(
    words, scales, vector, origin, row,
    LENGTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, HALF: tl.constexpr, PIECES: tl.constexpr,
    RUN: tl.constexpr, ACTIVATION: tl.constexpr, AWAITS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Return the activated product of rows and a vector; for `gated_silu`, the second half of the rows is gated.

    If AWAITS, wait for the previous kernel after the first words are loaded.
    """
    ROWS: tl.constexpr = row.shape[0]
    BLOCKS: tl.constexpr = (LENGTH + HALF - 1) // HALF
    piece = tl.arange(0, PIECES)
    origins, inputs = origin + tl.zeros([PIECES], tl.int64), vector + tl.zeros([PIECES], tl.int32)
    exists = piece < BLOCKS
    if not AWAITS:
        of_low, of_high = load_inputs(inputs, piece, exists, ROWS, LENGTH, HALF, RUN)
    loaded, scale = load_pieces(words, scales, origins, piece, row, exists, LENGTH, COLUMNS, BLOCK_ROWS, HALF)
    if AWAITS:
        await_then_release(OVERLAPS)
        of_low, of_high = load_inputs(inputs, piece, exists, ROWS, LENGTH, HALF, RUN)
    sums = sum_pieces(loaded, scale, of_low, of_high)
    for begin in tl.static_range(PIECES, BLOCKS, PIECES):
        piece = begin + tl.arange(0, PIECES)
        exists = piece < BLOCKS
        of_low, of_high = load_inputs(inputs, piece, exists, ROWS, LENGTH, HALF, RUN)
        loaded, scale = load_pieces(words, scales, origins, piece, row, exists, LENGTH, COLUMNS, BLOCK_ROWS, HALF)
        sums += sum_pieces(loaded, scale, of_low, of_high)
    total = tl.sum(sums, axis=0)
    if ACTIVATION == "squared_relu":
        total = tl.maximum(total, 0, propagate_nan=tl.PropagateNan.ALL)
        total = total * total
    if ACTIVATION == "gated_silu":
        gate, other = tl.split(tl.permute(tl.reshape(total, [2, ROWS // 2]), [1, 0]))
        total = gate / (1 + tl.exp(-gate)) * other
    return total


@triton.jit(do_not_specialize=["num_tokens", "first_expert"])
def _quantized_pairs_kernel(
    x, words, scales, shared_words, shared_scales, ids, out, shared_out, x_stride, num_tokens, first_expert,
    TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, LENGTH: tl.constexpr, OUTPUTS: tl.constexpr, SHARED: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, HALF: tl.constexpr, PIECES: tl.constexpr, RUN: tl.constexpr,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute outputs of ROWS rows of the shared expert, or of one routed expert, for one token."""
    HALVES: tl.constexpr = 2 if ACTIVATION == "gated_silu" else 1
    NUM: tl.constexpr = ROWS // HALVES
    TILES: tl.constexpr = (OUTPUTS + NUM - 1) // NUM
    SHARED_TILES: tl.constexpr = (SHARED + NUM - 1) // NUM
    program, own, lane = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, NUM)
    if program < num_tokens * SHARED_TILES:
        # Routing does not affect the shared expert, so its codes are loaded while routing still runs.
        token, first = (program // max(SHARED_TILES, 1)).to(tl.int64), program % max(SHARED_TILES, 1) * NUM
        row = own // NUM * SHARED + tl.minimum(first + own % NUM, SHARED - 1)
        total = _multiply(
            shared_words, shared_scales, x + token * x_stride, 0, row,
            LENGTH, COLUMNS, BLOCK_ROWS, HALF, PIECES, RUN, ACTIVATION, True, OVERLAPS,
        )  # fmt: skip
        tl.store(shared_out + token * SHARED + first + lane, total.to(out.dtype.element_ty), mask=first + lane < SHARED)
    else:
        await_then_release(OVERLAPS)
        program -= num_tokens * SHARED_TILES
        pair, first = (program // TILES).to(tl.int64), program % TILES * NUM
        expert = tl.load(ids + pair).to(tl.int64) - first_expert
        if (expert >= 0) & (expert < NUM_EXPERTS):
            row = own // NUM * OUTPUTS + tl.minimum(first + own % NUM, OUTPUTS - 1)
            total = _multiply(
                words, scales, x + pair // TOP_K * x_stride, expert * (HALVES * OUTPUTS), row,
                LENGTH, COLUMNS, BLOCK_ROWS, HALF, PIECES, RUN, ACTIVATION, False, OVERLAPS,
            )  # fmt: skip
            tl.store(out + pair * OUTPUTS + first + lane, total.to(out.dtype.element_ty), mask=first + lane < OUTPUTS)


def quantized_pair_gemm(
    x: Tensor,
    weight: QuantizedMatrix,
    ids: Tensor,
    shared_weight: QuantizedMatrix | None = None,
    *,
    activation: Activation = "none",
    first_expert: int = 0,
) -> tuple[Tensor, Tensor]:
    """Multiply each token by the weights of each of its experts and of the shared expert; apply the activation.

    The arguments are those of `pair_gemm`, in bf16, with quantized weights of one kind; see `can_multiply_pairs`. The
    function is long because the kernel has many arguments.

    Raises:
        ValueError: If dtypes, shapes or strides disagree.

    Reference: `quantized_pair_gemm_ref`. CUDA-graph safe: no host sync, one launch.
    """
    check_rows(x, weight, shared_weight, x.shape[1] == weight.shape[2] and x.stride(1) == 1)
    if not launches_kernel(x):
        return quantized_pair_gemm_ref(x, weight, ids, shared_weight, activation=activation, first_expert=first_expert)
    halves, num_tokens = 2 if activation == "gated_silu" else 1, len(x)
    outputs = weight.shape[1] // halves
    shared = 0 if shared_weight is None else shared_weight.shape[0] // halves
    out = torch.empty(ids.numel(), outputs, dtype=x.dtype, device=x.device)
    shared_out = torch.empty(num_tokens, shared, dtype=x.dtype, device=x.device)
    num, half = _ROWS // halves, words_of_piece(weight)
    num_programs = num_tokens * triton.cdiv(shared, num) + ids.numel() * triton.cdiv(outputs, num)
    if num_programs == 0:
        return out, shared_out
    _quantized_pairs_kernel[(num_programs,)](
        x=x,
        words=weight.words,
        scales=scales_of(weight),
        shared_words=(shared_weight or weight).words,
        shared_scales=scales_of(shared_weight or weight),
        ids=ids,
        out=out,
        shared_out=shared_out,
        x_stride=x.stride(0),
        num_tokens=num_tokens,
        first_expert=first_expert,
        TOP_K=ids.shape[1],
        NUM_EXPERTS=weight.shape[0],
        OUTPUTS=outputs,
        SHARED=shared,
        ACTIVATION=activation,
        ROWS=_ROWS,
        LENGTH=weight.words.shape[2],
        COLUMNS=num_columns(weight),
        BLOCK_ROWS=weight.block_rows,
        HALF=half,
        PIECES=min(_WORDS // half, triton.next_power_of_2(triton.cdiv(weight.words.shape[2], half))),
        RUN=RUN,
        num_warps=4,
        enable_fp_fusion=True,
        **overlapping(x.device),
    )
    return out, shared_out


def quantized_pair_gemm_ref(
    x: Tensor,
    weight: QuantizedMatrix,
    ids: Tensor,
    shared_weight: QuantizedMatrix | None = None,
    *,
    activation: Activation = "none",
    first_expert: int = 0,
) -> tuple[Tensor, Tensor]:
    """Torch twin of `quantized_pair_gemm`; computes in float64."""
    plain, shared = weight.dequantized(torch.float64), meaning_of(shared_weight)
    found = pair_gemm_ref(x.double(), plain, ids, shared, activation=activation, first_expert=first_expert)
    return found[0].to(x.dtype), found[1].to(x.dtype)
