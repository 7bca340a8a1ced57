"""The packed tokens and the weights that the recurrence of a Mamba2 layer reads.

    h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t        y_t = C_t h_t + D x_t

with A = -exp(A_log) and dt_t = clamp(softplus(dt_t + dt_bias), dt_limit).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NO_LIMIT = (0.0, math.inf)
"""Time-step limits that change nothing."""


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
    """Weights, one value a head.

    Args:
        A_log, D, dt_bias: [heads].
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
        # torch's softplus on a CPU rounds a tensor's last few elements differently from the others; log1p does not.
        biased = dt.to(dtype) + self.dt_bias.to(dtype)
        steps = biased.clamp_min(0) + torch.log1p(torch.exp(-biased.abs()))
        return steps if self.dt_limit == NO_LIMIT else steps.clamp(*self.dt_limit)
