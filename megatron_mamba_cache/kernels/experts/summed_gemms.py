"""Second GEMM of an MoE layer for few tokens, fused with the weighted sum over experts and the shared expert.

Grid: one program per token and output tile; it processes the token's experts in order, then the shared expert. A
token's result does not depend on other tokens. Accumulation is in fp32. Safe in CUDA graphs: no host sync, no atomics.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_language import appended, only_if
from ..kernel_launches import is_computed_in_fp32, launches_kernel
from ..overlap import await_inputs, await_launcher, overlapping, release
from .pair_gemms import check_few, tile_width
from .reference_experts import check_weights, summed_gemm_ref

_ROWS = 2
"""Number of outputs per program; four would give slightly more programs than run in one wave, so some would idle."""
_AHEAD = 1
"""Number of experts per token whose weights are loaded before the kernel waits for the first GEMM."""
_MOST_UNROLLED = 10
"""Maximum number of experts per token for which the loop over experts is unrolled."""


@triton.jit
def _multiply(vector, weights, is_here, INPUTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Multiply ROWS rows of weights by a vector; return partial sums [ROWS, WIDTH], zeros unless `is_here`."""
    element = tl.arange(0, WIDTH)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for begin in tl.static_range(0, INPUTS, WIDTH):
        inside = only_if(is_here, begin + element < INPUTS)
        weight = tl.load(weights + begin + element[None, :], mask=inside[None, :], other=0)
        given = tl.load(vector + begin + element, mask=inside, other=0)
        total += weight.to(tl.float32) * given.to(tl.float32)[None, :]
    return total


@triton.jit
def _expert_of(weight, ids, pair, first_expert, NUM_EXPERTS: tl.constexpr, SIZE: tl.constexpr):
    """Return a pointer to the weights of a pair's expert, and a flag that is True if the expert is on this rank."""
    expert = tl.load(ids + pair).to(tl.int64) - first_expert
    return weight + expert * SIZE, (expert >= 0) & (expert < NUM_EXPERTS)


@triton.jit
def _of_expert(
    rows, weight, ids, share, pair, own, first_expert,
    NUM_EXPERTS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the partial sums [ROWS, WIDTH] for one (token, expert) pair, times the expert's weight."""
    weights, is_here = _expert_of(weight, ids, pair, first_expert, NUM_EXPERTS, OUTPUTS * INPUTS)
    products = _multiply(rows + pair * INPUTS, weights + own * INPUTS, is_here, INPUTS, ROWS, WIDTH)
    return tl.load(share) * products


@triton.jit(do_not_specialize=["first_expert"])
def _sum_kernel(
    rows, shared_rows, weight, shared_weight, ids, shares, addend, out, first_expert,
    HAS_ADDEND: tl.constexpr, FOLLOWS_PAIRS: tl.constexpr, TOP_K: tl.constexpr, NUM_SHARES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SHARED: tl.constexpr, AHEAD: tl.constexpr,
    UNROLLS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Sum ROWS elements of a token's output over all experts. The kernel is long because it has many arguments."""
    if FOLLOWS_PAIRS:
        release(OVERLAPS)  # no need to wait: routing ended before the first GEMM started
    else:
        await_inputs(OVERLAPS)
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own, element = tl.minimum(row, OUTPUTS - 1).to(tl.int64)[:, None], tl.arange(0, WIDTH)
    inside, ahead = element < INPUTS, ()
    for slot in tl.static_range(AHEAD):  # these loads overlap with the wait for the first GEMM
        weights, is_here = _expert_of(weight, ids, token * TOP_K + slot, first_expert, NUM_EXPERTS, OUTPUTS * INPUTS)
        loaded = tl.load(weights + own * INPUTS + element[None, :], mask=only_if(is_here, inside)[None, :], other=0)
        ahead = appended(ahead, loaded)
    if FOLLOWS_PAIRS:
        await_launcher(OVERLAPS)
    partial = tl.zeros([ROWS, WIDTH], tl.float32)
    for slot in tl.static_range(AHEAD):
        pair = token * TOP_K + slot
        weights, is_here = _expert_of(weight, ids, pair, first_expert, NUM_EXPERTS, OUTPUTS * INPUTS)
        given = tl.load(rows + pair * INPUTS + element, mask=only_if(is_here, inside), other=0)
        products = ahead[slot].to(tl.float32) * given.to(tl.float32)[None, :]
        if INPUTS > WIDTH:
            products += _multiply(
                rows + pair * INPUTS + WIDTH, weights + own * INPUTS + WIDTH, is_here, INPUTS - WIDTH, ROWS, WIDTH
            )
        partial += tl.load(shares + token * NUM_SHARES + slot) * products
    if UNROLLS:
        for slot in tl.static_range(AHEAD, TOP_K):
            pair, share = token * TOP_K + slot, shares + token * NUM_SHARES + slot
            partial += _of_expert(
                rows, weight, ids, share, pair, own, first_expert, NUM_EXPERTS, INPUTS, OUTPUTS, ROWS, WIDTH
            )
    else:
        for slot in range(AHEAD, TOP_K):
            pair, share = token * TOP_K + slot, shares + token * NUM_SHARES + slot
            partial += _of_expert(
                rows, weight, ids, share, pair, own, first_expert, NUM_EXPERTS, INPUTS, OUTPUTS, ROWS, WIDTH
            )
    if SHARED > 0:
        shared = _multiply(shared_rows + token * SHARED, shared_weight + own * SHARED, True, SHARED, ROWS, WIDTH)
        if NUM_SHARES > TOP_K:
            shared *= tl.load(shares + token * NUM_SHARES + TOP_K)
        partial += shared
    total = tl.sum(partial, axis=1)
    if HAS_ADDEND:
        added = tl.load(addend + token * OUTPUTS + row, mask=row < OUTPUTS, other=0).to(tl.float32)
        if NUM_SHARES > TOP_K and SHARED == 0:
            added = (added * tl.load(shares + token * NUM_SHARES + TOP_K)).to(out.dtype.element_ty).to(tl.float32)
        total += added
    tl.store(out + token * OUTPUTS + row, total.to(out.dtype.element_ty), mask=row < OUTPUTS)


def summed_gemm(
    rows: Tensor,
    weight: Tensor,
    ids: Tensor,
    shares: Tensor,
    addend: Tensor | None = None,
    *,
    shared_rows: Tensor | None = None,
    shared_weight: Tensor | None = None,
    first_expert: int = 0,
    follows_pairs: bool = False,
) -> Tensor:
    """Multiply the rows of each token by their experts' weights, and return the weighted sum over experts.

    The function is long because all of its arguments are documented.

    Args:
        rows: [tokens * top_k, inputs], contiguous; rows for experts on other ranks are not read.
        weight: [experts, outputs, inputs], contiguous.
        ids: [tokens, top_k] int32, contiguous: the experts of each token.
        shares: [tokens, top_k] float32, contiguous: weight of each expert; or [tokens, top_k + 1], whose last column
            weighs the shared expert's output, or the addend if there is no shared expert. A weighted addend is rounded
            before it is added.
        addend: [tokens, outputs], contiguous, added to the sum; None: nothing to add.
        shared_rows: [tokens, shared inputs], contiguous: inputs of the shared expert's second GEMM.
        shared_weight: [outputs, shared inputs], contiguous; None: no shared expert.
        first_expert: Global index of the first expert on this rank.
        follows_pairs: True if the previous launch on this stream is `pair_gemm` with the same `ids`, and the stream
            waits for no other stream in between. The kernel then reads weights before `pair_gemm` ends.

    Returns:
        [tokens, outputs] in the dtype of `rows`; the fp32 sum is rounded once.

    Raises:
        ValueError: If shapes, dtypes or strides disagree.

    Reference: `summed_gemm_ref`. CUDA-graph safe: no host sync, one launch.
    """
    check_few(rows, weight, ids, ids.shape[1], shared_weight, shared_rows)
    check_weights(shares, *ids.shape)
    if not launches_kernel(rows) or not is_computed_in_fp32(rows):
        return summed_gemm_ref(
            rows,
            weight,
            ids,
            shares,
            addend,
            shared_rows=shared_rows,
            shared_weight=shared_weight,
            first_expert=first_expert,
        )
    (num_tokens, top_k), outputs = ids.shape, weight.shape[1]
    out = torch.empty(num_tokens, outputs, dtype=rows.dtype, device=rows.device)
    if out.numel() == 0:
        return out
    _sum_kernel[(triton.cdiv(outputs, _ROWS), num_tokens)](
        rows=rows,
        shared_rows=rows if shared_rows is None else shared_rows,
        weight=weight,
        shared_weight=weight if shared_weight is None else shared_weight,
        ids=ids,
        shares=shares,
        addend=rows if addend is None else addend,
        out=out,
        first_expert=first_expert,
        HAS_ADDEND=addend is not None,
        FOLLOWS_PAIRS=follows_pairs,
        TOP_K=top_k,
        NUM_SHARES=shares.shape[1],
        NUM_EXPERTS=weight.shape[0],
        INPUTS=rows.shape[1],
        OUTPUTS=outputs,
        SHARED=0 if shared_weight is None else shared_weight.shape[1],
        AHEAD=min(top_k, _AHEAD),
        UNROLLS=top_k <= _MOST_UNROLLED,
        ROWS=_ROWS,
        WIDTH=tile_width(rows),
        num_warps=4,
        enable_fp_fusion=True,
        **overlapping(rows.device),
    )
    return out
