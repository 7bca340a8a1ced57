"""Functions for kernels that Triton's language lacks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts: a small whole number times the first is exact in fp32.
_LN2_HIGH = tl.constexpr(0.693145751953125)
_LN2_LOW = tl.constexpr(1.42860682030941723e-06)
_VANISHES = tl.constexpr(126.0)  # exp(-126) is 0 in fp32


def softplus_ref(values: Tensor) -> Tensor:
    """Return log(1 + exp(values)), of any float dtype."""
    # torch's softplus on a CPU rounds a tensor's last few elements differently from the others; log1p does not.
    return values.clamp_min(0) + torch.log1p(torch.exp(-values.abs()))


@triton.jit
def softplus(v):
    """Return log(1 + exp(v)) of fp32 values to a relative error of 1e-6, however small it is."""
    return tl.where(v < 0, 0.0, v) + _log1p(_exp_of_negative(-tl.abs(v)))


@triton.jit
def _exp_of_negative(v):
    """Return exp(v) for v <= 0; the hardware's exp2 alone loses digits as |v| grows."""
    v = tl.where(v < -_VANISHES, -_VANISHES, v)
    whole = tl.floor(v * _LOG2_E + 0.5)
    rest = v - whole * _LN2_HIGH - whole * _LN2_LOW
    return tl.exp2(whole) * tl.exp2(rest * _LOG2_E)


@triton.jit
def _log1p(x):
    """Return log(1 + x) for x in [0, 1], float32, to a few ULPs; Triton has no such function.

    The rounding of 1 + x is undone by the quotient (Kahan; HP-15C Advanced Functions Handbook, 1982, appendix).
    """
    sum_ = 1.0 + x
    is_one = sum_ == 1.0
    return tl.where(is_one, x, x * tl.log(sum_) / tl.where(is_one, 1.0, sum_ - 1.0))


@triton.jit
def only_if(flag, mask):
    """Return `mask` if the scalar `flag` holds, all False otherwise.

    `mask & flag` compiles to the same, but Triton 3.9's interpreter turns it into integers.
    """
    return tl.where(flag, mask, False)


@triton.jit
def appended(values, value):
    """Return the tuple `values` with `value` at its end."""
    return values + (value,)  # noqa: RUF005 (kernels cannot unpack into a tuple)
