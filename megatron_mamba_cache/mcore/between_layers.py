"""Fused residual add and RMS norm between two layers."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar

from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn

from ..kernels.kernel_launches import is_computed_in_fp32, launches_kernel, wants_gradient
from ..kernels.norm.gated_norm import gated_group_norm
from ..kernels.norm.reference_norm import gated_group_norm_ref
from ..kernels.norm.residual_norm import add_and_norm

Part = TypeVar("Part")


class LayerNorm:
    """Factory for norms whose weights have the model's dtype; the weights of Megatron's norm are float32.

    RMS norms use our kernel, because torch takes more than twice as long for the few tokens in a decode step. The
    factory is a class, not a function, because Megatron builds modules by calling the classes in a spec.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
        """Return the norm that the configuration selects; it computes in float32."""
        is_zero_centered = config.layernorm_zero_centered_gamma and config.normalization == "RMSNorm"
        if is_zero_centered:  # Megatron's norm rejects this setting
            config = copy(config)
            config.layernorm_zero_centered_gamma = False
        norm = WrappedTorchNorm(config, hidden_size, eps)
        if isinstance(norm, nn.RMSNorm):
            norm = LayerRMSNorm(hidden_size, eps, offset=float(is_zero_centered))
        return norm.to(config.params_dtype)


class LayerRMSNorm(nn.RMSNorm):
    """RMSNorm over all channels; torch computes it if no kernel can run or x's channels are not contiguous.

    Args:
        offset: Value added to the weights in fp32; 1 for a zero-centered norm.
    """

    eps: float

    def __init__(self, hidden_size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__(hidden_size, eps)
        self.offset = offset
        nn.init.constant_(self.weight, 1.0 - offset)
        self._ahead: tuple[Tensor, Tensor] | None = None

    def note_normed(self, x: Tensor, normed: Tensor) -> None:
        """Store the norm of x, which was computed in the same kernel as x; the next `forward(x)` returns it."""
        self._ahead = x, normed

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., channels]."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is x:
            return ahead[1]
        if not launches_kernel(x) or x.dim() < 2 or x.stride(-1) != 1:
            if not self.offset:
                return super().forward(x)
            return gated_group_norm_ref(x, None, self.weight, x.shape[-1], self.eps, self.offset)
        rows = x.flatten(0, -2)
        return gated_group_norm(rows, None, self.weight, x.shape[-1], self.eps, self.offset).view(x.shape)


class ResidualAdd:
    """Replacement for Megatron's bias-dropout-add: residual + multiplier * output, without dropout.

    Attributes:
        next_norm: Norm at the start of the next layer on this rank, fused into the addition; None if there is none.
    """

    def __init__(self, multiplier: float = 1.0) -> None:
        self.next_norm: LayerRMSNorm | None = None
        self._multiplier = multiplier

    def __call__(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the function with which Megatron adds the residual; raise `NotImplementedError` in training."""
        if training:
            raise NotImplementedError("a model with the local spec supports only inference; call model.eval()")
        return self._add

    def _add(self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_with_bias
        output = output if bias is None else output + bias
        norm = self.next_norm
        if norm is not None and _has_kernel(output, residual, norm.weight):
            total, normed = add_and_norm(output, residual, norm.weight, norm.eps, self._multiplier, norm.offset)
            norm.note_normed(total, normed)
            return total
        return residual + (output if self._multiplier == 1.0 else output * self._multiplier)


def link_layers(layers: Sequence[nn.Module], final_norm: nn.Module | None) -> None:
    """Set `next_norm` of the residual addition at the end of each layer to the norm that reads its result."""
    beginnings = [_part(layer, LayerRMSNorm, "norm", "input_layernorm", "pre_mlp_layernorm") for layer in layers[1:]]
    for layer, norm in zip(layers, [*beginnings, final_norm], strict=True):
        add = _part(layer, ResidualAdd, "mamba_bda", "self_attn_bda", "mlp_bda")
        if add is not None and isinstance(norm, LayerRMSNorm):
            add.next_norm = norm


def _part(layer: nn.Module, kind: type[Part], *names: str) -> Part | None:
    """Return the layer's submodule of class `kind` among `names`; None if there is none or more than one."""
    found = [part for name in names if isinstance(part := getattr(layer, name, None), kind)]
    return found[0] if len(found) == 1 else None


def _has_kernel(output: Tensor, residual: Tensor, weight: Tensor) -> bool:
    tensors = output, residual, weight
    return (
        launches_kernel(residual)
        and output.dtype == residual.dtype == weight.dtype
        and is_computed_in_fp32(residual)
        and all(tensor.is_contiguous() for tensor in tensors)
        and not wants_gradient(*tensors)
    )
