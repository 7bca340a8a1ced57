"""The tokens of one row in a tile of a causal convolution: all of the tile, or part of it.

Called from inside `causal_conv`'s kernel.
"""

import triton
import triton.language as tl

from ...kernels.masks import only_if
from ...kernels.tuples import appended
from .conv_taps import load_bias, load_taps, weigh_and_activate


@triton.jit
def convolve_run(
    y,
    inputs,
    weight,
    bias,
    first_token,
    channel,
    CONV_DIM: tl.constexpr,
    D_CONV: tl.constexpr,
    TOKENS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Compute tokens of one row, each with D_CONV - 1 before it: every input is read once, AT_ONCE tokens at a time."""
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
        history = history[AT_ONCE:]  # type: ignore[assignment]  # mypy sees only the empty tuple


@triton.jit
def convolve_part(
    y,
    inputs,
    weight,
    bias,
    low,
    high,
    num_tokens,
    first_token,
    channel,
    CONV_DIM: tl.constexpr,
    D_CONV: tl.constexpr,
    TOKENS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Compute a tile's tokens of a row, `low` to `high`, that have D_CONV - 1 before them; clear what follows it."""
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
