"""First kernel of the scan: compute the terms of each tile that do not depend on the state.

For token i of a tile, where G_i is the sum of g from the start of the tile up to and including token i:

    A[i, j] = beta_i (k_i . k_j) exp(G_i - G_j) for j < i        solved = (I + A)^-1 diag(beta), without its diagonal
    scores[i, j] = (q_i . k_j) exp(G_i - G_j) for j <= i

These terms and `factors` include the normalization of q and k, so the scan reads q and k unnormalized. The inverse (WY
form: Yang et al. 2024, arXiv 2406.06484) is computed by forward substitution within diagonal blocks, then by matmuls.
If D contains the inverses of the diagonal blocks, and N is D times the part of A below the blocks, the inverse is
(I - N)(I + N^2) D. This is exact because N^4 = 0 for four blocks. Entries stay small because keys have length 1, beta
is at most 1 and states decay. So for bf16 tokens these matmuls use fp16, which is more accurate than bf16.

Grid: one program per tile number and value head. Safe in CUDA graphs: no host sync, and the grid depends only on the
number of chunks.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.overlap import await_inputs, overlapping
from ..batches import PAD_SLOT, PrefillBatch
from ..request_tiles import TileShape, cut_view, find_tile
from .inputs import EPS, DeltaTokens, GateWeights, KernelGates, kernel_tokens, log_decay, write_strength

NUM_FACTORS = 4
MAX_REGISTERS = 168  # registers per thread, so that three programs fit on a multiprocessor
_NUM_WARPS = 4
_PAD = tl.constexpr(PAD_SLOT)
_EPS = tl.constexpr(EPS)
_LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class TileSystems:
    """State-independent terms for the tiles of a batch, and the output buffer.

    Args:
        solved, scores: [heads, tiles, width, width] in the tokens' dtype; defined at the top of the module. On Hopper
            GPUs, the scan computes the scores, and there are more factors; see `tile_systems_hopper`.
        factors: [heads, tiles, 4, width] float32. For each token: exp(G) / |k|; beta; exp(G) / (|q| sqrt(key_dim)); and
            the decay from the token to the end of the tile, divided by |k|.
        kept: [heads, tiles] float32; decay of the state over the whole tile.
        slots: [tiles] int32; slot that receives the state at the end of the tile; PAD_SLOT: do not store it.
        y: [tokens, heads, value_dim]; the scan writes its outputs here; zeros after the last request.
    """

    shape: TileShape
    solved: Tensor
    scores: Tensor | None
    factors: Tensor
    kept: Tensor
    slots: Tensor
    y: Tensor

    @property
    def num_bytes(self) -> int:
        """Size in bytes of all tensors except `y`."""
        tensors = (self.solved, self.scores, self.factors, self.kept, self.slots)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @staticmethod
    def empty(tokens: DeltaTokens, shape: TileShape, num_tiles: int) -> "TileSystems":
        """Allocate the tensors for `num_tiles` tiles without initializing them."""
        systems = TileSystems.without_scores(tokens, shape, num_tiles, NUM_FACTORS)
        return replace(systems, scores=torch.empty_like(systems.solved))

    @staticmethod
    def without_scores(tokens: DeltaTokens, shape: TileShape, num_tiles: int, num_factors: int) -> "TileSystems":
        """Allocate all tensors except the scores, with this number of factors per token."""
        num_heads = tokens.v.shape[1]

        def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=tokens.q.device)

        return TileSystems(
            shape,
            solved=empty(num_heads, num_tiles, shape.width, shape.width, dtype=tokens.q.dtype),
            scores=None,
            factors=empty(num_heads, num_tiles, num_factors, shape.width),
            kept=empty(num_heads, num_tiles),
            slots=empty(num_tiles, dtype=torch.int32),
            y=empty(*tokens.v.shape, dtype=tokens.v.dtype),
        )


@triton.jit
def _inverted(A, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + A)^-1 for a strictly lower triangular A [width, width]; matmuls use DTYPE."""
    WIDTH: tl.constexpr = A.shape[0]
    BLOCK: tl.constexpr = 8 if WIDTH == 64 else 16
    i, j = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    inverse = _inverted_blocks(A, BLOCK)
    if BLOCK < 16:  # combine pairs of blocks
        left = tl.where((i // 16 == j // 16) & (i // BLOCK > j // BLOCK), A, 0.0).to(DTYPE)
        blocks = inverse.to(DTYPE)
        left = tl.dot(blocks, left, input_precision=PRECISION)
        inverse -= tl.dot(left.to(DTYPE), blocks, input_precision=PRECISION)
    if WIDTH > 16:
        blocks = inverse.to(DTYPE)
        left = tl.dot(blocks, tl.where(i // 16 > j // 16, A, 0.0).to(DTYPE), input_precision=PRECISION).to(DTYPE)
        series = tl.where(i == j, 1.0, 0.0) - left.to(tl.float32)
        if WIDTH > 32:
            square = tl.dot(left, left, input_precision=PRECISION).to(DTYPE)
            series = tl.dot(series.to(DTYPE), square, series, input_precision=PRECISION)
        inverse = tl.dot(series.to(DTYPE), blocks, input_precision=PRECISION)
    return inverse


@triton.jit
def _inverted_blocks(A, BLOCK: tl.constexpr):
    """Invert the diagonal blocks of I + A by forward substitution; return zeros elsewhere."""
    WIDTH: tl.constexpr = A.shape[0]
    BLOCKS: tl.constexpr = WIDTH // BLOCK
    row = tl.arange(0, BLOCK)[None, :, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    block = tl.arange(0, BLOCKS)
    is_diagonal = block[:, None, None, None] == block[None, None, :, None]
    cut = tl.reshape(A, [BLOCKS, BLOCK, BLOCKS, BLOCK])
    below = tl.sum(tl.where(is_diagonal, cut, 0.0), axis=2)  # [blocks, row, column]
    solved = tl.where(row == column, 1.0, tl.zeros_like(below))
    for step in tl.static_range(BLOCK - 1):
        of_column = tl.sum(tl.where(column == step, below, 0.0), axis=2)
        of_row = tl.sum(tl.where(row == step, solved, 0.0), axis=1)
        solved = tl.fma(-of_column[:, :, None], of_row[:, None, :], solved)
    return tl.reshape(tl.where(is_diagonal, solved[:, :, None, :], 0.0), [WIDTH, WIDTH])


@triton.jit
def _sums_between(g, sums, PRECISION: tl.constexpr):
    """Return sums of g [width]: over tokens j + 1 to i, [i, j] for j <= i; and over all later tokens, [width].

    Args:
        sums: Cumulative sums of g.
    """
    WIDTH: tl.constexpr = g.shape[0]
    i, j = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    if PRECISION == "ieee":  # sum directly, because differences of cumulative sums would lose accuracy
        between = tl.cumsum(tl.where(i > j, g[:, None], 0.0), axis=0)
        after = tl.sum(tl.where(i == WIDTH - 1, between, 0.0), axis=0)
    else:
        between = sums[:, None] - sums[None, :]
        after = tl.sum(g, axis=0) - sums
    return between, after


@triton.jit(do_not_specialize=["num_tiles", "num_rows", "num_tokens"])
def _systems_kernel(
    tokens,
    gates,
    rows,
    solved,
    scores,
    factors,
    kept,
    slots,
    y,
    scale,
    num_tiles,
    num_rows,
    num_tokens,
    HEADS: tl.constexpr,
    HEADS_A_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVES_IN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Compute the terms of one tile. Long because it also finds the tile and zeroes outputs of padding tokens."""
    await_inputs(OVERLAPS)
    tile = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    key_head = head // HEADS_A_KEY

    channel = tl.arange(0, LANES)
    for token in range(tl.load(rows.cu_seqlens + num_rows) + tile, num_tokens, num_tiles):  # zero padding
        at = y + (tl.cast(token, tl.int64) * HEADS + head) * VALUE_DIM + channel
        tl.store(at, tl.zeros([LANES], y.dtype.element_ty), mask=channel < VALUE_DIM)

    chunk = tile // PER_CHUNK
    start = tl.load(rows.cu_chunks + chunk)
    end = tl.load(rows.cu_chunks + chunk + 1)
    in_chunk = (end - start + LENGTH - 1) // LENGTH
    number, begin = find_tile(rows, tile, start, end, in_chunk, LENGTH, PER_CHUNK)
    if (number < 0) | (number >= in_chunk):
        return
    if head == 0:
        tl.store(slots + tile, tl.load(rows.chunk_slots + chunk, mask=number == in_chunk - 1, other=_PAD))

    i, j = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    index = tl.arange(0, WIDTH)
    token = begin + index
    inside = (token >= start) & (token < tl.minimum(end, begin + LENGTH))
    token = token.to(tl.int64)
    dim = tl.arange(0, triton.next_power_of_2(KEY_DIM) if KEY_DIM > 16 else 16)[None, :]
    exists = inside[:, None] & (dim < KEY_DIM)
    q = tl.load(tokens.q + token[:, None] * tokens.q_stride + key_head * KEY_DIM + dim, mask=exists, other=0.0)
    k = tl.load(tokens.k + token[:, None] * tokens.k_stride + key_head * KEY_DIM + dim, mask=exists, other=0.0)
    alike = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    asked = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    queries = tl.dot(q, tl.trans(q), input_precision=PRECISION)
    of_key = tl.rsqrt(tl.sum(tl.where(i == j, alike, 0.0), axis=1) + _EPS)
    of_query = scale * tl.rsqrt(tl.sum(tl.where(i == j, queries, 0.0), axis=1) + _EPS)

    a = tl.load(tokens.a + token * tokens.a_stride + head, mask=inside, other=0.0)
    b = tl.load(tokens.b + token * tokens.b_stride + head, mask=inside, other=0.0)
    g = log_decay(a, tl.load(gates.A_log + head), tl.load(gates.dt_bias + head)) * _LOG2_E
    g = tl.where(inside, g, 0.0)
    strength = tl.where(inside, write_strength(b), 0.0)
    sums = tl.cumsum(g, axis=0)
    between, after = _sums_between(g, sums, PRECISION)
    decay = tl.exp2(tl.where(i >= j, between, float("-inf"))) * of_key[None, :]

    at = head.to(tl.int64) * num_tiles + tile
    of_tile = factors + at * (4 * WIDTH) + index
    tl.store(of_tile, tl.exp2(sums) * of_key)
    tl.store(of_tile + WIDTH, strength)
    tl.store(of_tile + 2 * WIDTH, tl.exp2(sums) * of_query)
    tl.store(of_tile + 3 * WIDTH, tl.exp2(after) * of_key)
    tl.store(kept + at, tl.exp2(tl.sum(g, axis=0)))
    square = at * (WIDTH * WIDTH) + i * WIDTH + j
    tl.store(scores + square, (asked * decay * of_query[:, None]).to(scores.dtype.element_ty))
    A = tl.where(i > j, alike * decay * (of_key * strength)[:, None], 0.0)
    inverse = tl.where(i > j, _inverted(A, SOLVES_IN, PRECISION) * strength[None, :], 0.0)
    tl.store(solved + square, inverse.to(solved.dtype.element_ty))


def solve_tiles(
    tokens: DeltaTokens,
    gates: GateWeights,
    rows: PrefillBatch,
    shape: TileShape,
    max_registers: int = MAX_REGISTERS,
) -> TileSystems:
    """Split requests into tiles, compute the tiles' terms, and zero the outputs of padding tokens.

    Args:
        rows: The batch; must contain at least one chunk.
        max_registers: Maximum number of registers per thread, which limits the programs per multiprocessor.
    """
    num_tokens, num_heads, value_dim = tokens.v.shape
    key_heads, key_dim = tokens.q.shape[1:]
    num_tiles, dtype = rows.chunk_requests.shape[0] * shape.per_chunk, tokens.q.dtype
    systems = TileSystems.empty(tokens, shape, num_tiles)
    _systems_kernel[(num_tiles * num_heads,)](
        tokens=kernel_tokens(tokens),
        gates=KernelGates(gates.A_log, gates.dt_bias),
        rows=cut_view(rows),
        solved=systems.solved,
        scores=systems.scores,
        factors=systems.factors,
        kept=systems.kept,
        slots=systems.slots,
        y=systems.y,
        scale=key_dim**-0.5,
        num_tiles=num_tiles,
        num_rows=rows.cu_seqlens.shape[0] - 1,
        num_tokens=num_tokens,
        HEADS=num_heads,
        HEADS_A_KEY=num_heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        LENGTH=shape.length,
        WIDTH=shape.width,
        PER_CHUNK=shape.per_chunk,
        LANES=triton.next_power_of_2(value_dim),
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        SOLVES_IN=tl.float32 if dtype == torch.float32 else tl.float16,
        num_warps=_NUM_WARPS,
        maxnreg=max_registers,
        enable_fp_fusion=True,
        **overlapping(tokens.q.device),
    )
    return systems
