"""Inputs of the gated delta rule (packed tokens and gate weights), for kernels and references.

    S_t = exp(g_t) S_(t-1) + k_t (beta_t (v_t - k_t exp(g_t) S_(t-1)))        y_t = q_t S_t

with g_t = -exp(A_log) softplus(a_t + dt_bias), beta_t = sigmoid(b_t), k of length 1 and q of length 1 / sqrt(key_dim):
Gated Delta Networks (Yang et al. 2024, arXiv 2412.06464).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.kernel_language import softplus, softplus_ref
from ...kernels.reference import compute_dtype

EPS = 1e-6
"""Added to the squared length of a query or key before normalization."""


@dataclass(frozen=True, slots=True)
class DeltaTokens:
    """Packed tokens; each tensor is contiguous within a token, but may have any stride between tokens.

    Args:
        q, k: [tokens, key heads, key_dim], before normalization; consecutive value heads share a key head.
        v: [tokens, value heads, value_dim].
        b: [tokens, value heads]; beta before the sigmoid.
        a: [tokens, value heads]; decays before bias and softplus.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    a: Tensor


@dataclass(frozen=True, slots=True)
class GateWeights:
    """Weights of the gates, one value per head.

    Args:
        A_log, dt_bias: [value heads].
    """

    A_log: Tensor
    dt_bias: Tensor

    def log_decays(self, a: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the log decays g [..., value heads], which are at most 0."""
        return -torch.exp(self.A_log.to(dtype)) * softplus_ref(a.to(dtype) + self.dt_bias.to(dtype))


def write_strengths(b: Tensor) -> Tensor:
    """Return beta [..., value heads], rounded to the dtype of `b`, in the dtype in which references compute."""
    # Do not use torch.sigmoid: on a CPU, it rounds the last few elements of a tensor differently.
    return (1 / (1 + torch.exp(-b.to(compute_dtype(b))))).to(b.dtype).to(compute_dtype(b))


def check_tokens(tokens: DeltaTokens, gates: GateWeights) -> None:
    """Raise a `ValueError` unless the shapes of tokens and weights match, and all are on one device."""
    if tokens.q.dim() != 3 or tokens.v.dim() != 3:
        raise ValueError(
            "q must have shape [tokens, key heads, key_dim] and v [tokens, value heads, value_dim], "
            f"found q {tuple(tokens.q.shape)} and v {tuple(tokens.v.shape)}"
        )
    num_tokens, key_heads, key_dim = tokens.q.shape
    value_heads, value_dim = tokens.v.shape[1:]
    if key_heads == 0 or value_heads % key_heads:
        raise ValueError(
            f"the number of key heads must divide the number of value heads, found {key_heads} key heads and "
            f"{value_heads} value heads"
        )
    if not tokens.q.dtype == tokens.k.dtype == tokens.v.dtype:
        dtypes = f"q {tokens.q.dtype}, k {tokens.k.dtype}, v {tokens.v.dtype}"
        raise ValueError(f"q, k and v must have the same dtype, found {dtypes}")
    shapes = {
        "q": (tokens.q, (num_tokens, key_heads, key_dim)),
        "k": (tokens.k, (num_tokens, key_heads, key_dim)),
        "v": (tokens.v, (num_tokens, value_heads, value_dim)),
        "b": (tokens.b, (num_tokens, value_heads)),
        "a": (tokens.a, (num_tokens, value_heads)),
        "A_log": (gates.A_log, (value_heads,)),
        "dt_bias": (gates.dt_bias, (value_heads,)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor.shape != shape or tensor.device != tokens.q.device:
            raise ValueError(
                f"{name} must have shape {shape} on {tokens.q.device}, found {tuple(tensor.shape)} on {tensor.device}"
            )
        if not (tensor if tensor.dim() == 1 else tensor[:1]).is_contiguous():
            raise ValueError(f"{name} must be contiguous within a token, found strides {tensor.stride()}")


def check_pool(tokens: DeltaTokens, pool: Tensor) -> None:
    """Raise a `ValueError` unless the pool's states are contiguous and match the tokens' dimensions."""
    state = (tokens.v.shape[1], tokens.k.shape[2], tokens.v.shape[2])
    if pool.dim() != 4 or pool.shape[1:] != state or pool.device != tokens.q.device:
        raise ValueError(
            f"the pool must have shape [slots, value heads, key_dim, value_dim] with states {state} on "
            f"{tokens.q.device}, "
            f"found {tuple(pool.shape)} on {pool.device}"
        )
    if not pool[:1].is_contiguous():
        raise ValueError(f"states in the pool must be contiguous, found strides {pool.stride()}")


class KernelTokens(NamedTuple):
    """`DeltaTokens` as kernel arguments; strides are between tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    a: Tensor
    q_stride: int
    k_stride: int
    v_stride: int
    b_stride: int
    a_stride: int


class KernelGates(NamedTuple):
    """`GateWeights` as kernel arguments."""

    A_log: Tensor
    dt_bias: Tensor


def kernel_tokens(tokens: DeltaTokens) -> KernelTokens:
    """Convert tokens to kernel arguments."""
    packed = (tokens.q, tokens.k, tokens.v, tokens.b, tokens.a)
    return KernelTokens(*packed, *(tensor.stride(0) for tensor in packed))


@triton.jit
def log_decay(a, A_log, dt_bias):
    """Return the log decay g in fp32; the inputs may have any dtype."""
    return -tl.exp(A_log.to(tl.float32)) * softplus(a.to(tl.float32) + dt_bias.to(tl.float32))


@triton.jit
def write_strength(b):
    """Return beta = sigmoid(b), rounded to the dtype of `b`, in fp32."""
    return (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32)
