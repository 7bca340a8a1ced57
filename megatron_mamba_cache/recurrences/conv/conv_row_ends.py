"""The ends of packed rows and chunks in a causal convolution: the tokens and windows that tiles leave out.

Called from inside `causal_conv`'s kernel.
"""

import triton
import triton.language as tl

from ...kernels.masks import only_if
from ...kernels.tuples import appended
from ..prefill_rows import PAD_SLOT
from .conv_taps import load_bias, load_taps, weigh_and_activate

_PAD = tl.constexpr(PAD_SLOT)


@triton.jit
def begin_row(
    y, inputs, weight, bias, windows, ends, rows, row, num_chunks, channel,
    CONV_DIM: tl.constexpr, D_CONV: tl.constexpr,
):  # fmt: skip
    """Compute a row's first tokens and store its final window and those that hold part of the initial one.

    Args:
        ends: Where the windows at chunk ends go.
    """
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

        tl.debug_barrier()  # a write may overwrite what another thread of this program reads
        for j in tl.static_range(WINDOW):  # the window after j tokens
            window = history[j : j + WINDOW]
            _store_window(windows, tl.where(j == num_tokens, final, _PAD), window, channel, inside, WINDOW)
            if j > 0:
                chunk = count_up_to(rows.cu_chunks + 1, num_chunks, start + j - 1)  # the one that token j - 1 is in
                is_chunk = (chunk < num_chunks) & (j <= num_tokens)
                end = tl.load(rows.cu_chunks + 1 + chunk, mask=is_chunk, other=-1)
                slot = tl.load(rows.chunk_slots + chunk, mask=is_chunk & (end == start + j), other=_PAD)
                _store_window(ends, slot, window, channel, inside, WINDOW)
        if (num_tokens >= WINDOW) & (final != _PAD):
            _store_inputs(inputs, windows, final, start + num_tokens, channel, inside, WINDOW)


@triton.jit
def end_chunk(inputs, ends, rows, chunk, channel, CONV_DIM: tl.constexpr, WINDOW: tl.constexpr):
    """Store the window at a chunk's end, if it holds only inputs of this step."""
    slot = tl.load(rows.chunk_slots + chunk)
    if slot != _PAD:
        start = tl.load(rows.cu_chunks + chunk)
        end = tl.load(rows.cu_chunks + chunk + 1)
        row_start = tl.load(rows.cu_rows + tl.load(rows.chunk_rows + chunk))
        if (end > start) & (end - row_start >= WINDOW):
            _store_inputs(inputs, ends, slot, end, channel, channel < CONV_DIM, WINDOW)


@triton.jit
def count_up_to(ends, num_ends, token):
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
def _store_window(windows, slot, window, channel, inside, WINDOW: tl.constexpr):
    """Store a window of fp32 inputs into `slot`, unless it is PAD_SLOT."""
    stored = windows.pool + slot.to(tl.int64) * windows.slot_stride + channel
    for k in tl.static_range(WINDOW):
        tl.store(stored + k * windows.time_stride, window[k], mask=only_if(slot != _PAD, inside))


@triton.jit
def _store_inputs(inputs, windows, slot, end, channel, inside, WINDOW: tl.constexpr):
    """Store the last WINDOW inputs before packed token `end` into `slot`."""
    first = inputs.x + tl.cast(end - WINDOW, tl.int64) * inputs.token_stride + channel
    stored = windows.pool + slot.to(tl.int64) * windows.slot_stride + channel
    for k in tl.static_range(WINDOW):
        x = tl.load(first + k * inputs.token_stride, mask=inside, other=0.0)
        tl.store(stored + k * windows.time_stride, x.to(windows.pool.dtype.element_ty), mask=inside)
