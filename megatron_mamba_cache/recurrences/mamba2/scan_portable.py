"""SSD scan in plain Triton, for devices, dtypes and shapes that `scan_hopper` does not support.

A program scans one head of a request, or a slice of its channels. It processes the tiles in order and keeps the state
in registers, in float32. For each tile, with the decays computed by `tiles`:

    scores[i, j] = (C_i . B_j) 2^(decay_i + gain_j) for j <= i, else 0; for float32, 2^(decay_i - decay_j + gain_j)
    y = scores x + 2^decay (C state) + D x
    state = 2^total state + B^T (2^(total + gain) x)

Inputs are read once and outputs written once; a state is stored only at the end of a chunk or request. In a
tile that extends beyond its request, tokens of other requests are masked.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..quantized_states import store_quantized
from ..stochastic_rounding import cast_scanned, round_boundary
from .inputs import SSMTokens
from .tiles import HeadSlice, ScanTiles

_NUM_WARPS = 4
_NUM_STAGES = 2
_LEAST_LANES = 64  # minimum width of bf16 matmuls; with less, Triton 3.6 reads out of bounds on Hopper GPUs


class _Packed(NamedTuple):
    """Packed tokens as kernel arguments; strides count elements between tokens."""

    x: Tensor
    B: Tensor
    C: Tensor
    y: Tensor
    x_stride: int
    B_stride: int
    C_stride: int


@triton.jit
def _advance(state, x, B, C, decays, skip, PRECISION: tl.constexpr):
    """Run the recurrence over one tile; return its outputs [width, head_dim] and the new state [d_state, head_dim]."""
    WIDTH: tl.constexpr = x.shape[0]
    token = tl.arange(0, WIDTH)
    decay = tl.load(decays + token)
    gain = tl.load(decays + WIDTH + token)
    total = tl.load(decays + WIDTH - 1)
    left = total
    exponent = decay[:, None] + gain[None, :]
    if PRECISION == "ieee":  # subtract the decays first, because adding the gain to a large sum would lose accuracy
        left = total - decay
        exponent = (decay[:, None] - decay[None, :]) + gain[None, :]
    exponent = tl.where(token[:, None] >= token[None, :], exponent, float("-inf"))
    scores = tl.dot(C, tl.trans(B), input_precision=PRECISION) * tl.exp2(exponent)
    from_state = tl.dot(C, state.to(C.dtype), input_precision=PRECISION)
    y = tl.fma(from_state, tl.exp2(decay)[:, None], skip * x)  # explicit fma: all compiled variants must round alike
    y = tl.dot(scores.to(x.dtype), x, y, input_precision=PRECISION)
    weighted = x * tl.exp2(left + gain)[:, None]
    state = tl.dot(tl.trans(B), weighted.to(x.dtype), state * tl.exp2(total), input_precision=PRECISION)
    return y, state


@triton.jit
def _advance_partly(
    state, packed, decays, skip, head, group, begin, low, high,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr,
    D_STATE: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan the tile that starts at `begin`, of which only the tokens [low, high) belong to the request."""
    token = begin + tl.arange(0, WIDTH)
    inside = ((token >= low) & (token < high))[:, None]
    token = token.to(tl.int64)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    channel = head * HEAD_DIM + FIRST + lane
    inside_x = inside & (lane < CHANNELS)
    dim = group * D_STATE + tl.arange(0, D_STATE)[None, :]
    x = tl.load(packed.x + token * packed.x_stride + channel, mask=inside_x, other=0.0)
    B = tl.load(packed.B + token * packed.B_stride + dim, mask=inside, other=0.0)
    C = tl.load(packed.C + token * packed.C_stride + dim, mask=inside, other=0.0)
    y, state = _advance(state, x, B, C, decays, skip, PRECISION)
    tl.store(packed.y + token * (HEADS * HEAD_DIM) + channel, y.to(packed.y.dtype.element_ty), mask=inside_x)
    return state


@triton.jit
def _store_state(
    states, slot_stride, rounding, slot, state, position, head, FIRST: tl.constexpr, CHANNELS: tl.constexpr
):
    if slot >= 0:
        lane = tl.arange(0, state.shape[1])[None, :]
        row = head * state.shape[0] + tl.arange(0, state.shape[0])[:, None]
        stored = cast_scanned(state, states.dtype.element_ty, rounding, position, row, FIRST + lane)
        tl.store(states + slot.to(tl.int64) * slot_stride, stored, mask=lane < CHANNELS)


@triton.jit
def _end_tile(
    states, slot_stride, quantized, rounding, slot, state, position, head,
    HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Round the state at the end of a tile if due, store it, quantized if `quantized` is given, and return it."""
    D_STATE: tl.constexpr = state.shape[0]
    n, lane = tl.arange(0, D_STATE), tl.arange(0, state.shape[1])
    row, channel = head * D_STATE + n[:, None], FIRST + lane[None, :]
    state = round_boundary(state, states.dtype.element_ty, rounding, position, row, channel)
    if quantized is None:
        _store_state(states, slot_stride, rounding, slot, state, position, head, FIRST, CHANNELS)
    elif slot >= 0:
        no_layer = slot.to(tl.int64) * 0
        store_quantized(
            quantized, no_layer, slot.to(tl.int64), state, head, n, FIRST + lane, n < D_STATE, lane < CHANNELS,
            D_STATE, HEAD_DIM,
        )  # fmt: skip
    return state


@triton.jit(do_not_specialize=["num_tiles"])
def _scan_kernel(
    packed, x_tiles, B_tiles, C_tiles, y_tiles, rows, D, decays, tile_slots, pool, slot_stride, quantized, rounding,
    num_tiles,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, CHANNELS: tl.constexpr,
    LANES: tl.constexpr, D_STATE: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, PER_CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Scan one head of a request. Long because it has many arguments, and partial tiles need separate loops."""
    row = tl.load(rows.longest_first + tl.program_id(0) // HEADS)
    head = tl.program_id(0) % HEADS
    group = head // (HEADS // GROUPS)
    low = tl.load(rows.cu_seqlens + row)
    high = tl.load(rows.cu_seqlens + row + 1)

    lane = tl.arange(0, LANES)[None, :]
    in_state = tl.arange(0, D_STATE)[:, None] * HEAD_DIM + FIRST + lane
    states = pool + head * (D_STATE * HEAD_DIM) + in_state
    state = tl.zeros((D_STATE, LANES), tl.float32)
    initial = tl.load(rows.initial_slots + row)
    if initial >= 0:
        state = tl.load(states + initial.to(tl.int64) * slot_stride, mask=lane < CHANNELS, other=0.0).to(tl.float32)

    # Find the start of the request's first tile, and its tile number; see `request_tiles`.
    first_chunk = tl.load(rows.cu_request_chunks + row)
    num_chunks = tl.load(rows.cu_request_chunks + row + 1) - first_chunk
    first_end = tl.load(rows.cu_chunks + first_chunk + 1, mask=num_chunks > 0, other=0)
    in_first = (first_end - low + LENGTH - 1) // LENGTH
    begin = tl.where(num_chunks > 1, first_end - in_first * LENGTH, low)
    num_row_tiles = (high - begin + LENGTH - 1) // LENGTH
    tile = (first_chunk + 1) * PER_CHUNK - in_first
    tile_slots += tile
    decays += (head.to(tl.int64) * num_tiles + tile) * (2 * WIDTH)
    skip = tl.load(D + head).to(tl.float32)
    origin = 0
    if rounding is not None:
        origin = tl.load(rounding.computed + row) - low  # position of packed token 0

    first_whole = tl.where(begin < low, 1, 0)
    after_whole = tl.maximum(first_whole, (high - begin) // LENGTH)
    if LENGTH < WIDTH or CHANNELS < LANES:
        after_whole = first_whole
    for k in tl.range(0, first_whole, num_stages=1):
        state = _advance_partly(
            state, packed, decays, skip, head, group, begin, low, tl.minimum(high, begin + LENGTH),
            HEADS, HEAD_DIM, FIRST, CHANNELS, LANES, D_STATE, WIDTH, PRECISION,
        )  # fmt: skip
        state = _end_tile(
            states, slot_stride, quantized, rounding, tl.load(tile_slots + k), state,
            origin + tl.minimum(begin + (k + 1) * LENGTH, high), head, HEAD_DIM, FIRST, CHANNELS,
        )  # fmt: skip
    for k in tl.range(first_whole, after_whole, num_stages=NUM_STAGES):
        token = begin + k * LENGTH
        x = x_tiles.load([token, head * HEAD_DIM + FIRST])
        B = B_tiles.load([token, group * D_STATE])
        C = C_tiles.load([token, group * D_STATE])
        y, state = _advance(state, x, B, C, decays + k * (2 * WIDTH), skip, PRECISION)
        y_tiles.store([token, head * HEAD_DIM + FIRST], y.to(packed.y.dtype.element_ty))
        state = _end_tile(
            states, slot_stride, quantized, rounding, tl.load(tile_slots + k), state,
            origin + tl.minimum(begin + (k + 1) * LENGTH, high), head, HEAD_DIM, FIRST, CHANNELS,
        )  # fmt: skip
    for k in tl.range(after_whole, num_row_tiles, num_stages=1):
        token = begin + k * LENGTH
        state = _advance_partly(
            state, packed, decays + k * (2 * WIDTH), skip, head, group, token, token, tl.minimum(high, token + LENGTH),
            HEADS, HEAD_DIM, FIRST, CHANNELS, LANES, D_STATE, WIDTH, PRECISION,
        )  # fmt: skip
        state = _end_tile(
            states, slot_stride, quantized, rounding, tl.load(tile_slots + k), state,
            origin + tl.minimum(begin + (k + 1) * LENGTH, high), head, HEAD_DIM, FIRST, CHANNELS,
        )  # fmt: skip

    final = tl.load(rows.final_slots + row)
    _store_state(states, slot_stride, rounding, final, state, origin + high, head, FIRST, CHANNELS)


def scan_portably(tokens: SSMTokens, tiles: ScanTiles, channels: HeadSlice, arguments: dict[str, Any]) -> None:
    """Scan a slice of channels of all requests; write outputs to `tiles.y` and states to their slots, in place.

    Args:
        tokens: d_state must be a power of two and at least 16.
        arguments: Arguments shared with the Hopper kernel.
    """
    shape, d_state = tiles.shape, arguments["D_STATE"]
    lanes = lanes_of(channels.width, tokens.x.dtype)
    x, B, C = (t.flatten(1) for t in (tokens.x, tokens.B, tokens.C))
    _scan_kernel[(arguments["HEADS"] * arguments["rows"].longest_first.shape[0],)](
        packed=_Packed(x, B, C, tiles.y, x.stride(0), B.stride(0), C.stride(0)),
        x_tiles=_described(x, shape.width, lanes),
        B_tiles=_described(B, shape.width, d_state),
        C_tiles=_described(C, shape.width, d_state),
        y_tiles=_described(tiles.y.flatten(1), shape.width, lanes),
        **arguments,
        FIRST=channels.first,
        CHANNELS=channels.width,
        LANES=lanes,
        WIDTH=shape.width,
        PRECISION="ieee" if tokens.x.dtype == torch.float32 else "tf32",
        NUM_STAGES=_NUM_STAGES,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
    )


def lanes_of(width: int, dtype: torch.dtype) -> int:
    """Return the matmul width for `width` channels; lanes after the channels are masked."""
    return width if dtype == torch.float32 else max(width, _LEAST_LANES)


def _described(packed: Tensor, tile_width: int, num_channels: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(packed, [tile_width, num_channels])
