"""The gated RMS norms at the end of mixers."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from ..kernels.norm.gated_norm import gated_group_norm
from ..kernels.norm.norm_and_gate import norm_and_gate


class GatedGroupRMSNorm(nn.Module):
    """RMSNorm(y * silu(z)) over groups of channels, in float32.

    Holds the same parameter as mamba-ssm's gated norm, so checkpoints load either way.

    Args:
        num_channels: Channels of this rank.
        group_size: Channels that are normalized together.
    """

    def __init__(
        self, num_channels: int, group_size: int, eps: float, dtype: torch.dtype, device: torch.device | int
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_channels, dtype=dtype, device=device))
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.group_size = group_size
        self.eps = eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Normalize y [..., channels] gated by z; returns y's dtype."""
        rows, gates = y.flatten(0, -2), z.flatten(0, -2)
        return gated_group_norm(rows, gates, self.weight, self.group_size, self.eps).view(y.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the weight as a sharded tensor, split over tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class GatedHeadRMSNorm(nn.Module):
    """RMSNorm(y) * silu(z) by head, with one weight vector for all heads, on every rank.

    Args:
        head_dim: Channels that are normalized together.
    """

    def __init__(self, head_dim: int, eps: float, dtype: torch.dtype, device: torch.device | int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Normalize y [tokens, heads * head_dim], then gate it by z; returns y's dtype."""
        return norm_and_gate(y, z, self.weight, self.eps)
