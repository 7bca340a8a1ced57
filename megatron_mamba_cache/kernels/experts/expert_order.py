"""The order of tokens by expert: which pairs of a token and one of its experts each expert computes.

Layout: pairs in the order of tokens, then of the tokens' experts. Grid: a program an expert. It reads all pairs twice:
once to count those of lower experts, which come before its own, and once to write its own in their order. So the same
choice of experts gives the same order on every run, without atomics. Graph safe: no host sync, one launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from .reference_routing import ExpertOrder, order_by_expert_ref

__all__ = ["ExpertOrder", "order_by_expert", "order_by_expert_ref"]

_PAIRS_AT_A_TIME = 1024


@triton.jit(do_not_specialize=["num_pairs"])
def _order_kernel(ids, pairs, places, starts, num_pairs, NUM_EXPERTS: tl.constexpr, PAIRS: tl.constexpr):
    expert = tl.program_id(0)
    lane = tl.arange(0, PAIRS)
    lower = tl.zeros([PAIRS], tl.int32)
    for begin in range(0, num_pairs, PAIRS):
        chosen = tl.load(ids + begin + lane, mask=begin + lane < num_pairs, other=NUM_EXPERTS)
        lower += (chosen < expert).to(tl.int32)
    first = tl.sum(lower, axis=0)
    tl.store(starts + expert, first)
    place = first
    for begin in range(0, num_pairs, PAIRS):
        chosen = tl.load(ids + begin + lane, mask=begin + lane < num_pairs, other=NUM_EXPERTS)
        is_own = (chosen == expert).to(tl.int32)
        rank = tl.cumsum(is_own, axis=0)
        tl.store(pairs + place + rank - 1, begin + lane, mask=is_own > 0)
        tl.store(places + begin + lane, place + rank - 1, mask=is_own > 0)
        place += tl.sum(is_own, axis=0)
    if expert == NUM_EXPERTS - 1:
        tl.store(starts + NUM_EXPERTS, place)


def order_by_expert(ids: Tensor, num_experts: int) -> ExpertOrder:
    """Return the pairs of tokens and experts in the order of experts.

    Pair `token * top_k + slot` is a token and its expert in that slot. Pairs of an expert stay in order.

    Args:
        ids: [tokens, top_k] int32, contiguous: experts from 0 to num_experts - 1.

    Raises:
        ValueError: If `ids` has another form, or there are no experts.

    Reference: `order_by_expert_ref`. CUDA-graph safe: no host sync, one launch.
    """
    if ids.dim() != 2 or ids.dtype != torch.int32 or not ids.is_contiguous() or num_experts < 1:
        raise ValueError(
            f"need contiguous int32 ids [tokens, top_k] and an expert at least, found {tuple(ids.shape)} {ids.dtype}, "
            f"strides {ids.stride()}, and {num_experts} experts"
        )
    if not launches_kernel(ids):
        return order_by_expert_ref(ids, num_experts)
    pairs = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    places = torch.empty_like(ids)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    _order_kernel[(num_experts,)](
        ids=ids,
        pairs=pairs,
        places=places,
        starts=starts,
        num_pairs=ids.numel(),
        NUM_EXPERTS=num_experts,
        PAIRS=_PAIRS_AT_A_TIME,
        num_warps=4,
    )
    return ExpertOrder(pairs, places, starts)
