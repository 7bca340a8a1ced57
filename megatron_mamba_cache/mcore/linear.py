"""Megatron's parallel linear layers without its function for gradients; one token's product is a kernel of ours."""

from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from typing_extensions import override

from ..kernels.kernel_launches import wants_gradient
from ..kernels.one_token import can_multiply_one_token, multiply_one_token


class OneTokenColumnLinear(ColumnParallelLinear):
    """Megatron's layer with outputs split over ranks."""

    @override
    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **settings: Any) -> Tensor:
        if args or not _is_plain(input, weight, settings):
            return super()._forward_impl(input, weight, *args, **settings)
        return product(input, weight)


class OneTokenRowLinear(RowParallelLinear):
    """Megatron's layer with inputs split over ranks; it sums over ranks after the product."""

    @override
    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **settings: Any) -> Tensor:
        if args or not _is_plain(input, weight, settings):
            return super()._forward_impl(input, weight, *args, **settings)
        return product(input, weight)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [..., inputs] @ weight [outputs, inputs].T; one token's by the kernel for it."""
    return multiply_one_token(x, weight) if can_multiply_one_token(x, weight) else F.linear(x, weight)


def _is_plain(x: Tensor, weight: Tensor, settings: dict[str, Any]) -> bool:
    """Return whether a product is all there is: no bias, no gradient, no token on another rank."""
    has_others = settings.get("bias") is not None or settings.get("sequence_parallel")
    return not has_others and not wants_gradient(x, weight)
