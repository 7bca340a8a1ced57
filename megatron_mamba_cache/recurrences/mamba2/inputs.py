"""Inputs of a Mamba2 recurrence (packed tokens, weights and time steps), for kernels and references.

    h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t        y_t = C_t h_t + D x_t

with A = -exp(A_log) and dt_t = clamp(softplus(dt_t + dt_bias), dt_limit).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.kernel_language import softplus, softplus_ref

NO_LIMIT = (0.0, math.inf)
"""Limits that do not restrict the time steps."""


@dataclass(frozen=True, slots=True)
class SSMTokens:
    """Packed tokens; each tensor is contiguous within a token, but may have any stride between tokens.

    Args:
        x: [tokens, heads, head_dim].
        dt: [tokens, heads]; time steps before bias and softplus.
        B, C: [tokens, groups, d_state]; the heads of a group are consecutive.
    """

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor


@dataclass(frozen=True, slots=True)
class SSMWeights:
    """Weights of the recurrence, one value per head.

    Args:
        A_log, D, dt_bias: [heads].
        dt_limit: Minimum and maximum time step; applied after softplus.
    """

    A_log: Tensor
    D: Tensor
    dt_bias: Tensor
    dt_limit: tuple[float, float] = NO_LIMIT

    def decay(self, dtype: torch.dtype) -> Tensor:
        """Return A [heads], whose values are negative."""
        return -torch.exp(self.A_log.to(dtype))

    def time_steps(self, dt: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the time steps after bias, softplus and limits; `dt` is [..., heads]."""
        steps = softplus_ref(dt.to(dtype) + self.dt_bias.to(dtype))
        return steps if self.dt_limit == NO_LIMIT else steps.clamp(*self.dt_limit)


def check_tokens(tokens: SSMTokens, weights: SSMWeights) -> None:
    """Raise a `ValueError` unless the shapes of tokens and weights match, and all are on one device."""
    if tokens.x.dim() != 3 or tokens.B.dim() != 3:
        raise ValueError(
            "need x [tokens, heads, head_dim] and B [tokens, groups, d_state], "
            f"found x {tuple(tokens.x.shape)} and B {tuple(tokens.B.shape)}"
        )
    num_tokens, heads, head_dim = tokens.x.shape
    groups, d_state = tokens.B.shape[1:]
    if groups == 0 or heads % groups:
        raise ValueError(f"the number of groups must divide that of heads, found {groups} groups and {heads} heads")
    device, keys = tokens.x.device, (num_tokens, groups, d_state)
    _check_tensor("x", tokens.x, (num_tokens, heads, head_dim), (head_dim, 1), device)
    _check_tensor("dt", tokens.dt, (num_tokens, heads), (1,), device)
    _check_tensor("B", tokens.B, keys, (d_state, 1), device)
    _check_tensor("C", tokens.C, keys, (d_state, 1), device)
    _check_tensor("A_log", weights.A_log, (heads,), (1,), device)
    _check_tensor("D", weights.D, (heads,), (1,), device)
    _check_tensor("dt_bias", weights.dt_bias, (heads,), (1,), device)


def check_pool(tokens: SSMTokens, ssm_pool: Tensor) -> None:
    """Raise a `ValueError` unless the pool's states are contiguous and match the sizes of the tokens."""
    _, heads, head_dim = tokens.x.shape
    d_state = tokens.B.shape[2]
    state = (heads, d_state, head_dim)
    if ssm_pool.dim() != 4 or ssm_pool.shape[1:] != state or ssm_pool.device != tokens.x.device:
        raise ValueError(
            f"need ssm_pool [slots, heads, d_state, head_dim] with states {state} on {tokens.x.device}, "
            f"found {tuple(ssm_pool.shape)} on {ssm_pool.device}"
        )
    if ssm_pool.stride()[1:] != (d_state * head_dim, head_dim, 1) and not ssm_pool[:1].is_contiguous():
        raise ValueError(f"need ssm_pool with contiguous states, found strides {ssm_pool.stride()}")


def _check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], last_strides: tuple[int, ...], device: torch.device
) -> None:
    """Raise a `ValueError` unless a tensor has this shape and device and is contiguous within a token.

    Args:
        last_strides: Strides of a contiguous token, checked first; dimensions of size 0 or 1 may have others.
    """
    if tensor.shape != shape:
        raise ValueError(f"need {name} of shape {shape}, found {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"need {name} on {device}, found {tensor.device}")
    if tensor.stride()[-len(last_strides) :] != last_strides:
        of_token = tensor if tensor.dim() == 1 else tensor[:1]
        if not of_token.is_contiguous():
            raise ValueError(f"{name} must be contiguous within a token, found strides {tensor.stride()}")


class KernelTokens(NamedTuple):
    """`SSMTokens` as kernel arguments; strides are between tokens."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    x_stride: int
    dt_stride: int
    B_stride: int
    C_stride: int


class KernelWeights(NamedTuple):
    """`SSMWeights` as kernel arguments."""

    A_log: Tensor
    D: Tensor
    dt_bias: Tensor
    dt_min: float
    dt_max: float


def kernel_tokens(tokens: SSMTokens) -> KernelTokens:
    """Convert tokens to kernel arguments."""
    packed = (tokens.x, tokens.dt, tokens.B, tokens.C)
    return KernelTokens(*packed, *(tensor.stride(0) for tensor in packed))


def kernel_weights(weights: SSMWeights) -> KernelWeights:
    """Convert weights to kernel arguments."""
    return KernelWeights(weights.A_log, weights.D, weights.dt_bias, *weights.dt_limit)


@triton.jit
def time_step(dt, bias, minimum, maximum):
    """Return softplus(dt + bias), clamped to [minimum, maximum]; NaN stays NaN."""
    step = softplus(dt.to(tl.float32) + bias.to(tl.float32))
    step = tl.where(step < minimum, minimum, step)
    return tl.where(step > maximum, maximum, step)
