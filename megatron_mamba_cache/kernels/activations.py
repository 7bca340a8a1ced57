"""The activations that kernels apply to the first product of a feed-forward layer, before it is rounded."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

Activation = Literal["none", "squared_relu", "gated_silu"]
"""`gated_silu` takes twice the outputs: the gates, then what they gate."""


def activated_ref(products: Tensor, activation: Activation) -> Tensor:
    """Return the activated products [..., outputs]."""
    if activation == "squared_relu":
        return products.relu().square()
    if activation == "gated_silu":
        gates, others = products.chunk(2, dim=-1)
        return F.silu(gates) * others
    return products
