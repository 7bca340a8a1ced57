"""Keys and values as the KV cache stores them: in its dtype, or as FP8 (e4m3) codes with a scale per layer.

    code = round(min(max(x / scale, -448), 448));  x' = code * scale

The quotient is rounded to nearest even, to a multiple of 2**-9 below 2**-6. NaN becomes the code 0x7F. Kernels compute
codes with integer arithmetic, so every GPU, the interpreter and the reference write the same bits.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import compute_dtype

FP8 = torch.float8_e4m3fn
MOST_FP8 = 448.0
"""Largest value of an FP8 code."""
_MOST = tl.constexpr(MOST_FP8)


@dataclass(frozen=True, slots=True)
class KVScales:
    """Scales of one layer's FP8 keys and values; caches in other dtypes ignore them.

    Raises:
        ValueError: If a scale is not positive and finite.
    """

    key: float = 1.0
    value: float = 1.0

    def __post_init__(self) -> None:
        for name, scale in (("key", self.key), ("value", self.value)):
            if not 0 < scale < math.inf:
                raise ValueError(f"the {name} scale of an FP8 KV cache must be positive and finite, found {scale}")


UNSCALED = KVScales()


@triton.jit
def stored_values(values, scale, cache):
    """Convert values to what `cache`, a pointer from `addressed`, stores: its dtype, or FP8 codes if it is uint8."""
    IS_FP8: tl.constexpr = cache.dtype.element_ty == tl.uint8
    if IS_FP8:
        stored = _codes(tl.div_rn(values.to(tl.float32), tl.zeros(values.shape, tl.float32) + scale))
    else:
        stored = values.to(cache.dtype.element_ty)
    return stored


@triton.jit
def _codes(quotients):
    """Return fp32 quotients as FP8 codes, in uint8."""
    is_nan = quotients != quotients
    size = tl.minimum(tl.where(is_nan, 0.0, tl.abs(quotients)), _MOST)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # 120 << 3: the difference of the biases
    small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xFF  # 2**23: the sum is rounded to an integer
    code = tl.where(bits < 0x3C800000, small, normal)  # 2**-6
    sign = (quotients.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(is_nan, 0x7F, code | sign).to(tl.uint8)


def addressed(cache: Tensor) -> Tensor:
    """Return a cache as kernels address it: FP8 codes as uint8, other values unchanged."""
    return cache.view(torch.uint8) if cache.dtype is FP8 else cache


def stored_values_ref(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Torch reference for `stored_values`: return values in the dtype of a cache."""
    if dtype is not FP8:
        return values.to(dtype)
    wide = values.to(compute_dtype(values))
    quotients = wide / torch.full((), scale, dtype=wide.dtype, device=wide.device)  # a float would be inverted on a GPU
    return torch.where(quotients.isnan(), math.nan, quotients).clamp(-MOST_FP8, MOST_FP8).to(dtype)


def loaded_values(stored: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return stored keys or values in `dtype`; FP8 codes are multiplied by their scale."""
    return stored.to(dtype) * scale if stored.dtype is FP8 else stored.to(dtype)
