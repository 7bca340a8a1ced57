"""Load tiles of logits in sampling kernels, and convert them to weights relative to the row's largest logit."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Rows of logits and their sampling settings; all tensors are on the same device.

    Args:
        logits: [rows, vocab].
        temperature: [rows]; 0: greedy.
        top_k: [rows] integers; 0: no limit, 1: greedy.
        top_p: [rows]; 0 or 1: no limit.
    """

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor


TILE = 4096
"""Number of tokens per tile. Sums are taken tile by tile, so sampling from a row does not depend on other rows."""

LEAST_SHARE = 32.0
"""A token is never sampled if its probability is less than e ** -LEAST_SHARE times the largest."""

LARGEST: float = torch.finfo(torch.float32).max

_LARGEST = tl.constexpr(LARGEST)
_LEAST_SHARE = tl.constexpr(LEAST_SHARE)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_logits(logits, row, stride, token, vocab_size):
    """Load logits as ordered fp32 values: NaN and tokens after the vocabulary become -inf, -0 becomes 0."""
    index = logits + row.to(tl.int64) * stride + token
    found = tl.load(index, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    found = tl.where(found == found, found, float("-inf"))
    return tl.where(found == 0, 0.0, tl.minimum(found, _LARGEST))


@triton.jit
def row_peak(peaks, row, num_tiles, TILES: tl.constexpr):
    """Return the largest logit of a row, computed from its tiles' largest logits; always finite."""
    tile = tl.arange(0, TILES)
    found = tl.load(peaks + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    return tl.maximum(tl.max(found, axis=0), -_LARGEST)


@triton.jit
def least_logit(peak, temperature):
    """Return the lowest logit whose token may be sampled."""
    return tl.maximum(peak - _LEAST_SHARE * temperature, -_LARGEST)


@triton.jit
def weights_of(found, peak, temperature):
    """Return the probability of each logit relative to that of the largest logit."""
    return tl.exp2((found - peak) * (_LOG2_E / tl.maximum(temperature, 1e-30)))


@triton.jit
def ordered_keys(found):
    """Map fp32 logits to int32 keys of the same order."""
    bits = found.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of_key(key):
    """Return the fp32 logit of a key; the inverse of `ordered_keys`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
