"""What the convolution kernels share: a tile's weights, the weighted sum with SiLU, and the checks of arguments.

The sum fuses multiplication and addition by hand, oldest input first, so that a token's bits are the same in every
kernel and at every place in a tile.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...kernels.tuples import appended


class ConvWindows(NamedTuple):
    """A kernel's view of a conv pool [slots, window, conv_dim]; channels are contiguous."""

    pool: Tensor
    slot_stride: int
    time_stride: int


class ConvInputs(NamedTuple):
    """A kernel's view of the inputs [tokens, conv_dim]; channels are contiguous."""

    x: Tensor
    token_stride: int


@triton.jit
def load_taps(weight, channel, CONV_DIM: tl.constexpr, D_CONV: tl.constexpr):
    """Return the fp32 weights [conv_dim, d_conv] of `channel` [channels] as a tuple, oldest input's first."""
    tap = tl.arange(0, triton.next_power_of_2(D_CONV))[None, :]
    at = weight + channel[:, None] * D_CONV + tap
    loaded = tl.load(at, mask=(channel < CONV_DIM)[:, None] & (tap < D_CONV), other=0.0).to(tl.float32)
    taps = ()
    for k in tl.static_range(D_CONV):
        taps = appended(taps, tl.sum(tl.where(tap == k, loaded, 0.0), axis=1))
    return taps


@triton.jit
def load_bias(bias, channel, CONV_DIM: tl.constexpr):
    """Return the fp32 bias of `channel` [channels], zeros where there is none."""
    if bias is None:
        values = tl.zeros(channel.shape, tl.float32)
    else:
        values = tl.load(bias + channel, mask=channel < CONV_DIM, other=0.0).to(tl.float32)
    return values


@triton.jit
def weigh_and_activate(history, taps, bias, D_CONV: tl.constexpr):
    """Return SiLU(sum of history[k] * taps[k] + bias) of D_CONV fp32 inputs, oldest first."""
    total = history[0] * taps[0]
    for k in tl.static_range(1, D_CONV):
        total = tl.fma(history[k], taps[k], total)
    total += bias
    return total / (1.0 + tl.exp(-total))


def check_conv(x: Tensor, weight: Tensor, bias: Tensor | None, conv_pool: Tensor, window_len: int) -> None:
    """Raise a ValueError unless the tensors fit together and the pool's window holds `window_len` inputs."""
    if x.dim() != 2 or weight.dim() != 2 or conv_pool.dim() != 3 or weight.shape[1] < 1:
        raise ValueError(
            "need x [tokens, conv_dim], weight [conv_dim, d_conv] and conv_pool [slots, window, conv_dim], "
            f"found {tuple(x.shape)}, {tuple(weight.shape)} and {tuple(conv_pool.shape)}"
        )
    conv_dim = x.shape[1]
    if weight.shape[0] != conv_dim or conv_pool.shape[2] != conv_dim or conv_pool.shape[1] < window_len:
        raise ValueError(
            f"need weight and conv_pool of conv_dim {conv_dim} and a window of at least {window_len}, "
            f"found {tuple(weight.shape)} and {tuple(conv_pool.shape)}"
        )
    if bias is not None and (tuple(bias.shape) != (conv_dim,) or not bias.is_contiguous()):
        raise ValueError(f"need contiguous bias of shape ({conv_dim},), found {tuple(bias.shape)}")
    for name, tensor in (("weight", weight), ("bias", x if bias is None else bias), ("conv_pool", conv_pool)):
        if tensor.device != x.device:
            raise ValueError(f"need {name} on {x.device}, found {tensor.device}")
    if not weight.is_contiguous():
        raise ValueError(f"need contiguous weight, found strides {weight.stride()}")
    if not x[:1].is_contiguous() or not conv_pool[:1, :1].is_contiguous():
        raise ValueError(
            f"need contiguous channels in x and conv_pool, found strides {x.stride()} and {conv_pool.stride()}"
        )
