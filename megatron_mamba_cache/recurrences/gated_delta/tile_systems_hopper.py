"""First kernel of the scan on Hopper GPUs for bf16 tokens, in Gluon; see `tile_systems` for the terms.

A program computes the inverses of one tile for the value heads of a key head, which share the tile's k k^T, two heads
at a time, by inverting blocks (`block_inverses`). The scores are left to the scan, which has q in shared memory. Grid:
one program per tile number and key head.
"""

from math import log2

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...kernels.gluon_common import await_launcher, reinterpret, release, store_tile
from ...kernels.overlap import overlapping
from ..batches import PAD_SLOT, PrefillBatch
from ..request_tiles import TILE_LEN, TileShape, cut_view, find_tile
from .block_inverses import BLOCK, BLOCKS, SQUARE, block_diagonal, invert_blocks, merged, put_blocks
from .inputs import EPS, DeltaTokens, GateWeights, KernelGates, kernel_tokens, log_decay, write_strength
from .tile_systems import TileSystems

REACH, BETA, READ, LEFT, TARGET, SOURCE = (gl.constexpr(index) for index in range(6))
"""Indices of a tile's factors: -exp(G) / |k|, then three as in `tile_systems`, then logarithms for the scores.

The weight of the score of token i with token j is 2 to the power of TARGET of i plus SOURCE of j.
"""
NUM_FACTORS = 8  # two are unused, because sizes of TMA boxes must be powers of two

MAX_REGISTERS = 128  # registers per thread, so that four programs fit on a multiprocessor
_PAD = gl.constexpr(PAD_SLOT)
_EPS = gl.constexpr(EPS)
_LOG2_E = gl.constexpr(1.4426950408889634)
_LENGTH = gl.constexpr(TILE_LEN)
_FACTORS = gl.constexpr(NUM_FACTORS)
_PAIR = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))  # [2, tokens]; a warp has all tokens
_TOKENS = gl.constexpr(gl.SliceLayout(0, _PAIR.value))


@gluon.jit
def _zero_padding(y, first, num_tokens, tile, num_tiles, STRIDE: gl.constexpr, key_head, CHANNELS: gl.constexpr):
    """Zero the outputs of a key head's value heads for this program's tokens from `first` on."""
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    channel = gl.arange(0, 128, layout=LANES)
    zeros = gl.zeros([128], y.dtype.element_ty, layout=LANES)
    for token in range(first + tile, num_tokens, num_tiles):
        outputs = y + gl.cast(token, gl.int64) * STRIDE + key_head * CHANNELS
        for begin in range(0, CHANNELS, 128):
            gl.store(outputs + begin + channel, zeros, mask=begin + channel < CHANNELS)


@gluon.jit
def _load_tile(packed, stride, key_head, begin, first, last, KEY_DIM: gl.constexpr):
    """Return q or k of the tokens from `begin` on, [LENGTH, KEY_DIM]; zeros outside [first, last)."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // KEY_DIM, KEY_DIM // 8], [4, 1], [1, 0])
    token = begin + gl.arange(0, _LENGTH, layout=gl.SliceLayout(1, LAYOUT))
    inside = (token >= first) & (token < last)
    dim = gl.arange(0, KEY_DIM, layout=gl.SliceLayout(0, LAYOUT))
    pointers = packed + token.to(gl.int64)[:, None] * stride + key_head * KEY_DIM + dim[None, :]
    return gl.load(pointers, mask=inside[:, None], other=0.0)


@gluon.jit
def _added(a, b):
    return a + b


@gluon.jit
def _write_factors(
    tokens, gates, factors, kept, vectors, heads, tile, num_tiles, begin, first, last, log_key, log_query
):
    """Write the factors of a tile for two heads; put vectors [2, LENGTH] for `_solve_pair` into shared memory."""
    index = gl.arange(0, _LENGTH, layout=_TOKENS)
    token = begin + index
    inside = ((token >= first) & (token < last))[None, :]
    token = token.to(gl.int64)[None, :]
    a = gl.load(tokens.a + token * tokens.a_stride + heads[:, None], mask=inside, other=0.0)
    b = gl.load(tokens.b + token * tokens.b_stride + heads[:, None], mask=inside, other=0.0)
    g = log_decay(a, gl.load(gates.A_log + heads)[:, None], gl.load(gates.dt_bias + heads)[:, None]) * _LOG2_E
    g = gl.where(inside, g, 0.0)
    strength = gl.where(inside, write_strength(b), 0.0)
    sums = gl.associative_scan(g, 1, _added)
    total = gl.sum(g, axis=1)
    vectors.index(0).store(sums + log_key[None, :] + gl.log2(strength))
    vectors.index(1).store(log_key[None, :] - sums)
    vectors.index(2).store(strength)
    at = heads.to(gl.int64) * num_tiles + tile
    of_tile = factors + (at * (_FACTORS * _LENGTH))[:, None] + index[None, :]
    gl.store(of_tile + REACH * _LENGTH, -gl.exp2(sums + log_key[None, :]))
    gl.store(of_tile + BETA * _LENGTH, strength)
    gl.store(of_tile + READ * _LENGTH, gl.exp2(sums + log_query[None, :]))
    gl.store(of_tile + LEFT * _LENGTH, gl.exp2(total[:, None] - sums + log_key[None, :]))
    gl.store(of_tile + TARGET * _LENGTH, sums + log_query[None, :])
    gl.store(of_tile + SOURCE * _LENGTH, log_key[None, :] - sums)
    gl.store(kept + at, gl.exp2(total))


@gluon.jit
def _solve_pair(
    tokens, gates, solved_tiles, factors, kept, minus_alike, log_key, log_query, vectors, matrices, copy, blocks,
    head, second, tile, num_tiles, begin, first, last,
):  # fmt: skip
    """Solve the systems of two heads (or twice of one)."""
    i = gl.arange(0, _LENGTH, layout=gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, _LENGTH, layout=gl.SliceLayout(0, SQUARE))[None, :]
    CUT: gl.constexpr = minus_alike.reshape([BLOCKS, BLOCK, BLOCKS, BLOCK]).type.layout
    heads = head + second * gl.arange(0, 2, layout=gl.SliceLayout(1, _PAIR))
    pairs = reinterpret(vectors, gl.float32, [3, 2, _LENGTH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    _write_factors(
        tokens, gates, factors, kept, pairs, heads, tile, num_tiles, begin, first, last, log_key, log_query
    )  # fmt: skip
    tma.store_wait(0)  # results of the previous pair are stored from `matrices`
    for part in gl.static_range(2):
        ends = vectors.index(part).load(gl.SliceLayout(1, SQUARE))[:, None]
        starts = vectors.index(2 + part).load(gl.SliceLayout(0, SQUARE))[None, :]
        minus_A = gl.where(i > j, minus_alike * gl.exp2(ends + starts), 0.0)
        put_blocks(minus_A, blocks.slice(part * BLOCKS, BLOCKS, 0))
        matrices.index(part).store(minus_A.to(gl.float16))
    fence_async_shared()  # for the matmuls with `matrices`, before the next barrier
    invert_blocks(blocks)
    is_near = gl.where((i // 32 == j // 32) & (i // 16 > j // 16), 1.0, 0.0)
    is_far = gl.where(i // 32 > j // 32, 1.0, 0.0)
    for part in gl.static_range(2):
        inverse = block_diagonal(blocks.slice(part * BLOCKS, BLOCKS, 0), CUT)
        inverse = merged(inverse, matrices.index(part), copy, is_near)
        inverse = merged(inverse, matrices.index(part), copy, is_far)
        strength = vectors.index(4 + part).load(gl.SliceLayout(0, SQUARE))[None, :]
        solved = gl.where(i > j, inverse * strength, 0.0).to(gl.bfloat16)
        out = reinterpret(matrices.index(part), gl.bfloat16, [_LENGTH, _LENGTH], solved_tiles.layout)
        out.store(solved)
        fence_async_shared()
        store_tile(solved_tiles, [((head + part * second) * num_tiles + tile) * _LENGTH, 0], out)


@gluon.jit(do_not_specialize=["num_tiles", "num_rows", "num_tokens"])
def _systems_kernel(
    tokens, gates, rows, solved_tiles, factors, kept, slots, y, log_scale, num_tiles, num_rows, num_tokens,
    KEY_HEADS: gl.constexpr, HEADS_A_KEY: gl.constexpr, KEY_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    PER_CHUNK: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """Compute the inverses and factors of one tile for the value heads of a key head.

    Long because it also finds the tile and allocates shared memory.
    """
    release(OVERLAPS)
    await_launcher(OVERLAPS)
    tile = gl.program_id(0) // KEY_HEADS
    key_head = gl.program_id(0) % KEY_HEADS
    of_key: gl.constexpr = HEADS_A_KEY * VALUE_DIM
    _zero_padding(
        y, gl.load(rows.cu_seqlens + num_rows), num_tokens, tile, num_tiles, KEY_HEADS * of_key, key_head, of_key
    )
    chunk = tile // PER_CHUNK
    start = gl.load(rows.cu_chunks + chunk)
    end = gl.load(rows.cu_chunks + chunk + 1)
    in_chunk = (end - start + _LENGTH - 1) // _LENGTH
    number, begin = find_tile(rows, tile, start, end, in_chunk, _LENGTH, PER_CHUNK)
    if (number < 0) | (number >= in_chunk):
        return
    if key_head == 0:
        gl.store(slots + tile, gl.load(rows.chunk_slots + chunk, mask=number == in_chunk - 1, other=_PAD))
    last = gl.minimum(end, begin + _LENGTH)

    HALVES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_LENGTH, _LENGTH], gl.float16)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    keys = gl.allocate_shared_memory(
        gl.bfloat16,
        [_LENGTH, KEY_DIM],
        gl.NVMMASharedLayout.get_default_for([_LENGTH, KEY_DIM], gl.bfloat16),
        _load_tile(tokens.k, tokens.k_stride, key_head, begin, start, last, KEY_DIM),
    )
    queries = gl.allocate_shared_memory(
        gl.bfloat16,
        [_LENGTH, KEY_DIM],
        keys.layout,
        _load_tile(tokens.q, tokens.q_stride, key_head, begin, start, last, KEY_DIM),
    )
    fence_async_shared()
    zeros = gl.zeros([_LENGTH, _LENGTH], gl.float32, layout=SQUARE)
    alike = warpgroup_mma(keys, keys.permute((1, 0)), zeros, use_acc=False, is_async=True)
    asked = warpgroup_mma(queries, queries.permute((1, 0)), zeros, use_acc=False, is_async=True)
    alike, asked = warpgroup_mma_wait(0, deps=[alike, asked])
    i = gl.arange(0, _LENGTH, layout=gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, _LENGTH, layout=gl.SliceLayout(0, SQUARE))[None, :]
    square = gl.sum(gl.where(i == j, alike, 0.0), axis=1) + _EPS
    log_key = gl.convert_layout(-0.5 * gl.log2(square), _TOKENS)
    square = gl.sum(gl.where(i == j, asked, 0.0), axis=1) + _EPS
    log_query = gl.convert_layout(log_scale - 0.5 * gl.log2(square), _TOKENS)
    minus_alike = alike * -1.0

    vectors = gl.allocate_shared_memory(gl.float32, [6, _LENGTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    matrices = gl.allocate_shared_memory(gl.float16, [2, _LENGTH, _LENGTH], HALVES)
    copy = gl.allocate_shared_memory(gl.float16, [_LENGTH, _LENGTH], HALVES)
    blocks = gl.allocate_shared_memory(gl.float32, [2 * BLOCKS, BLOCK, BLOCK], PLAIN)
    for pair in gl.static_range(0, HEADS_A_KEY, 2):
        _solve_pair(
            tokens, gates, solved_tiles, factors, kept, minus_alike, log_key, log_query,
            vectors, matrices, copy, blocks,
            key_head * HEADS_A_KEY + pair, min(1, HEADS_A_KEY - 1 - pair), tile, num_tiles, begin, start, last,
        )  # fmt: skip
    tma.store_wait(0)


def solve_tiles_on_hopper(
    tokens: DeltaTokens,
    gates: GateWeights,
    rows: PrefillBatch,
    shape: TileShape,
    max_registers: int = MAX_REGISTERS,
) -> TileSystems:
    """Do the same as `solve_tiles` for `scan_on_hopper`, but with the factors above instead of scores.

    Args:
        max_registers: Maximum number of registers per thread, which limits the programs per multiprocessor.
    """
    num_tokens, num_heads, value_dim = tokens.v.shape
    key_heads, key_dim = tokens.q.shape[1:]
    num_tiles = rows.chunk_requests.shape[0] * shape.per_chunk
    systems = TileSystems.without_scores(tokens, shape, num_tiles, NUM_FACTORS)
    square = [TILE_LEN, TILE_LEN]
    layout = gl.NVMMASharedLayout.get_default_for(square, gl.bfloat16)
    _systems_kernel[(num_tiles * key_heads,)](
        tokens=kernel_tokens(tokens),
        gates=KernelGates(gates.A_log, gates.dt_bias),
        rows=cut_view(rows),
        solved_tiles=TensorDescriptor.from_tensor(systems.solved.flatten(0, 2), square, layout),
        factors=systems.factors,
        kept=systems.kept,
        slots=systems.slots,
        y=systems.y,
        log_scale=-0.5 * log2(key_dim),
        num_tiles=num_tiles,
        num_rows=rows.cu_seqlens.shape[0] - 1,
        num_tokens=num_tokens,
        KEY_HEADS=key_heads,
        HEADS_A_KEY=num_heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PER_CHUNK=shape.per_chunk,
        num_warps=4,
        maxnreg=max_registers,
        enable_fp_fusion=True,
        **overlapping(tokens.q.device),
    )
    return systems
