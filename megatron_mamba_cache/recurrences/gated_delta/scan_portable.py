"""Scan kernel for the gated delta rule in plain Triton, which uses the terms computed by `tile_systems`.

A program scans some channels of one head of a request. It processes the tiles in order and keeps the state in
registers, transposed and in float32. In a tile that extends beyond its request, tokens of other requests are masked.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...kernels.kernel_launches import num_multiprocessors
from ..batches import PrefillBatch
from ..quantized_states import QuantizedStates, quantized_pointers
from ..request_tiles import LEAST_WIDTH, is_aligned, tiled_view
from ..stochastic_rounding import ScanRounding
from .inputs import DeltaTokens
from .tile_systems import TileSystems
from .tile_updates import advance_tile, end_tile, store_state


@dataclass(frozen=True, slots=True)
class ScanTiling:
    """Tile sizes and launch settings of the scan kernel.

    Args:
        channels: Number of channels (of value_dim) per program, a power of two.
        num_stages: Number of tiles whose inputs are in shared memory at a time.
        by_tma: If True, load inputs with TMA where possible; if False, with ordinary loads.
    """

    channels: int
    num_warps: int
    num_stages: int
    by_tma: bool = True


_NARROW = ScanTiling(64, num_warps=4, num_stages=3)  # 64 channels of state fit in registers as a matmul operand
_WIDE = ScanTiling(128, num_warps=8, num_stages=3)
_INTERPRETED_MULTIPROCESSORS = 132


def choose_tiling(tokens: DeltaTokens, num_rows: int) -> ScanTiling:
    """Return the fastest tiling for the batch; the tiling does not affect the result.

    With few requests, narrow programs use more multiprocessors. With many requests, wide programs are faster, because
    q, k and the tile's terms are read fewer times.
    """
    num_heads, value_dim = tokens.v.shape[1:]
    if tokens.q.dtype == torch.float32:
        return ScanTiling(min(32, max(LEAST_WIDTH, triton.next_power_of_2(value_dim))), num_warps=4, num_stages=1)
    if tokens.q.shape[2] > 128:
        return ScanTiling(64, num_warps=8, num_stages=2)
    num_narrow = num_rows * num_heads * triton.cdiv(value_dim, _NARROW.channels)
    multiprocessors = num_multiprocessors(tokens.v.device) if tokens.v.is_cuda else _INTERPRETED_MULTIPROCESSORS
    return _WIDE if num_narrow > multiprocessors and value_dim > _NARROW.channels else _NARROW


class _Packed(NamedTuple):
    """Packed tokens and tiles as kernel arguments; strides count elements between tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    y: Tensor
    solved: Tensor
    scores: Tensor
    q_stride: int
    k_stride: int
    v_stride: int


@triton.jit
def _scan_partly(
    state, packed, factors, kept, tile_slots, states, slot_stride, quantized, rounding, origin, is_state, at, t, begin,
    low, high, head, key_head, first,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan tile `t` of a request, of which only the tokens [low, high) belong to the request."""
    index = tl.arange(0, WIDTH)
    token = begin + t * LENGTH + index
    inside = (token >= low) & (token < tl.minimum(high, begin + (t + 1) * LENGTH))
    token = token.to(tl.int64)
    dim = tl.arange(0, state.shape[1])[None, :]
    exists = inside[:, None] & (dim < KEY_DIM)
    channel = first + tl.arange(0, state.shape[0])[:, None]
    is_value = inside[None, :] & (channel < VALUE_DIM)
    q = tl.load(packed.q + token[:, None] * packed.q_stride + key_head * KEY_DIM + dim, mask=exists, other=0.0)
    k = tl.load(packed.k + token[:, None] * packed.k_stride + key_head * KEY_DIM + dim, mask=exists, other=0.0)
    channel += head * VALUE_DIM
    v = tl.load(packed.v + token[None, :] * packed.v_stride + channel, mask=is_value, other=0.0)
    square = (at + t) * (WIDTH * WIDTH) + index[:, None] * WIDTH + index[None, :]
    solved, scores = tl.load(packed.solved + square), tl.load(packed.scores + square)
    y, state = advance_tile(state, q, k, v, solved, scores, factors + t * (4 * WIDTH), tl.load(kept + t), PRECISION)
    tl.store(packed.y + token[None, :] * (HEADS * VALUE_DIM) + channel, y, mask=is_value)
    return end_tile(
        states, slot_stride, quantized, rounding, tl.load(tile_slots + t), state,
        origin + tl.minimum(begin + (t + 1) * LENGTH, high), is_state, head, first, KEY_DIM, VALUE_DIM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles"])
def _scan_kernel(
    packed,
    q_tiles,
    k_tiles,
    v_tiles,
    y_tiles,
    solved_tiles,
    score_tiles,
    rows,
    factors,
    kept,
    tile_slots,
    pool,
    slot_stride,
    quantized,
    rounding,
    num_tiles,
    HEADS: tl.constexpr,
    HEADS_A_KEY: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    LENGTH: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Scan one head of a request. Long because it has many arguments, and partial tiles need separate loops."""
    PARTS: tl.constexpr = (VALUE_DIM + CHANNELS - 1) // CHANNELS
    first = tl.program_id(0) % PARTS * CHANNELS
    head = tl.program_id(0) // PARTS % HEADS
    key_head = head // HEADS_A_KEY
    row = tl.load(rows.longest_first + tl.program_id(0) // (PARTS * HEADS))
    low = tl.load(rows.cu_seqlens + row)
    high = tl.load(rows.cu_seqlens + row + 1)

    dim = tl.arange(0, triton.next_power_of_2(KEY_DIM) if KEY_DIM > 16 else 16)[None, :]
    channel = first + tl.arange(0, CHANNELS)[:, None]
    is_state = (channel < VALUE_DIM) & (dim < KEY_DIM)
    states = pool + head * (KEY_DIM * VALUE_DIM) + dim * VALUE_DIM + channel
    initial = tl.load(rows.initial_slots + row)
    state = tl.zeros((CHANNELS, dim.shape[1]), tl.float32)
    if initial >= 0:
        state = tl.load(states + initial.to(tl.int64) * slot_stride, mask=is_state, other=0.0).to(tl.float32)

    # Find the start of the request's first tile, and its tile number; see `request_tiles`.
    first_chunk = tl.load(rows.cu_request_chunks + row)
    num_chunks = tl.load(rows.cu_request_chunks + row + 1) - first_chunk
    first_end = tl.load(rows.cu_chunks + first_chunk + 1, mask=num_chunks > 0, other=0)
    in_first = (first_end - low + LENGTH - 1) // LENGTH
    begin = tl.where(num_chunks > 1, first_end - in_first * LENGTH, low)
    num_row_tiles = (high - begin + LENGTH - 1) // LENGTH
    tile = (first_chunk + 1) * PER_CHUNK - in_first
    tile_slots += tile
    at = head.to(tl.int64) * num_tiles + tile
    factors += at * (4 * WIDTH)
    kept += at

    origin = 0
    if rounding is not None:
        origin = tl.load(rounding.computed + row) - low  # position of packed token 0

    first_whole = tl.where(begin < low, 1, 0)
    after_whole = tl.maximum(first_whole, (high - begin) // LENGTH)
    if k_tiles is None:
        first_whole = 0
        after_whole = 0
    for t in tl.range(0, first_whole, num_stages=1):
        state = _scan_partly(
            state, packed, factors, kept, tile_slots, states, slot_stride, quantized, rounding, origin, is_state, at, t,
            begin, low, high, head, key_head, first, HEADS, KEY_DIM, VALUE_DIM, LENGTH, WIDTH, PRECISION,
        )  # fmt: skip
    if k_tiles is not None:
        for t in tl.range(first_whole, after_whole, num_stages=NUM_STAGES):
            token = begin + t * LENGTH
            square = (head * num_tiles + tile + t) * WIDTH
            k = k_tiles.load([token, key_head * KEY_DIM])
            q = q_tiles.load([token, key_head * KEY_DIM])
            v = v_tiles.load([token, head * VALUE_DIM + first])
            solved = solved_tiles.load([square, 0])
            scores = score_tiles.load([square, 0])
            y, state = advance_tile(
                state, q, k, tl.trans(v), solved, scores, factors + t * (4 * WIDTH), tl.load(kept + t), PRECISION
            )
            y_tiles.store([token, head * VALUE_DIM + first], tl.trans(y.to(packed.y.dtype.element_ty)))
            state = end_tile(
                states, slot_stride, quantized, rounding, tl.load(tile_slots + t), state, origin + token + LENGTH,
                is_state, head, first, KEY_DIM, VALUE_DIM,
            )  # fmt: skip
    for t in tl.range(after_whole, num_row_tiles, num_stages=NUM_STAGES if k_tiles is None else 1):
        state = _scan_partly(
            state, packed, factors, kept, tile_slots, states, slot_stride, quantized, rounding, origin, is_state, at, t,
            begin, low, high, head, key_head, first, HEADS, KEY_DIM, VALUE_DIM, LENGTH, WIDTH, PRECISION,
        )  # fmt: skip

    final = tl.load(rows.final_slots + row)
    store_state(states, slot_stride, rounding, final, state, origin + high, is_state, head, first, KEY_DIM)


def scan_portably(
    tokens: DeltaTokens,
    pool: Tensor,
    rows: PrefillBatch,
    tiles: TileSystems,
    quantized: QuantizedStates | None = None,
    tiling: ScanTiling | None = None,
    rounding: ScanRounding | None = None,
) -> None:
    """Scan all requests; write outputs to `tiles.y` and states to their slots, in place.

    Args:
        quantized: Receives the states at chunk ends; None: they are stored in slots of `pool`.
    """
    num_heads, value_dim = tokens.v.shape[1:]
    key_heads, key_dim = tokens.q.shape[1:]
    shape = tiles.shape
    num_rows = rows.longest_first.shape[0]
    tiling = tiling or choose_tiling(tokens, num_rows)
    q, k, v, y = (t.flatten(1) for t in (tokens.q, tokens.k, tokens.v, tiles.y))
    assert tiles.scores is not None
    solved, scores = (t.flatten(0, 2) for t in (tiles.solved, tiles.scores))
    packed = _Packed(q, k, v, y, solved, scores, q.stride(0), k.stride(0), v.stride(0))
    num_parts = triton.cdiv(value_dim, tiling.channels)
    _scan_kernel[(num_parts * num_heads * num_rows,)](
        packed=packed,
        **_described(packed, tokens, tiles, tiling),
        rows=tiled_view(rows),
        factors=tiles.factors,
        kept=tiles.kept,
        tile_slots=tiles.slots,
        pool=pool,
        slot_stride=pool.stride(0),
        quantized=quantized_pointers(quantized),
        rounding=rounding,
        num_tiles=tiles.slots.shape[0],
        HEADS=num_heads,
        HEADS_A_KEY=num_heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        CHANNELS=tiling.channels,
        LENGTH=shape.length,
        WIDTH=shape.width,
        PER_CHUNK=shape.per_chunk,
        PRECISION="ieee" if tokens.q.dtype == torch.float32 else "tf32",
        NUM_STAGES=tiling.num_stages if is_aligned(tokens.q) else 1,
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
    )


def _described(
    packed: _Packed, tokens: DeltaTokens, tiles: TileSystems, tiling: ScanTiling
) -> dict[str, TensorDescriptor | None]:
    """Return TMA descriptors for the packed tensors; all None if TMA cannot copy whole tiles."""
    key_dim, value_dim, width = tokens.q.shape[2], tokens.v.shape[2], tiles.shape.width
    has_whole_tiles = (
        tiling.by_tma
        and tiles.shape.length == width
        and key_dim >= LEAST_WIDTH
        and key_dim & (key_dim - 1) == 0
        and value_dim % tiling.channels == 0
        and all(is_aligned(each) for each in (tokens.q, tokens.k, tokens.v))
    )
    blocks = {
        "q_tiles": (packed.q, key_dim),
        "k_tiles": (packed.k, key_dim),
        "v_tiles": (packed.v, tiling.channels),
        "y_tiles": (packed.y, tiling.channels),
        "solved_tiles": (packed.solved, width),
        "score_tiles": (packed.scores, width),
    }
    return {
        name: TensorDescriptor.from_tensor(tensor, [width, channels]) if has_whole_tiles else None
        for name, (tensor, channels) in blocks.items()
    }
