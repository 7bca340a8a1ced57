"""Device functions and argument checks shared by the convolution kernels.

The sum uses explicit fused multiply-adds, oldest input first, so a token's result is bit-identical in all kernels and
at all positions in a tile.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...kernels.kernel_language import appended, only_if
from ..batches import PAD_SLOT

_PAD = tl.constexpr(PAD_SLOT)


class ConvWindows(NamedTuple):
    """A conv pool [slots, window, conv_dim] with contiguous channels, as kernel arguments."""

    pool: Tensor
    slot_stride: int
    time_stride: int


class ConvInputs(NamedTuple):
    """Inputs [tokens, conv_dim] with contiguous channels, as kernel arguments."""

    x: Tensor
    token_stride: int


@triton.jit
def load_taps(weight, channel, CONV_DIM: tl.constexpr, D_CONV: tl.constexpr):
    """Load the weights of the channels as a tuple of D_CONV fp32 tensors [channels], oldest input first."""
    tap = tl.arange(0, triton.next_power_of_2(D_CONV))[None, :]
    at = weight + channel[:, None] * D_CONV + tap
    loaded = tl.load(at, mask=(channel < CONV_DIM)[:, None] & (tap < D_CONV), other=0.0).to(tl.float32)
    taps = ()
    for k in tl.static_range(D_CONV):
        taps = appended(taps, tl.sum(tl.where(tap == k, loaded, 0.0), axis=1))
    return taps


@triton.jit
def load_bias(bias, channel, CONV_DIM: tl.constexpr):
    """Load the fp32 bias of the channels; zeros if `bias` is None."""
    if bias is None:
        values = tl.zeros(channel.shape, tl.float32)
    else:
        values = tl.load(bias + channel, mask=channel < CONV_DIM, other=0.0).to(tl.float32)
    return values


@triton.jit
def weigh_and_activate(history, taps, bias, D_CONV: tl.constexpr):
    """Return SiLU(sum of history[k] * taps[k] + bias) for D_CONV fp32 inputs, oldest first."""
    total = history[0] * taps[0]
    for k in tl.static_range(1, D_CONV):
        total = tl.fma(history[k], taps[k], total)
    total += bias
    return total / (1.0 + tl.exp(-total))


@triton.jit
def count_up_to(ends, num_ends, token):
    """Return the number of ascending `ends` [num_ends] that are <= `token`, which is a scalar or a tensor."""
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
def begin_row(
    y, inputs, weight, bias, windows, ends, rows, row, num_chunks, channel,
    CONV_DIM: tl.constexpr, D_CONV: tl.constexpr,
):  # fmt: skip
    """Convolve a request's first D_CONV - 1 tokens; store its final window, and windows that include earlier inputs."""
    WINDOW: tl.constexpr = D_CONV - 1
    inside = channel < CONV_DIM
    start = tl.load(rows.cu_seqlens + row)
    num_tokens = tl.load(rows.cu_seqlens + row + 1) - start
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

        tl.debug_barrier()  # all threads must read before any writes, as the final slot may be the initial one
        for j in tl.static_range(WINDOW):  # store the window after j tokens
            window = history[j : j + WINDOW]
            _store_window(windows, tl.where(j == num_tokens, final, _PAD), window, channel, inside, WINDOW)
            if j > 0:
                chunk = count_up_to(rows.cu_chunks + 1, num_chunks, start + j - 1)  # chunk that holds token j - 1
                is_chunk = (chunk < num_chunks) & (j <= num_tokens)
                end = tl.load(rows.cu_chunks + 1 + chunk, mask=is_chunk, other=-1)
                slot = tl.load(rows.chunk_slots + chunk, mask=is_chunk & (end == start + j), other=_PAD)
                _store_window(ends, slot, window, channel, inside, WINDOW)
        if (num_tokens >= WINDOW) & (final != _PAD):
            _store_inputs(inputs, windows, final, start + num_tokens, channel, inside, WINDOW)


@triton.jit
def end_chunk(inputs, ends, rows, chunk, channel, CONV_DIM: tl.constexpr, WINDOW: tl.constexpr):
    """Store the window at the end of a chunk, if it contains only inputs of this step."""
    slot = tl.load(rows.chunk_slots + chunk)
    if slot != _PAD:
        start = tl.load(rows.cu_chunks + chunk)
        end = tl.load(rows.cu_chunks + chunk + 1)
        row_start = tl.load(rows.cu_seqlens + tl.load(rows.chunk_requests + chunk))
        if (end > start) & (end - row_start >= WINDOW):
            _store_inputs(inputs, ends, slot, end, channel, channel < CONV_DIM, WINDOW)


@triton.jit
def _store_window(windows, slot, window, channel, inside, WINDOW: tl.constexpr):
    """Store a window of fp32 inputs in `slot`, unless `slot` is PAD_SLOT."""
    stored = windows.pool + slot.to(tl.int64) * windows.slot_stride + channel
    for k in tl.static_range(WINDOW):
        tl.store(stored + k * windows.time_stride, window[k], mask=only_if(slot != _PAD, inside))


@triton.jit
def _store_inputs(inputs, windows, slot, end, channel, inside, WINDOW: tl.constexpr):
    """Store the last WINDOW inputs before packed token `end` in `slot`."""
    first = inputs.x + tl.cast(end - WINDOW, tl.int64) * inputs.token_stride + channel
    stored = windows.pool + slot.to(tl.int64) * windows.slot_stride + channel
    for k in tl.static_range(WINDOW):
        x = tl.load(first + k * inputs.token_stride, mask=inside, other=0.0)
        tl.store(stored + k * windows.time_stride, x.to(windows.pool.dtype.element_ty), mask=inside)


@triton.jit
def convolve_run(
    y, inputs, weight, bias, first_token, channel,
    CONV_DIM: tl.constexpr, D_CONV: tl.constexpr, TOKENS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Convolve a tile whose tokens all belong to one request and follow its first D_CONV - 1 tokens."""
    inside = channel < CONV_DIM
    taps = load_taps(weight, channel, CONV_DIM, D_CONV)
    offset = load_bias(bias, channel, CONV_DIM)
    first = tl.cast(first_token, tl.int64)
    x = inputs.x + first * inputs.token_stride + channel
    y += first * CONV_DIM + channel
    history = ()
    for k in tl.static_range(1, D_CONV):
        history = appended(history, tl.load(x - (D_CONV - k) * inputs.token_stride, mask=inside, other=0.0))
    for begin in tl.static_range(0, TOKENS, AT_ONCE):
        for j in tl.static_range(AT_ONCE):
            history = appended(history, tl.load(x + (begin + j) * inputs.token_stride, mask=inside, other=0.0))
        for j in tl.static_range(AT_ONCE):
            window = ()
            for k in tl.static_range(D_CONV):
                window = appended(window, history[j + k].to(tl.float32))
            out = weigh_and_activate(window, taps, offset, D_CONV)
            tl.store(y + (begin + j) * CONV_DIM, out, mask=inside)
        history = history[AT_ONCE:]  # type: ignore[assignment]  # mypy infers the type of the empty tuple


@triton.jit
def convolve_part(
    y, inputs, weight, bias, low, high, num_tokens, first_token, channel,
    CONV_DIM: tl.constexpr, D_CONV: tl.constexpr, TOKENS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Convolve a tile's tokens of the request [low, high), except its first D_CONV - 1; zero the tokens after it."""
    inside = channel < CONV_DIM
    taps = load_taps(weight, channel, CONV_DIM, D_CONV)
    offset = load_bias(bias, channel, CONV_DIM)
    for begin in range(first_token, first_token + TOKENS, AT_ONCE):
        first = tl.cast(begin, tl.int64)
        x = inputs.x + first * inputs.token_stride + channel
        history = ()
        for j in tl.static_range(1 - D_CONV, AT_ONCE):
            is_row = (begin + j >= low) & (begin + j < high)
            history = appended(history, tl.load(x + j * inputs.token_stride, mask=only_if(is_row, inside), other=0.0))
        for j in tl.static_range(AT_ONCE):
            window = ()
            for k in tl.static_range(D_CONV):
                window = appended(window, history[j + k].to(tl.float32))
            token = begin + j
            out = tl.where(token < high, weigh_and_activate(window, taps, offset, D_CONV), 0.0)
            is_mine = (token >= tl.minimum(low + D_CONV - 1, high)) & (token < num_tokens)
            tl.store(y + (first + j) * CONV_DIM + channel, out, mask=only_if(is_mine, inside))


def check_conv(x: Tensor, weight: Tensor, bias: Tensor | None, conv_pool: Tensor, window_len: int) -> None:
    """Raise a `ValueError` unless the tensors match and the windows in the pool hold at least `window_len` inputs."""
    if x.dim() != 2 or weight.dim() != 2 or conv_pool.dim() != 3 or weight.shape[1] < 1:
        raise ValueError(
            "x must have shape [tokens, conv_dim], weight [conv_dim, d_conv] and conv_pool [slots, window, conv_dim], "
            f"found x {tuple(x.shape)}, weight {tuple(weight.shape)} and conv_pool {tuple(conv_pool.shape)}"
        )
    conv_dim = x.shape[1]
    if weight.shape[0] != conv_dim or conv_pool.shape[2] != conv_dim or conv_pool.shape[1] < window_len:
        raise ValueError(
            f"weight and conv_pool must have {conv_dim} channels, and windows at least {window_len} inputs, "
            f"found weight {tuple(weight.shape)} and conv_pool {tuple(conv_pool.shape)}"
        )
    if bias is not None and (tuple(bias.shape) != (conv_dim,) or not bias.is_contiguous()):
        raise ValueError(
            f"bias must be contiguous with shape ({conv_dim},), found {tuple(bias.shape)} with strides {bias.stride()}"
        )
    for name, tensor in (("weight", weight), ("bias", x if bias is None else bias), ("conv_pool", conv_pool)):
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on {x.device}, found {tensor.device}")
    if not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous, found strides {weight.stride()}")
    if not x[:1].is_contiguous() or not conv_pool[:1, :1].is_contiguous():
        raise ValueError(
            f"channels of x and conv_pool must be contiguous, found strides {x.stride()} and {conv_pool.stride()}"
        )
