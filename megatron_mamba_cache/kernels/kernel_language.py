"""Device functions that Triton's language lacks, and their torch references."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = tl.constexpr(1.4426950408889634)
# ln 2 as a sum of two numbers; the product of the first and a small integer is exact in fp32.
_LN2_HIGH = tl.constexpr(0.693145751953125)
_LN2_LOW = tl.constexpr(1.42860682030941723e-06)
_VANISHES = tl.constexpr(126.0)  # exp(-126) is 0 in fp32


def softplus_ref(values: Tensor) -> Tensor:
    """Return log(1 + exp(values)) in the floating-point dtype of `values`."""
    # On a CPU, torch's softplus rounds the last few elements of a tensor differently from the rest; log1p does not.
    return values.clamp_min(0) + torch.log1p(torch.exp(-values.abs()))


@triton.jit
def softplus(v):
    """Return log(1 + exp(v)) for fp32 values; the relative error is at most 1e-6, even for tiny results."""
    return tl.where(v < 0, 0.0, v) + _log1p(_exp_of_negative(-tl.abs(v)))


@triton.jit
def _exp_of_negative(v):
    """Return exp(v) for v <= 0; the hardware's exp2 alone loses accuracy as |v| grows."""
    v = tl.where(v < -_VANISHES, -_VANISHES, v)
    whole = tl.floor(v * _LOG2_E + 0.5)
    rest = v - whole * _LN2_HIGH - whole * _LN2_LOW
    return tl.exp2(whole) * tl.exp2(rest * _LOG2_E)


@triton.jit
def _log1p(x):
    """Return log(1 + x) for fp32 x in [0, 1], accurate to a few ULPs; Triton has no such function.

    Dividing by (1 + x) - 1 cancels the rounding error of 1 + x (Kahan; HP-15C Advanced Functions Handbook, 1982).
    """
    sum_ = 1.0 + x
    is_one = sum_ == 1.0
    return tl.where(is_one, x, x * tl.log(sum_) / tl.where(is_one, 1.0, sum_ - 1.0))


@triton.jit
def only_if(flag, mask):
    """Return `mask` if the scalar `flag` is True, and an all-False mask otherwise.

    `mask & flag` compiles to the same code, but Triton 3.9's interpreter converts it to integers.
    """
    return tl.where(flag, mask, False)


@triton.jit
def appended(values, value):
    """Return the tuple `values` with `value` appended."""
    return values + (value,)  # noqa: RUF005 (kernels cannot unpack into a tuple)
