"""Torch references for the RMS norms; none of them synchronizes with the host."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import compute_dtype


def gated_group_norm_ref(
    y: Tensor, z: Tensor | None, weight: Tensor, group_size: int, eps: float, offset: float = 0.0
) -> Tensor:
    """Torch reference for `gated_group_norm`."""
    dtype = compute_dtype(y)
    gated = y.to(dtype) if z is None else y.to(dtype) * F.silu(z.to(dtype))
    gated = gated.unflatten(-1, (-1, group_size))  # [tokens, groups, group_size]
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return (normed.flatten(-2) * (weight.to(dtype) + offset)).to(y.dtype)


def add_and_norm_ref(
    output: Tensor, residual: Tensor, weight: Tensor, eps: float, multiplier: float = 1.0, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Torch reference for `add_and_norm`."""
    total = residual + (output if multiplier == 1.0 else output * multiplier)
    rows = total.flatten(0, -2)
    return total, gated_group_norm_ref(rows, None, weight, total.shape[-1], eps, offset).view(total.shape)


def norm_and_gate_ref(y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Torch reference for `norm_and_gate`."""
    dtype = compute_dtype(y)
    heads = y.to(dtype).unflatten(-1, (-1, weight.shape[0]))  # [tokens, heads, head_dim]
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)
    scaled = weight * normed.to(y.dtype)
    gate = z.to(dtype)
    gate = gate / (1 + torch.exp(-gate))  # on a CPU, torch's silu rounds the last few channels differently
    return (scaled.flatten(-2).to(dtype) * gate).to(y.dtype)
