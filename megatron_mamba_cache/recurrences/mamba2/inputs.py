"""Inputs of the recurrence of a Mamba2 layer: packed tokens, weights and time steps, for kernels and twins.

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
"""No limits on time steps."""


@dataclass(frozen=True, slots=True)
class SSMTokens:
    """Packed tokens; each tensor may be a view with a stride of its own between tokens, contiguous within one.

    Args:
        x: [tokens, heads, head_dim].
        dt: [tokens, heads], as projected: before bias and softplus.
        B, C: [tokens, groups, d_state]; consecutive heads share a group's.
    """

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor


@dataclass(frozen=True, slots=True)
class SSMWeights:
    """Weights, one value for each head: A_log, D and dt_bias are [heads].

    Args:
        dt_limit: Range that time steps are clamped to, after softplus.
    """

    A_log: Tensor
    D: Tensor
    dt_bias: Tensor
    dt_limit: tuple[float, float] = NO_LIMIT

    def decay(self, dtype: torch.dtype) -> Tensor:
        """Return A [heads], negative."""
        return -torch.exp(self.A_log.to(dtype))

    def time_steps(self, dt: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the time steps of `dt` [..., heads]."""
        steps = softplus_ref(dt.to(dtype) + self.dt_bias.to(dtype))
        return steps if self.dt_limit == NO_LIMIT else steps.clamp(*self.dt_limit)


def check_tokens(tokens: SSMTokens, weights: SSMWeights) -> None:
    """Raise a ValueError unless tokens and weights fit together, on one device."""
    if tokens.x.dim() != 3 or tokens.B.dim() != 3:
        raise ValueError(
            "need x [tokens, heads, head_dim] and B [tokens, groups, d_state], "
            f"found {tuple(tokens.x.shape)} and {tuple(tokens.B.shape)}"
        )
    num_tokens, heads, head_dim = tokens.x.shape
    groups, d_state = tokens.B.shape[1:]
    if groups == 0 or heads % groups:
        raise ValueError(f"need heads that are a multiple of the groups, found {heads} heads and {groups} groups")
    device, keys = tokens.x.device, (num_tokens, groups, d_state)
    _check_tensor("x", tokens.x, (num_tokens, heads, head_dim), (head_dim, 1), device)
    _check_tensor("dt", tokens.dt, (num_tokens, heads), (1,), device)
    _check_tensor("B", tokens.B, keys, (d_state, 1), device)
    _check_tensor("C", tokens.C, keys, (d_state, 1), device)
    _check_tensor("A_log", weights.A_log, (heads,), (1,), device)
    _check_tensor("D", weights.D, (heads,), (1,), device)
    _check_tensor("dt_bias", weights.dt_bias, (heads,), (1,), device)


def check_pool(tokens: SSMTokens, ssm_pool: Tensor) -> None:
    """Raise a ValueError unless the pool holds states of the tokens' shape, each contiguous."""
    _, heads, head_dim = tokens.x.shape
    d_state = tokens.B.shape[2]
    state = (heads, d_state, head_dim)
    if ssm_pool.dim() != 4 or ssm_pool.shape[1:] != state or ssm_pool.device != tokens.x.device:
        raise ValueError(
            f"need ssm_pool [slots, heads, d_state, head_dim] with states {state} on {tokens.x.device}, "
            f"found {tuple(ssm_pool.shape)} on {ssm_pool.device}"
        )
    if ssm_pool.stride()[1:] != (d_state * head_dim, head_dim, 1) and not ssm_pool[:1].is_contiguous():
        raise ValueError(f"need contiguous states in ssm_pool, found strides {ssm_pool.stride()}")


def _check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], last_strides: tuple[int, ...], device: torch.device
) -> None:
    """Raise a ValueError unless a tensor has a shape and is contiguous within a token.

    Args:
        last_strides: Strides within a token of a contiguous tensor; others may do if sizes are 0 or 1.
    """
    if tensor.shape != shape:
        raise ValueError(f"need {name} of shape {shape}, found {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"need {name} on {device}, found {tensor.device}")
    if tensor.stride()[-len(last_strides) :] != last_strides:
        of_token = tensor if tensor.dim() == 1 else tensor[:1]
        if not of_token.is_contiguous():
            raise ValueError(f"need {name} contiguous within a token, found strides {tensor.stride()}")


class KernelTokens(NamedTuple):
    """The kernels' view of `SSMTokens`; strides are those between tokens."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    x_stride: int
    dt_stride: int
    B_stride: int
    C_stride: int


class KernelWeights(NamedTuple):
    """The kernels' view of `SSMWeights`."""

    A_log: Tensor
    D: Tensor
    dt_bias: Tensor
    dt_min: float
    dt_max: float


def kernel_tokens(tokens: SSMTokens) -> KernelTokens:
    """Return the kernels' view of the tokens."""
    packed = (tokens.x, tokens.dt, tokens.B, tokens.C)
    return KernelTokens(*packed, *(tensor.stride(0) for tensor in packed))


def kernel_weights(weights: SSMWeights) -> KernelWeights:
    """Return the kernels' view of the weights."""
    return KernelWeights(weights.A_log, weights.D, weights.dt_bias, *weights.dt_limit)


@triton.jit
def time_step(dt, bias, minimum, maximum):
    """Return softplus(dt + bias) clamped to the limits; NaN stays NaN."""
    step = softplus(dt.to(tl.float32) + bias.to(tl.float32))
    step = tl.where(step < minimum, minimum, step)
    return tl.where(step > maximum, maximum, step)
