"""Routing: the experts of each token, and their weights.

Layout: tokens of any stride, experts contiguous. Grid: a program a token, whose experts are in registers as
[groups, experts of a group], both padded to powers of 2. The best expert is found `top_k` times by one maximum over
keys that hold a score's order above and the expert's number below, so that equal scores go to the lowest number. All
arithmetic is fp32. Graph safe.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from .reference_routing import route_ref
from .routing_rule import RoutingRule

__all__ = ["RoutingRule", "route", "route_ref"]

_LOWEST = tl.constexpr(-(2**63))


@triton.jit
def _ordered(score, number):
    """Return int64 keys whose order is that of the scores, then the reverse of the numbers'."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # two's complement instead of a sign bit
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - number).to(tl.int64)


@triton.jit
def _number_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _best_groups(choice, key, group, NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """Return which groups have the best two experts, [GROUPS, 1]."""
    first = tl.max(choice, axis=1, keep_dims=True)
    if GROUP_SIZE > 1:
        is_first = key == tl.max(key, axis=1, keep_dims=True)
        first += tl.max(tl.where(is_first, float("-inf"), choice), axis=1, keep_dims=True)
    group_key = tl.where(group < NUM_GROUPS, _ordered(first, group), _LOWEST)
    chosen = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        is_best = group_key == tl.max(group_key, axis=0, keep_dims=True)
        chosen = chosen | is_best
        group_key = tl.where(is_best, _LOWEST, group_key)
    return chosen


@triton.jit
def _route_kernel(
    logits,
    bias,
    ids,
    weights,
    stride,
    scale,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALIZES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    expert = group * GROUP_SIZE + member
    exists = (group < NUM_GROUPS) & (member < GROUP_SIZE)
    logit = tl.load(logits + token * stride + expert, mask=exists, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        score = 1 / (1 + tl.exp(-logit))
        choice = score
    else:
        exponential = tl.exp(logit - tl.max(tl.max(logit, axis=1), axis=0))
        score = exponential / tl.sum(tl.sum(exponential, axis=1), axis=0)
        choice = logit
    if HAS_BIAS:
        choice = score + tl.load(bias + expert, mask=exists, other=0).to(tl.float32)
    key = tl.where(exists, _ordered(choice, expert), _LOWEST)
    if NUM_GROUPS > 1:
        of_experts = tl.where(exists, choice, float("-inf"))
        chosen = _best_groups(of_experts, key, group, NUM_GROUPS, GROUP_SIZE, TOP_GROUPS)
        key = tl.where(chosen, key, _LOWEST)
    slot = tl.arange(0, SLOTS)
    picked, weight = tl.zeros([SLOTS], tl.int32), tl.zeros([SLOTS], tl.float32)
    for k in tl.static_range(TOP_K):
        best_key = tl.max(tl.max(key, axis=1), axis=0)
        is_best = key == best_key
        best_score = tl.sum(tl.sum(tl.where(is_best, score, 0.0), axis=1), axis=0)
        picked = tl.where(slot == k, _number_of(best_key), picked)
        weight = tl.where(slot == k, best_score, weight)
        key = tl.where(is_best, _LOWEST, key)
    if NORMALIZES:
        weight = weight / tl.maximum(tl.sum(weight, axis=0), 1.1754943508222875e-38)
    tl.store(ids + token * TOP_K + slot, picked, mask=slot < TOP_K)
    tl.store(weights + token * TOP_K + slot, weight * scale, mask=slot < TOP_K)


def route(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Return each token's experts, best first, and their weights.

    Of experts with equal scores the one with the lowest number is chosen. A token's result depends on that token alone,
    to the bit. The reference computes float64 logits.

    Args:
        logits: [tokens, experts]; experts contiguous.
        bias: [experts], added to the scores for the choice only; None for none.

    Returns:
        Experts [tokens, top_k] int32, and weights [tokens, top_k] float32.

    Raises:
        ValueError: If shapes, strides or devices disagree, or the rule does not fit the number of experts.

    Reference: `route_ref`. CUDA-graph safe: no host sync, one launch.
    """
    _check(logits, bias, rule)
    if not launches_kernel(logits) or logits.dtype == torch.float64:
        return route_ref(logits, bias, rule)
    num_tokens, num_experts = logits.shape
    ids = torch.empty(num_tokens, rule.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, rule.top_k, dtype=torch.float32, device=logits.device)
    if not num_tokens:
        return ids, weights
    size = num_experts // rule.num_groups
    _route_kernel[(num_tokens,)](
        logits=logits,
        bias=logits if bias is None else bias,
        ids=ids,
        weights=weights,
        stride=logits.stride(0),
        scale=rule.scale,
        NUM_GROUPS=rule.num_groups,
        GROUP_SIZE=size,
        GROUPS=triton.next_power_of_2(rule.num_groups),
        WIDTH=triton.next_power_of_2(size),
        TOP_GROUPS=rule.top_groups,
        TOP_K=rule.top_k,
        SLOTS=triton.next_power_of_2(rule.top_k),
        IS_SIGMOID=rule.score == "sigmoid",
        HAS_BIAS=bias is not None,
        NORMALIZES=rule.normalizes,
        num_warps=max(1, min(4, triton.next_power_of_2(num_experts) // 128)),
    )
    return ids, weights


def _check(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> None:
    if logits.dim() != 2 or (bias is not None and bias.shape != logits.shape[1:]):
        found = "none" if bias is None else tuple(bias.shape)
        raise ValueError(f"need logits [tokens, experts] and bias [experts], found {tuple(logits.shape)} and {found}")
    rule.check(logits.shape[1])
    if logits.shape[1] > 1 and (logits.stride(1) != 1 or (bias is not None and bias.stride(0) != 1)):
        raise ValueError(f"need contiguous experts, found strides {logits.stride()}")
    if bias is not None and bias.device != logits.device:
        raise ValueError(f"need logits and bias on one device, found {logits.device} and {bias.device}")
