"""Megatron's parallel linear layers, of which one token's product is a kernel of ours."""

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from typing_extensions import override

from ..kernels.activations import Activation
from ..kernels.kernel_launches import wants_gradient
from ..kernels.linear.one_token import can_multiply_one_token, multiply_one_token


class OneTokenColumnLinear(ColumnParallelLinear):
    """Megatron's layer with outputs split over ranks."""

    @override
    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **settings: Any) -> Tensor:
        if _is_plain(settings) and is_one_token(input, weight):
            return multiply_one_token(input, weight)
        return super()._forward_impl(input, weight, *args, **settings)


class OneTokenRowLinear(RowParallelLinear):
    """Megatron's layer with inputs split over ranks; it sums over ranks after the product."""

    @override
    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **settings: Any) -> Tensor:
        if _is_plain(settings) and is_one_token(input, weight):
            return multiply_one_token(input, weight)
        return super()._forward_impl(input, weight, *args, **settings)


def is_one_token(x: Tensor, weight: Tensor, activation: Activation = "none") -> bool:
    """Return whether the product is one token's without a gradient, which `multiply_one_token` then computes."""
    return not wants_gradient(x, weight) and can_multiply_one_token(x, weight, activation)


def _is_plain(settings: dict[str, Any]) -> bool:
    """Return whether there is no bias, and no token on another rank."""
    return settings.get("bias") is None and not settings.get("sequence_parallel")
