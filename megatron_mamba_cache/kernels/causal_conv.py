"""Causal convolution over packed rows, with SiLU, from and to the windows of state slots.

    history = initial window, x;  y[j] = SiLU(sum over k of weight[k] * history[j + k] + bias)

The d_conv - 1 inputs before a row's end go to its final slot, those before a chunk's end to the chunk's slot.

An initial slot may be its own row's final slot, so what reads a row's initial window must also write its final one.
Programs have one of three parts, each for a tile of channels:

    row     its first d_conv - 1 tokens, which alone need the initial window, and every window that holds part of it
    chunk   the window at its end, all of it inputs of this step
    tile    a run of packed tokens, whatever rows they belong to, except each row's first d_conv - 1

Grid: rows, chunks and tiles times the tiles of channels. Graph safe: no host sync, one launch, grid fixed by the
shapes of the arguments.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .conv_taps import (
    ConvInputs,
    ConvWindows,
    appended,
    check_conv,
    load_bias,
    load_taps,
    weigh_and_activate,
)
from .kernel_launches import is_computed_in_fp32, launches_kernel
from .masks import only_if
from .reference_conv import causal_conv_ref
from .row_checks import check_varlen_rows
from .varlen_rows import PAD_SLOT, VarlenRows

__all__ = ["TILING", "ConvTiling", "causal_conv", "causal_conv_ref"]


@dataclass(frozen=True, slots=True)
class ConvTiling:
    """How tokens are cut over programs; every choice computes the same bits.

    Args:
        tokens, channels: of a tile, powers of two.
        num_warps: warps of a program.
    """

    tokens: int
    channels: int
    num_warps: int


TILING = ConvTiling(tokens=16, channels=256, num_warps=4)
_PAD = tl.constexpr(PAD_SLOT)


class _Rows(NamedTuple):
    """The kernel's view of `VarlenRows`."""

    cu_rows: Tensor
    initial_slots: Tensor
    final_slots: Tensor
    cu_chunks: Tensor
    chunk_rows: Tensor
    chunk_slots: Tensor


@triton.jit
def _count_up_to(ends, num_ends, token):
    """Return how many of the ascending `ends` [num_ends] are at most `token`, a number or a tensor of them."""
    low = token * 0
    high = low + num_ends
    width = num_ends
    while width > 0:
        middle = (low + high) // 2
        is_open = low < high
        is_after = tl.load(ends + middle, mask=is_open, other=0) <= token
        low = tl.where(is_open & is_after, middle + 1, low)
        high = tl.where(is_open & ~is_after, middle, high)
        width = width // 2
    return low


@triton.jit
def _store_inputs(inputs, windows, slot, end, channel, inside, WINDOW: tl.constexpr):
    """Store the last WINDOW inputs before packed token `end` into `slot`."""
    first = inputs.x + tl.cast(end - WINDOW, tl.int64) * inputs.token_stride + channel
    stored = windows.pool + slot.to(tl.int64) * windows.slot_stride + channel
    for k in tl.static_range(WINDOW):
        x = tl.load(first + k * inputs.token_stride, mask=inside, other=0.0)
        tl.store(stored + k * windows.time_stride, x.to(windows.pool.dtype.element_ty), mask=inside)


@triton.jit
def _begin_row(
    y, inputs, weight, bias, windows, rows, row, num_chunks, channel, CONV_DIM: tl.constexpr, D_CONV: tl.constexpr
):
    """Compute a row's first tokens and store its final window and those that hold part of the initial one."""
    WINDOW: tl.constexpr = D_CONV - 1
    inside = channel < CONV_DIM
    start = tl.load(rows.cu_rows + row)
    num_tokens = tl.load(rows.cu_rows + row + 1) - start
    initial = tl.load(rows.initial_slots + row).to(tl.int64)
    final = tl.load(rows.final_slots + row)
    if (num_tokens > 0) | (final != _PAD):
        history = ()
        for k in tl.static_range(WINDOW):
            at = windows.pool + initial * windows.slot_stride + k * windows.time_stride + channel
            history = appended(history, tl.load(at, mask=only_if(initial != _PAD, inside), other=0.0).to(tl.float32))
        for j in tl.static_range(WINDOW):
            at = inputs.x + tl.cast(start + j, tl.int64) * inputs.token_stride + channel
            history = appended(history, tl.load(at, mask=only_if(j < num_tokens, inside), other=0.0).to(tl.float32))
        taps = load_taps(weight, channel, CONV_DIM, D_CONV)
        offset = load_bias(bias, channel, CONV_DIM)
        for j in tl.static_range(WINDOW):
            out = weigh_and_activate(history[j : j + D_CONV], taps, offset, D_CONV)
            at = y + tl.cast(start + j, tl.int64) * CONV_DIM + channel
            tl.store(at, out, mask=only_if(j < num_tokens, inside))

        tl.debug_barrier()  # a write may land on what another thread of this program reads
        for j in tl.static_range(WINDOW):  # the window after j tokens
            window = history[j : j + WINDOW]
            _store_window(windows, tl.where(j == num_tokens, final, _PAD), window, channel, inside, WINDOW)
            if j > 0:
                chunk = _count_up_to(rows.cu_chunks + 1, num_chunks, start + j - 1)  # the one that token j - 1 is in
                is_chunk = (chunk < num_chunks) & (j <= num_tokens)
                end = tl.load(rows.cu_chunks + 1 + chunk, mask=is_chunk, other=-1)
                slot = tl.load(rows.chunk_slots + chunk, mask=is_chunk & (end == start + j), other=_PAD)
                _store_window(windows, slot, window, channel, inside, WINDOW)
        if (num_tokens >= WINDOW) & (final != _PAD):
            _store_inputs(inputs, windows, final, start + num_tokens, channel, inside, WINDOW)


@triton.jit
def _store_window(windows, slot, window, channel, inside, WINDOW: tl.constexpr):
    """Store a window of fp32 inputs into `slot`, unless it is PAD_SLOT."""
    stored = windows.pool + slot.to(tl.int64) * windows.slot_stride + channel
    for k in tl.static_range(WINDOW):
        tl.store(stored + k * windows.time_stride, window[k], mask=only_if(slot != _PAD, inside))


@triton.jit
def _end_chunk(inputs, windows, rows, chunk, channel, CONV_DIM: tl.constexpr, WINDOW: tl.constexpr):
    """Store the window at a chunk's end, if all of it are inputs of this step."""
    slot = tl.load(rows.chunk_slots + chunk)
    if slot != _PAD:
        start = tl.load(rows.cu_chunks + chunk)
        end = tl.load(rows.cu_chunks + chunk + 1)
        row_start = tl.load(rows.cu_rows + tl.load(rows.chunk_rows + chunk))
        if (end > start) & (end - row_start >= WINDOW):
            _store_inputs(inputs, windows, slot, end, channel, channel < CONV_DIM, WINDOW)


@triton.jit
def _convolve_tile(
    y,
    inputs,
    weight,
    bias,
    rows,
    num_rows,
    num_tokens,
    first_token,
    channel,
    CONV_DIM: tl.constexpr,
    D_CONV: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Compute a run of packed tokens that have D_CONV - 1 tokens of their row before them; clear those past them."""
    token = first_token + tl.arange(0, TOKENS)
    row = _count_up_to(rows.cu_rows + 1, num_rows, token)
    is_past = row == num_rows
    # Past the last row this is the end of the rows.
    in_row = token - tl.load(rows.cu_rows + row)
    is_mine = (in_row >= D_CONV - 1) & ~is_past
    token = token.to(tl.int64)[:, None]
    inside = (channel < CONV_DIM)[None, :]
    taps = load_taps(weight, channel, CONV_DIM, D_CONV)
    offset = load_bias(bias, channel, CONV_DIM)[None, :]

    history = ()
    rows_of_taps = ()
    for k in tl.static_range(D_CONV):
        at = inputs.x + (token - (D_CONV - 1 - k)) * inputs.token_stride + channel[None, :]
        x = tl.load(at, mask=is_mine[:, None] & (token < num_tokens) & inside, other=0.0)
        history = appended(history, x.to(tl.float32))
        rows_of_taps = appended(rows_of_taps, taps[k][None, :])
    out = weigh_and_activate(history, rows_of_taps, offset, D_CONV)
    out = tl.where(is_past[:, None], 0.0, out)
    tl.store(
        y + token * CONV_DIM + channel[None, :], out, mask=(is_mine | is_past)[:, None] & (token < num_tokens) & inside
    )


@triton.jit(do_not_specialize=["num_rows", "num_chunks", "num_tokens"])
def _causal_conv_kernel(
    y,
    inputs,
    weight,
    bias,
    windows,
    rows,
    num_rows,
    num_chunks,
    num_tokens,
    CONV_DIM: tl.constexpr,
    D_CONV: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    TILES: tl.constexpr = (CONV_DIM + CHANNELS - 1) // CHANNELS
    part = tl.program_id(0) // TILES
    channel = tl.program_id(0) % TILES * CHANNELS + tl.arange(0, CHANNELS)
    if part < num_rows:
        if D_CONV > 1:
            _begin_row(y, inputs, weight, bias, windows, rows, part, num_chunks, channel, CONV_DIM, D_CONV)
    elif part < num_rows + num_chunks:
        if D_CONV > 1:
            _end_chunk(inputs, windows, rows, part - num_rows, channel, CONV_DIM, D_CONV - 1)
    else:
        first_token = (part - num_rows - num_chunks) * TOKENS
        _convolve_tile(
            y,
            inputs,
            weight,
            bias,
            rows,
            num_rows,
            num_tokens,
            first_token,
            channel,
            CONV_DIM,
            D_CONV,
            TOKENS,
        )


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv_pool: Tensor, rows: VarlenRows, tiling: ConvTiling = TILING
) -> Tensor:
    """Convolve packed rows causally and apply SiLU, carrying each row's window from and to the pool.

    Writes in place the last d_conv - 1 raw inputs at each row's end into its final slot, and at each chunk's end
    into its chunk slot. A token's bits depend on its row alone, not on where the row was cut or what is around it.

    Args:
        x: [tokens, conv_dim]; any stride between tokens.
        weight: [conv_dim, d_conv]; the last column weighs the newest input.
        bias: [conv_dim].
        conv_pool: [slots, window, conv_dim], oldest input first, channels contiguous; its first d_conv - 1 window
            rows are used.

    Returns:
        [tokens, conv_dim] in x's dtype; zeros past the last row.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `causal_conv_ref`, which also computes float64. CUDA-graph safe: no host sync, one launch, grid fixed
    at capture.
    """
    check_conv(x, weight, bias, conv_pool, weight.shape[1] - 1)
    check_varlen_rows(rows, x.device)
    if not launches_kernel(x) or not is_computed_in_fp32(x, conv_pool):
        return causal_conv_ref(x, weight, bias, conv_pool, rows)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.shape[1] > 0:
        _launch(y, x, weight, bias, conv_pool, rows, tiling)
    return y


def _launch(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_pool: Tensor,
    rows: VarlenRows,
    tiling: ConvTiling,
) -> None:
    conv_dim, d_conv = weight.shape
    num_rows, num_chunks, num_tokens = rows.final_slots.shape[0], rows.chunk_slots.shape[0], x.shape[0]
    channels = min(tiling.channels, triton.next_power_of_2(conv_dim))
    num_parts = num_rows + num_chunks + triton.cdiv(num_tokens, tiling.tokens)
    if num_parts == 0:
        return
    _causal_conv_kernel[(num_parts * triton.cdiv(conv_dim, channels),)](
        y=y,
        inputs=ConvInputs(x, x.stride(0)),
        weight=weight,
        bias=bias,
        windows=ConvWindows(conv_pool, *conv_pool.stride()[:2]),
        rows=_Rows(*(getattr(rows, name) for name in _Rows._fields)),
        num_rows=num_rows,
        num_chunks=num_chunks,
        num_tokens=num_tokens,
        CONV_DIM=conv_dim,
        D_CONV=d_conv,
        TOKENS=tiling.tokens,
        CHANNELS=channels,
        num_warps=tiling.num_warps,
    )
