"""References of routing and of the order of tokens by expert; torch only, without a host sync."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import compute_dtype
from .gemm_tiles import tile_rows
from .routing_rule import RoutingRule, SharedGate


def router_logits_ref(x: Tensor, gate: Tensor) -> Tensor:
    """Return the products of tokens with the router's weights, as one part; see `router_logits`."""
    dtype = compute_dtype(x)
    return F.linear(x.to(dtype), gate.to(dtype)).unsqueeze(0)


def route_ref(
    logits: Tensor,
    bias: Tensor | None,
    rule: RoutingRule,
    is_real: Tensor | None = None,
    shared: SharedGate | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each token's experts and their weights; see `route`."""
    logits = (logits if logits.dtype == torch.float64 else logits.float()).sum(0)
    scores = logits.sigmoid() if rule.score == "sigmoid" else logits.softmax(-1)
    # A softmax rounds small scores to 0, and the logits have the same order.
    choice = scores if rule.score == "sigmoid" else logits
    choice = choice if bias is None else scores + bias.to(scores.dtype)
    if rule.num_groups > 1:
        choice = _in_best_groups(choice, rule)
    # A stable sort takes the first of equal scores, which topk does not promise.
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    weights = scores.gather(-1, ids)
    if rule.normalizes:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    weights, ids = weights * rule.scale, ids.to(torch.int32)
    if is_real is not None:
        is_own = is_real.bool().unsqueeze(-1)
        ids, weights = ids.where(is_own, -1), weights.where(is_own, 0)
    if shared is None:
        return ids, weights
    dtype = compute_dtype(shared.x)
    logit = F.linear(shared.x.to(dtype), shared.weight.to(dtype)).to(shared.x.dtype)
    return ids, torch.cat((weights, logit.sigmoid().to(weights.dtype)), dim=-1)


@dataclass(frozen=True)
class ExpertOrder:
    """Pairs of a token and one of its experts, in the order of experts.

    Args:
        pairs: [tokens * top_k] int32: token * top_k + slot; those of an expert in ascending order. Entries from
            `starts[-1]` on mean nothing.
        places: [tokens, top_k] int32: where each pair is in `pairs`; -1 for pairs of other experts.
        starts: [experts + 1] int32: where each expert's pairs begin; the last one is the number of pairs in order.
        known_tiles: The tiles, if they need not be computed.
    """

    pairs: Tensor
    places: Tensor
    starts: Tensor
    known_tiles: Tensor | None = None

    @cached_property
    def tiles(self) -> Tensor:
        """The tiles of rows of both of a layer's products; see `tile_rows`."""
        return tile_rows(self.starts, len(self.pairs)) if self.known_tiles is None else self.known_tiles


def order_by_expert_ref(ids: Tensor, num_experts: int, first_expert: int = 0) -> ExpertOrder:
    """Return the pairs of tokens and experts in the order of experts; see `order_by_expert`."""
    ids = ids - first_expert
    here = (ids >= 0) & (ids < num_experts)
    experts, pairs = ids.where(here, num_experts).flatten().sort(dim=0, stable=True)
    places = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(len(pairs), device=ids.device))
    places = places.view(ids.shape).where(here, -1)
    starts = torch.searchsorted(experts, torch.arange(num_experts + 1, dtype=ids.dtype, device=ids.device))
    return ExpertOrder(pairs.to(torch.int32), places.to(torch.int32), starts.to(torch.int32))


def _in_best_groups(choice: Tensor, rule: RoutingRule) -> Tensor:
    """Return the scores with those of experts outside the best groups at minus infinity."""
    grouped = choice.unflatten(-1, (rule.num_groups, -1))
    scores = grouped.sort(dim=-1, descending=True).values[..., : rule.num_scoring].sum(-1)  # [tokens, groups]
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_groups]
    inside = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return grouped.masked_fill(~inside.unsqueeze(-1), float("-inf")).flatten(-2)
