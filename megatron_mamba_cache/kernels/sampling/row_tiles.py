"""Rows of logits as sampling kernels read them: tiles of the vocabulary, as weights relative to the peak."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Logits and each row's settings; tensors of one device.

    Args:
        logits: [rows, vocab].
        temperature: [rows]; 0 takes the most probable token.
        top_k: [rows] integers; 0 is off, 1 takes the most probable token.
        top_p: [rows]; 0 or 1 is off.
    """

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor


TILE = 4096
"""Tokens of a tile. Sums are taken tile by tile, so the token of a row does not depend on other rows."""

LEAST_SHARE = 32.0
"""Tokens less than e ** -LEAST_SHARE as probable as the most probable one are never sampled."""

LARGEST: float = torch.finfo(torch.float32).max

_LARGEST = tl.constexpr(LARGEST)
_LEAST_SHARE = tl.constexpr(LEAST_SHARE)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_logits(logits, row, stride, token, vocab_size):
    """Load logits of a row as comparable fp32: NaN and tokens past the end are -inf, zeros have one sign."""
    index = logits + row.to(tl.int64) * stride + token
    found = tl.load(index, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    found = tl.where(found == found, found, float("-inf"))
    return tl.where(found == 0, 0.0, tl.minimum(found, _LARGEST))


@triton.jit
def row_peak(peaks, row, num_tiles, TILES: tl.constexpr):
    """Return the largest logit of a row from those of its tiles; always finite."""
    tile = tl.arange(0, TILES)
    found = tl.load(peaks + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    return tl.maximum(tl.max(found, axis=0), -_LARGEST)


@triton.jit
def least_logit(peak, temperature):
    """Return the lowest logit that may be sampled."""
    return tl.maximum(peak - _LEAST_SHARE * temperature, -_LARGEST)


@triton.jit
def weights_of(found, peak, temperature):
    """Return the probabilities of logits relative to that of the largest."""
    return tl.exp2((found - peak) * (_LOG2_E / tl.maximum(temperature, 1e-30)))


@triton.jit
def ordered_keys(found):
    """Return int32 keys in the order of fp32 logits."""
    bits = found.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of_key(key):
    """Invert `ordered_keys`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
