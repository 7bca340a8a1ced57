"""Megatron's parallel linear layers, of which one token's product is a kernel of ours."""

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from typing_extensions import override

from ..kernels.linear.one_token import can_multiply_one_token, multiply_one_token


class OneTokenColumnLinear(ColumnParallelLinear):
    """Megatron's layer with outputs split over ranks."""

    @override
    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **settings: Any) -> Tensor:
        if _is_one_token(input, weight, settings):
            return multiply_one_token(input, weight)
        return super()._forward_impl(input, weight, *args, **settings)


class OneTokenRowLinear(RowParallelLinear):
    """Megatron's layer with inputs split over ranks; it sums over ranks after the product."""

    @override
    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **settings: Any) -> Tensor:
        if _is_one_token(input, weight, settings):
            return multiply_one_token(input, weight)
        return super()._forward_impl(input, weight, *args, **settings)


def _is_one_token(x: Tensor, weight: Tensor, settings: dict[str, Any]) -> bool:
    """Return whether the product is one token's, without a bias, a gradient, or tokens on other ranks."""
    needs_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if needs_gradient or settings.get("bias") is not None or settings.get("sequence_parallel"):
        return False
    return can_multiply_one_token(x, weight)
