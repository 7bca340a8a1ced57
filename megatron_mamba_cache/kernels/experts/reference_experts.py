"""References of the experts' products and of their weighted sum; torch only.

`grouped_product_ref` reads the starts on the host: it is for CPUs, where nothing waits, and for tests.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..slots.reference_slots import compute_dtype
from .reference_routing import ExpertOrder


def grouped_product_ref(
    x: Tensor, weight: Tensor, order: ExpertOrder, *, top_k: int | None = None, activation: str = "none"
) -> Tensor:
    """Return the activated products of rows with their experts' weights; see `grouped_product`."""
    dtype = compute_dtype(x)
    rows = x if top_k is None else x[order.pairs.long() // top_k]
    bounds = order.starts.tolist()
    parts = [
        F.linear(rows[begin:end].to(dtype), weight[expert].to(dtype))
        for expert, (begin, end) in enumerate(pairwise(bounds))
        if end > begin
    ]
    products = torch.cat(parts) if parts else rows.new_zeros(0, weight.shape[1], dtype=dtype)
    if activation == "squared_relu":
        products = products.relu().square()
    elif activation == "gated_silu":
        gates, others = products.chunk(2, dim=-1)
        products = F.silu(gates) * others
    return products.to(x.dtype)


def weighted_sum_ref(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Return for each token the weighted sum of its experts' rows, in the order of its slots; see `weighted_sum`."""
    dtype = compute_dtype(rows)
    total = torch.zeros(places.shape[0], rows.shape[1], dtype=dtype, device=rows.device)
    for slot in range(places.shape[1]):
        total = total + weights[:, slot, None].to(dtype) * rows[places[:, slot].long()].to(dtype)
    return total.to(rows.dtype)
