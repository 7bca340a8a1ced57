"""Torch references for routing, the experts' GEMMs and the weighted sum.

`grouped_gemm_ref` synchronizes with the host, because it reads `starts` there; it is used on CPUs and in tests.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import Activation, activated_ref
from ..reference import compute_dtype
from .gemm_tiles import SHORT_STEP, rows_of_short_tile, tile_rows
from .routing_rule import RouteRecord, RoutingRule, SharedGate


def router_logits_ref(x: Tensor, gate: Tensor) -> Tensor:
    """Torch reference for `router_logits`; returns the logits as a single part, [1, tokens, experts]."""
    dtype = compute_dtype(x)
    return F.linear(x.to(dtype), gate.to(dtype)).unsqueeze(0)


def route_ref(
    logits: Tensor,
    bias: Tensor | None,
    rule: RoutingRule,
    is_real: Tensor | None = None,
    shared: SharedGate | None = None,
    record: RouteRecord | None = None,
) -> tuple[Tensor, Tensor]:
    """Torch reference for `route`."""
    logits = (logits if logits.dtype == torch.float64 else logits.float()).sum(0)
    scores = logits.sigmoid() if rule.score == "sigmoid" else logits.softmax(-1)
    # A softmax may round several small scores to 0, so sort by the logits.
    choice = scores if rule.score == "sigmoid" else logits
    choice = choice if bias is None else scores + bias.to(scores.dtype)
    if rule.num_groups > 1:
        choice = _in_best_groups(choice, rule)
    # A stable sort puts the lowest index first among equal scores; topk does not guarantee that.
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    weights = scores.gather(-1, ids)
    if rule.normalizes:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    weights, ids = weights * rule.scale, ids.to(torch.int32)
    if is_real is not None:
        is_own = is_real.bool().unsqueeze(-1)
        ids, weights = ids.where(is_own, -1), weights.where(is_own, 0)
    if record is not None:
        kept = torch.nonzero(record.blocks[: len(ids) - record.first] >= 0)[:, 0]
        targets = record.blocks[kept].long(), record.offsets[kept].long()
        record.table[targets] = ids[record.first + kept].to(record.table.dtype)
    if shared is None:
        return ids, weights
    dtype = compute_dtype(shared.x)
    logit = F.linear(shared.x.to(dtype), shared.weight.to(dtype)).to(shared.x.dtype)
    return ids, torch.cat((weights, logit.sigmoid().to(weights.dtype)), dim=-1)


@dataclass(frozen=True)
class ExpertOrder:
    """The (token, expert) pairs of a layer, sorted by expert.

    Args:
        pairs: [tokens * top_k] int32: pair numbers token * top_k + slot, ascending for each expert. Entries from
            `starts[-1]` on are undefined.
        positions: [tokens, top_k] int32: index of each pair in `pairs`; -1 if its expert is not on this rank.
        starts: [experts + 1] int32: index of each expert's first pair; `starts[-1]` is the number of sorted pairs.
        known_tiles: Row tiles, if they were computed in advance; None: `tiles` computes them at first use.
    """

    pairs: Tensor
    positions: Tensor
    starts: Tensor
    known_tiles: Tensor | None = None

    @cached_property
    def tiles(self) -> Tensor:
        """Row tiles, used by both GEMMs of a layer; see `tile_rows`."""
        return tile_rows(self.starts, len(self.pairs)) if self.known_tiles is None else self.known_tiles

    @cached_property
    def short_tiles(self) -> Tensor:
        """Row tiles of at most `rows_of_short_tile` rows, used by both GEMMs of a layer."""
        most_rows = rows_of_short_tile(len(self.pairs), len(self.starts) - 1)
        return tile_rows(self.starts, len(self.pairs), most_rows, SHORT_STEP)


def order_by_expert_ref(ids: Tensor, num_experts: int, first_expert: int = 0) -> ExpertOrder:
    """Torch reference for `order_by_expert`."""
    ids = ids - first_expert
    here = (ids >= 0) & (ids < num_experts)
    experts, pairs = ids.where(here, num_experts).flatten().sort(dim=0, stable=True)
    positions = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(len(pairs), device=ids.device))
    positions = positions.view(ids.shape).where(here, -1)
    starts = torch.searchsorted(experts, torch.arange(num_experts + 1, dtype=ids.dtype, device=ids.device))
    return ExpertOrder(pairs.to(torch.int32), positions.to(torch.int32), starts.to(torch.int32))


def _in_best_groups(choice: Tensor, rule: RoutingRule) -> Tensor:
    """Set the scores of experts outside the highest-scoring groups to minus infinity."""
    grouped = choice.unflatten(-1, (rule.num_groups, -1))
    scores = grouped.sort(dim=-1, descending=True).values[..., : rule.num_scoring].sum(-1)  # [tokens, groups]
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_groups]
    inside = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return grouped.masked_fill(~inside.unsqueeze(-1), float("-inf")).flatten(-2)


def grouped_gemm_ref(
    x: Tensor, weight: Tensor, order: ExpertOrder, *, top_k: int | None = None, activation: Activation = "none"
) -> Tensor:
    """Torch reference for `grouped_gemm`."""
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
    """Torch reference for `pair_gemm`."""
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
    """Torch reference for `summed_gemm`."""
    dtype = compute_dtype(rows)
    order = order_by_expert_ref(ids, len(weight), first_expert)
    products = grouped_gemm_ref(rows.to(dtype), weight.to(dtype), order, top_k=1)
    top_k = ids.shape[1]
    total = weighted_sum_ref(products, order.positions, shares[:, :top_k])
    if shared_rows is not None and shared_weight is not None:
        shared = F.linear(shared_rows.to(dtype), shared_weight.to(dtype))
        total = total + (shared if shares.shape[1] == top_k else shared * shares[:, top_k:].to(dtype))
        shares = shares[:, :top_k]  # the last share weighs the shared expert, so the addend is not weighted
    if addend is not None:
        total = total + _weighted_addend(addend, shares, top_k)
    return total.to(rows.dtype)


def weighted_sum_ref(rows: Tensor, positions: Tensor, weights: Tensor, addend: Tensor | None = None) -> Tensor:
    """Torch reference for `weighted_sum`."""
    dtype = compute_dtype(rows)
    total = torch.zeros(positions.shape[0], rows.shape[1], dtype=dtype, device=rows.device)
    for slot in range(positions.shape[1]):
        position = positions[:, slot].long()
        products = weights[:, slot, None].to(dtype) * rows[position.clamp_min(0)].to(dtype)
        total = total + products.masked_fill((position < 0).unsqueeze(-1), 0)
    return (total if addend is None else total + _weighted_addend(addend, weights, positions.shape[1])).to(rows.dtype)


def check_weights(weights: Tensor, num_tokens: int, top_k: int) -> None:
    """Raise `ValueError` unless each token has `top_k` weights, or one more for the shared expert."""
    if weights.shape not in ((num_tokens, top_k), (num_tokens, top_k + 1)) or not weights.is_contiguous():
        raise ValueError(
            f"weights must be contiguous [{num_tokens}, {top_k}], or [{num_tokens}, {top_k + 1}] with a shared expert, "
            f"found shape {tuple(weights.shape)} with strides {weights.stride()}"
        )


def _weighted_addend(addend: Tensor, weights: Tensor, top_k: int) -> Tensor:
    """Return the addend in the compute dtype; if `weights` has a column for it, multiply it by that and round."""
    dtype = compute_dtype(addend)
    if weights.shape[1] == top_k:
        return addend.to(dtype)
    return (addend.to(dtype) * weights[:, top_k:].to(dtype)).to(addend.dtype).to(dtype)


def sum_of_ranks_ref(parts: Tensor, num_tokens: int, addend: Tensor | None = None) -> Tensor:
    """Torch reference for `sum_of_ranks`."""
    dtype = compute_dtype(parts)
    total = torch.zeros(num_tokens, parts.shape[2], dtype=dtype, device=parts.device)
    for part in parts:
        total = total + part[:num_tokens].to(dtype)
    return (total if addend is None else total + addend.to(dtype)).to(parts.dtype)
