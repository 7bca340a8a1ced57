"""References of the experts' products and of their weighted sum; torch only.

`grouped_gemm_ref` reads the starts on the host: it is for CPUs, where nothing waits, and for tests.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import Activation, activated_ref
from ..reference import compute_dtype
from .reference_routing import ExpertOrder, order_by_expert_ref


def grouped_gemm_ref(
    x: Tensor, weight: Tensor, order: ExpertOrder, *, top_k: int | None = None, activation: Activation = "none"
) -> Tensor:
    """Return the activated products of rows with their experts' weights; see `grouped_gemm`."""
    dtype = compute_dtype(x)
    bounds = order.starts.tolist()
    rows = x if top_k is None else x[order.pairs[: bounds[-1]].long() // top_k]
    parts = [
        F.linear(rows[begin:end].to(dtype), weight[expert].to(dtype))
        for expert, (begin, end) in enumerate(pairwise(bounds))
        if end > begin
    ]
    elsewhere = rows.new_zeros(len(order.pairs) - bounds[-1], weight.shape[1], dtype=dtype)
    products = torch.cat([*parts, elsewhere])
    return activated_ref(products, activation).to(x.dtype)


def pair_gemm_ref(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    shared_weight: Tensor | None = None,
    *,
    activation: Activation = "none",
    first_expert: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the activated products of tokens with each of their experts' weights; see `pair_gemm`."""
    dtype = compute_dtype(x)
    order = order_by_expert_ref(ids, len(weight), first_expert)
    products = grouped_gemm_ref(x, weight, order, top_k=ids.shape[1], activation=activation)
    out = torch.zeros_like(products)
    num_here = int(order.starts[-1])
    out[order.pairs[:num_here].long()] = products[:num_here]
    if shared_weight is None:
        return out, x.new_empty(len(x), 0)
    return out, activated_ref(F.linear(x.to(dtype), shared_weight.to(dtype)), activation).to(x.dtype)


def summed_gemm_ref(
    rows: Tensor,
    weight: Tensor,
    ids: Tensor,
    shares: Tensor,
    addend: Tensor | None = None,
    *,
    shared_rows: Tensor | None = None,
    shared_weight: Tensor | None = None,
    first_expert: int = 0,
) -> Tensor:
    """Return the weighted sums of rows' products with their experts' weights; see `summed_gemm`."""
    dtype = compute_dtype(rows)
    order = order_by_expert_ref(ids, len(weight), first_expert)
    products = grouped_gemm_ref(rows.to(dtype), weight.to(dtype), order, top_k=1)
    top_k = ids.shape[1]
    total = weighted_sum_ref(products, order.places, shares[:, :top_k])
    if shared_rows is not None and shared_weight is not None:
        shared = F.linear(shared_rows.to(dtype), shared_weight.to(dtype))
        total = total + (shared if shares.shape[1] == top_k else shared * shares[:, top_k:].to(dtype))
        shares = shares[:, :top_k]  # the addend has no weight
    if addend is not None:
        total = total + _weighted_addend(addend, shares, top_k)
    return total.to(rows.dtype)


def weighted_sum_ref(rows: Tensor, places: Tensor, weights: Tensor, addend: Tensor | None = None) -> Tensor:
    """Return for each token the weighted sum of its experts' rows, in the order of its slots; see `weighted_sum`."""
    dtype = compute_dtype(rows)
    total = torch.zeros(places.shape[0], rows.shape[1], dtype=dtype, device=rows.device)
    for slot in range(places.shape[1]):
        place = places[:, slot].long()
        products = weights[:, slot, None].to(dtype) * rows[place.clamp_min(0)].to(dtype)
        total = total + products.masked_fill((place < 0).unsqueeze(-1), 0)
    return (total if addend is None else total + _weighted_addend(addend, weights, places.shape[1])).to(rows.dtype)


def check_weights(weights: Tensor, num_tokens: int, top_k: int) -> None:
    """Raise `ValueError` unless each of a token's experts has a weight, and perhaps the shared one."""
    if weights.shape not in ((num_tokens, top_k), (num_tokens, top_k + 1)) or not weights.is_contiguous():
        raise ValueError(
            f"need contiguous weights of {num_tokens} tokens and {top_k} experts, or one more for the shared expert, "
            f"found {tuple(weights.shape)}, strides {weights.stride()}"
        )


def _weighted_addend(addend: Tensor, weights: Tensor, top_k: int) -> Tensor:
    """Return the addend, times its weight if there is one; this product has the addend's rounding."""
    dtype = compute_dtype(addend)
    if weights.shape[1] == top_k:
        return addend.to(dtype)
    return (addend.to(dtype) * weights[:, top_k:].to(dtype)).to(addend.dtype).to(dtype)


def sum_of_ranks_ref(parts: Tensor, num_tokens: int, addend: Tensor | None = None) -> Tensor:
    """Return the sum over ranks of the first rows of each part, in the order of the ranks; see `sum_of_ranks`."""
    dtype = compute_dtype(parts)
    total = torch.zeros(num_tokens, parts.shape[2], dtype=dtype, device=parts.device)
    for part in parts:
        total = total + part[:num_tokens].to(dtype)
    return (total if addend is None else total + addend.to(dtype)).to(parts.dtype)
