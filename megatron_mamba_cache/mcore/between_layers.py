"""The norm at the beginning of a layer."""

from typing import Any

from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn

from ..kernels.kernel_launches import launches_kernel
from ..kernels.norm.gated_norm import gated_group_norm


class LayerNorm:
    """Builds a norm whose weights have the model's dtype; Megatron's norm keeps float32 weights.

    RMS norms use our kernel: torch takes more than twice as long for the few tokens of a decode step. A class rather
    than a function, because Megatron builds modules of specs by calling classes and leaves functions as they are.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
        """Return a `torch.nn` norm, whose own arithmetic is float32."""
        norm = WrappedTorchNorm(config, hidden_size, eps)
        if isinstance(norm, nn.RMSNorm):
            norm = LayerRMSNorm(hidden_size, eps)
        return norm.to(config.params_dtype)


class LayerRMSNorm(nn.RMSNorm):
    """RMSNorm(x) of all channels; torch computes it where no kernel runs or x's channels are not contiguous."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., channels]."""
        if not launches_kernel(x) or x.dim() < 2 or x.stride(-1) != 1:
            return super().forward(x)
        return gated_group_norm(x.flatten(0, -2), None, self.weight, x.shape[-1], self.eps).view(x.shape)
