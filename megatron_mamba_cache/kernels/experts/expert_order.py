"""Sort the (token, expert) pairs by expert, for grouped GEMMs.

The sort is stable: pairs with the same expert stay in token order. It is deterministic, because atomics are only used
to count. Up to 4,096 pairs take one launch, in which one program per expert reads all pairs. More pairs take three
launches over chunks of pairs: count each expert's pairs in each chunk and rank each pair within its chunk; compute
prefix sums of the counts over chunks; scatter the pairs. Safe in CUDA graphs: no host sync.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from ..overlap import await_inputs, overlapping
from .reference_experts import ExpertOrder, order_by_expert_ref

_FEW_PAIRS = {128: 1, 1024: 4, 2048: 8, 4096: 8}
"""Number of warps per program, keyed by the maximum number of pairs that the program reads."""
_CHUNK = 128
"""Number of pairs per chunk."""
_CHUNKS_AT_A_TIME = 1024
_LEAST_BINS = 128
"""Minimum number of histogram bins: one per thread of a program; fewer are untested."""


@triton.jit
def _load_experts(ids, position, num_pairs, first_expert, NUM_EXPERTS: tl.constexpr):
    """Load each pair's local expert index; NUM_EXPERTS if the expert is on another rank or the pair does not exist."""
    expert = tl.load(ids + position, mask=position < num_pairs, other=-1) - first_expert
    return tl.where((position < num_pairs) & (expert >= 0) & (expert < NUM_EXPERTS), expert, NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_pairs", "first_expert"], do_not_specialize_on_alignment=["ids"])
def _order_kernel(
    ids, pairs, positions, starts, num_pairs, first_expert,
    NUM_EXPERTS: tl.constexpr, PAIRS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    await_inputs(OVERLAPS)
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    chosen = _load_experts(ids, pair, num_pairs, first_expert, NUM_EXPERTS)
    first = tl.sum((chosen < expert).to(tl.int32), axis=0)
    tl.store(starts + expert, first)
    is_own = (chosen == expert).to(tl.int32)
    position = first - 1 + tl.cumsum(is_own, axis=0)
    tl.store(pairs + position, pair, mask=is_own > 0)
    tl.store(positions + pair, position, mask=is_own > 0)
    if expert == 0:
        tl.store(positions + pair, -1, mask=(chosen == NUM_EXPERTS) & (pair < num_pairs))
    if expert == NUM_EXPERTS - 1:
        tl.store(starts + NUM_EXPERTS, first + tl.sum(is_own, axis=0))


@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "first_expert"], do_not_specialize_on_alignment=["ids"])
def _count_kernel(
    ids, ranks, counts, num_pairs, num_chunks, first_expert,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Count each expert's pairs in one chunk, and rank each pair among the chunk's pairs with the same expert."""
    await_inputs(OVERLAPS)
    chunk, lane, expert = tl.program_id(0), tl.arange(0, CHUNK), tl.arange(0, EXPERTS)
    chosen = _load_experts(ids, chunk * CHUNK + lane, num_pairs, first_expert, NUM_EXPERTS)
    count = tl.histogram(chosen, EXPERTS, mask=chosen < NUM_EXPERTS)
    tl.store(counts + expert * num_chunks + chunk, count, mask=expert < NUM_EXPERTS)
    other = _load_experts(ids, chunk * CHUNK + lane, num_pairs, first_expert, NUM_EXPERTS)
    is_before = (other[None, :] == chosen[:, None]) & (lane[None, :] < lane[:, None])
    tl.store(ranks + chunk * CHUNK + lane, tl.sum(is_before.to(tl.int32), axis=1))


@triton.jit(do_not_specialize=["num_chunks"])
def _sum_counts_kernel(counts, totals, num_chunks, CHUNKS: tl.constexpr, OVERLAPS: tl.constexpr):
    """Replace one expert's counts per chunk by their exclusive prefix sums, and store the total."""
    await_inputs(OVERLAPS)
    expert, lane = tl.program_id(0), tl.arange(0, CHUNKS)
    before = 0
    for begin in range(0, num_chunks, CHUNKS):
        at = counts + expert * num_chunks + begin + lane
        count = tl.load(at, mask=begin + lane < num_chunks, other=0)
        tl.store(at, before + tl.cumsum(count, axis=0) - count, mask=begin + lane < num_chunks)
        before += tl.sum(count, axis=0)
    tl.store(totals + expert, before)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "first_expert"], do_not_specialize_on_alignment=["ids"])
def _scatter_kernel(
    ids, ranks, counts, totals, pairs, positions, starts, num_pairs, num_chunks, first_expert,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Write the pairs of one chunk to their sorted positions."""
    await_inputs(OVERLAPS)
    chunk, lane, expert = tl.program_id(0), tl.arange(0, CHUNK), tl.arange(0, EXPERTS)
    total = tl.load(totals + expert, mask=expert < NUM_EXPERTS, other=0)
    begins = tl.cumsum(total, axis=0) - total
    if chunk == 0:
        tl.store(starts + expert, begins, mask=expert < NUM_EXPERTS)
        tl.store(starts + NUM_EXPERTS, tl.sum(total, axis=0))
    pair = chunk * CHUNK + lane
    chosen = _load_experts(ids, pair, num_pairs, first_expert, NUM_EXPERTS)
    is_here = chosen < NUM_EXPERTS
    own = tl.where(is_here, chosen, 0)
    position = tl.gather(begins, own, 0) + tl.load(counts + own * num_chunks + chunk) + tl.load(ranks + pair)
    tl.store(pairs + position, pair, mask=is_here)
    tl.store(positions + pair, tl.where(is_here, position, -1), mask=pair < num_pairs)


def order_by_expert(ids: Tensor, num_experts: int, first_expert: int = 0) -> ExpertOrder:
    """Sort (token, expert) pairs by expert; pairs with the same expert stay in token order.

    The pair of `token` and expert `ids[token, slot]` has the number `token * top_k + slot`.

    Args:
        ids: [tokens, top_k] int32, contiguous.
        num_experts: Number of experts on this rank; pairs with other experts are left out.
        first_expert: Global index of the first expert on this rank.

    Raises:
        ValueError: If `ids` has a different shape, dtype or layout, or `num_experts` is 0.

    Reference: `order_by_expert_ref`. CUDA-graph safe: no host sync, one launch, or three for many pairs.
    """
    if ids.dim() != 2 or ids.dtype != torch.int32 or not ids.is_contiguous() or num_experts < 1:
        raise ValueError(
            "ids must be contiguous int32 [tokens, top_k], and num_experts at least 1; found ids "
            f"{tuple(ids.shape)} {ids.dtype} with strides {ids.stride()}, and {num_experts} experts"
        )
    if not launches_kernel(ids):
        return order_by_expert_ref(ids, num_experts, first_expert)
    order = ExpertOrder(ids.new_empty(ids.numel()), torch.empty_like(ids), ids.new_empty(num_experts + 1))
    at_once = next((pairs for pairs in _FEW_PAIRS if ids.numel() <= pairs), None)
    if at_once is None:
        _order_many(ids, order, first_expert)
        return order
    _order_kernel[(num_experts,)](
        ids=ids,
        pairs=order.pairs,
        positions=order.positions,
        starts=order.starts,
        num_pairs=ids.numel(),
        first_expert=first_expert,
        NUM_EXPERTS=num_experts,
        PAIRS=at_once,
        num_warps=_FEW_PAIRS[at_once],
        enable_fp_fusion=True,
        **overlapping(ids.device),
    )
    return order


def _order_many(ids: Tensor, order: ExpertOrder, first_expert: int) -> None:
    num_experts, num_chunks = len(order.starts) - 1, triton.cdiv(ids.numel(), _CHUNK)
    ranks, counts = ids.new_empty(num_chunks * _CHUNK), ids.new_empty(num_experts, num_chunks)
    totals, overlaps = ids.new_empty(num_experts), overlapping(ids.device)
    of_pairs = {"ids": ids, "ranks": ranks, "num_pairs": ids.numel(), "first_expert": first_expert}
    of_chunks = {"counts": counts, "num_chunks": num_chunks}
    bins = max(_LEAST_BINS, triton.next_power_of_2(num_experts))
    sizes = {"NUM_EXPERTS": num_experts, "EXPERTS": bins, "CHUNK": _CHUNK}
    _count_kernel[(num_chunks,)](**of_pairs, **of_chunks, **sizes, num_warps=4, enable_fp_fusion=True, **overlaps)
    _sum_counts_kernel[(num_experts,)](
        **of_chunks, totals=totals, CHUNKS=_CHUNKS_AT_A_TIME, num_warps=4, enable_fp_fusion=True, **overlaps
    )
    _scatter_kernel[(num_chunks,)](
        **of_pairs,
        **of_chunks,
        **sizes,
        totals=totals,
        pairs=order.pairs,
        positions=order.positions,
        starts=order.starts,
        num_warps=4,
        enable_fp_fusion=True,
        **overlaps,
    )
