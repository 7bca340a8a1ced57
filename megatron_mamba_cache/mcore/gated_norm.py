"""The gated group RMS norm at the end of a Mamba2 mixer."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn


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
        """Normalize y [tokens, channels] gated by z; returns y's dtype."""
        gated = (y.float() * F.silu(z.float())).unflatten(-1, (-1, self.group_size))  # [tokens, groups, group_size]
        normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.weight.float()).to(y.dtype)

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
