"""Time steps of the Mamba2 recurrence inside kernels: bias, softplus and limits, in fp32."""

import triton
import triton.language as tl

from .log1p import log1p

_LOG2_E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts: a small whole number times the first is exact in fp32.
_LN2_HIGH = tl.constexpr(0.693145751953125)
_LN2_LOW = tl.constexpr(1.42860682030941723e-06)
_VANISHES = tl.constexpr(126.0)  # exp(-126) is 0 in fp32


@triton.jit
def time_step(dt, bias, minimum, maximum):
    """Return softplus(dt + bias) clamped to the limits; NaN stays NaN."""
    step = softplus(dt.to(tl.float32) + bias.to(tl.float32))
    step = tl.where(step < minimum, minimum, step)
    return tl.where(step > maximum, maximum, step)


@triton.jit
def softplus(v):
    """Return log(1 + exp(v)) of fp32 values to a relative error of 1e-6, however small it is."""
    return tl.where(v < 0, 0.0, v) + log1p(_exp_of_negative(-tl.abs(v)))


@triton.jit
def _exp_of_negative(v):
    """Return exp(v) for v <= 0; the hardware's exp2 alone loses digits as |v| grows."""
    v = tl.where(v < -_VANISHES, -_VANISHES, v)
    whole = tl.floor(v * _LOG2_E + 0.5)
    rest = v - whole * _LN2_HIGH - whole * _LN2_LOW
    return tl.exp2(whole) * tl.exp2(rest * _LOG2_E)
