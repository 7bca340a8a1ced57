"""Megatron's feed-forward layers with our kernels for activations and for single-token GEMMs."""

from typing import Any

from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor, nn
from typing_extensions import override

from ..kernels.activations import Activation, gated_silu
from ..kernels.experts.quantized_experts import QuantizedSharedExpert
from ..kernels.experts.routed_experts import SharedExpert
from ..kernels.kernel_launches import wants_gradient
from .linear import OneTokenColumnLinear


class FeedForward(MLP):
    """Megatron's dense feed-forward layer with our kernels."""

    linear_fc1: OneTokenColumnLinear

    @override
    def forward(self, hidden_states: Tensor, per_token_scale: Any = None, **settings: Any) -> Any:
        """Run the layer on hidden_states [..., hidden]; see Megatron's class."""
        activation = self._activation(hidden_states) if per_token_scale is None else "none"
        if activation != "none" and self.linear_fc1.can_activate(hidden_states, activation):
            return self.linear_fc2(self.linear_fc1.activated(hidden_states, activation))
        if activation == "gated_silu":
            products, _ = self.linear_fc1(hidden_states)
            return self.linear_fc2(gated_silu(products))
        return super().forward(hidden_states, per_token_scale, **settings)  # Megatron's forward calls `squared_relu`

    def _activation(self, x: Tensor) -> Activation:
        """Return the activation for our kernels; "none" if Megatron must compute it, for instance with gradients."""
        first = self.linear_fc1
        if first.bias is not None or self.config.sequence_parallel or wants_gradient(x, first.weight):
            return "none"
        return fused_activation(self.config)


class DenseLayer(MLPLayer):
    """Feed-forward layer with norm and residual."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.mlp.__class__ = FeedForward  # set late: Megatron passes the process group only to its own class


class SharedFeedForward(SharedExpertMLP, FeedForward):
    """Shared expert, which processes every token.

    Attributes:
        gate_weight: [1, hidden]; the output is multiplied by sigmoid(token @ gate_weight.T). None for no gate.
    """

    gate_weight: Tensor | None

    def ungated(self, hidden_states: Tensor) -> Tensor:
        """Return this rank's output, [..., hidden], before the gate and before the sum over tensor-parallel ranks."""
        output: Tensor = FeedForward.forward(self, hidden_states)[0]
        return output

    def weights(self) -> SharedExpert | QuantizedSharedExpert | None:
        """Return the expert's weights if `ungated` consists only of GEMMs and an activation; None otherwise."""
        first, second = self.linear_fc1, self.linear_fc2
        is_plain = first.bias is None and second.bias is None
        if not is_plain or self.config.sequence_parallel or fused_activation(self.config) == "none":
            return None
        if first.form is None and second.form is None:
            return SharedExpert(first.weight, second.weight)
        matrices = first.exact_matrix, second.exact_matrix
        return None if matrices[0] is None or matrices[1] is None else QuantizedSharedExpert(matrices[0], matrices[1])


def fused_activation(config: Any) -> Activation:
    """Return the configured activation if kernels can fuse it with the first GEMM, otherwise "none"."""
    name, is_gated = getattr(config.activation_func, "__name__", ""), config.gated_linear_unit
    if name == "squared_relu" and not is_gated:
        return "squared_relu"
    is_plain = not config.glu_linear_offset and config.activation_func_clamp_value is None
    if config.activation_func is nn.functional.silu and is_gated and is_plain:
        return "gated_silu"
    return "none"
