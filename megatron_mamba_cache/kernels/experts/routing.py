"""Routing: select the experts for each token and compute their weights.

Grid: one program per token, which holds the scores in registers as [groups, group size], both padded to powers of 2. It
maps scores to integer keys of the same order, and selects the largest key `top_k` times; among equal keys, the lowest
index wins. If the shared expert has a gate, the program also computes its weight. If routes are recorded, it also
writes the experts to the token's KV block. Arithmetic is in fp32. Safe in CUDA graphs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from ..overlap import await_inputs, overlapping
from .reference_experts import route_ref
from .routing_rule import RouteRecord, RoutingRule, SharedGate

_LOWEST = tl.constexpr(-(2**31))
_GATE_WIDTH = 1024
"""Number of inputs of the shared expert's gate that one loop iteration multiplies."""


@triton.jit
def _ordered(score):
    """Map fp32 scores to int32 keys of the same order, all above _LOWEST."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # adding 0 turns -0 into 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # converts sign and magnitude to two's complement
    return tl.maximum(ordered, _LOWEST + 1)


@triton.jit
def _first_best(key, number, axis: tl.constexpr):
    """Return the lowest `number` among the entries with the largest key; each reduction is one warp instruction."""
    best = tl.max(key, axis=axis, keep_dims=True)
    return tl.min(tl.where(key == best, number, 0x7FFFFFFF), axis=axis, keep_dims=True)


@triton.jit
def _best_groups(choice, key, group, NUM_GROUPS: tl.constexpr, NUM_SCORING: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """Return the mask [GROUPS, 1] of the groups with the highest sums of their NUM_SCORING largest scores."""
    member = tl.arange(0, key.shape[1])[None, :]
    total = tl.max(choice, axis=1, keep_dims=True)
    for _ in tl.static_range(1, NUM_SCORING):
        is_best = member == _first_best(key, member, 1)
        choice, key = tl.where(is_best, float("-inf"), choice), tl.where(is_best, _LOWEST, key)
        total += tl.max(choice, axis=1, keep_dims=True)
    group_key = tl.where(group < NUM_GROUPS, _ordered(total), _LOWEST)
    chosen = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        is_best = group == _first_best(group_key, group, 0)
        chosen = chosen | is_best
        group_key = tl.where(is_best, _LOWEST, group_key)
    return chosen


@triton.jit
def _sum_slices(pointers, part_stride, exists, PARTS: tl.constexpr):
    """Sum partial logits over parts; return minus infinity for entries that pad the experts."""
    logit = tl.load(pointers, mask=exists, other=float("-inf")).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        logit += tl.load(pointers + part * part_stride, mask=exists, other=0).to(tl.float32)
    return logit


@triton.jit
def _shared_weight(x, gate, INPUTS: tl.constexpr, WIDTH: tl.constexpr):
    """Return sigmoid(x @ gate), the weight of the shared expert; logit and result are rounded to the dtype of `x`."""
    element = tl.arange(0, WIDTH)
    products = tl.zeros([WIDTH], tl.float32)
    for begin in tl.static_range(0, INPUTS, WIDTH):
        inside = begin + element < INPUTS
        given = tl.load(x + begin + element, mask=inside, other=0).to(tl.float32)
        products += given * tl.load(gate + begin + element, mask=inside, other=0).to(tl.float32)
    logit = tl.sum(products, axis=0).to(x.dtype.element_ty).to(tl.float32)
    return (1 / (1 + tl.exp(-logit))).to(x.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["part_stride", "table", "first_recorded", "num_recorded"])
def _route_kernel(
    logits, bias, is_real, x, gate, ids, weights, stride, part_stride, x_stride, scale,
    table, token_blocks, token_offsets, block_stride, offset_stride, first_recorded, num_recorded,
    PARTS: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    TOP_GROUPS: tl.constexpr, NUM_SCORING: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr,
    IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_PADDING: tl.constexpr, NORMALIZES: tl.constexpr,
    GATE_INPUTS: tl.constexpr, GATE_WIDTH: tl.constexpr, RECORDS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Select the experts for one token and compute their weights. The kernel is long because it has many arguments."""
    await_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS)[:, None], tl.arange(0, WIDTH)[None, :]
    expert = group * GROUP_SIZE + member
    exists = (group < NUM_GROUPS) & (member < GROUP_SIZE)
    slot = tl.arange(0, SLOTS)
    if RECORDS:  # loaded first, so that these loads overlap those of the logits
        recorded = token - first_recorded + 0 * slot
        is_recorded = (recorded >= 0) & (recorded < num_recorded) & (slot < TOP_K)
        block = tl.load(token_blocks + recorded, mask=is_recorded, other=-1).to(tl.int64)
        offset = tl.load(token_offsets + recorded, mask=is_recorded, other=0).to(tl.int64)
    logit = _sum_slices(logits + token * stride + expert, part_stride, exists, PARTS)
    if IS_SIGMOID:
        score = 1 / (1 + tl.exp(-logit))
        choice = score
    else:
        largest = tl.max(tl.max(logit, axis=1), axis=0)
        exponential = tl.exp(logit - largest)
        total = tl.sum(tl.sum(exponential, axis=1), axis=0)
        score = exponential / total
        choice = logit
    if HAS_BIAS:
        choice = score + tl.load(bias + expert, mask=exists, other=0).to(tl.float32)
    key = tl.where(exists, _ordered(choice), _LOWEST)
    if NUM_GROUPS > 1:
        of_experts = tl.where(exists, choice, float("-inf"))
        chosen = _best_groups(of_experts, key, group, NUM_GROUPS, NUM_SCORING, TOP_GROUPS)
        key = tl.where(chosen, key, _LOWEST)
    picked = tl.zeros([SLOTS], tl.int32)
    for k in tl.static_range(TOP_K):
        best = tl.max(tl.max(key, axis=1), axis=0)
        number = tl.min(tl.min(tl.where(key == best, expert, 0x7FFFFFFF), axis=1), axis=0)
        picked = tl.where(slot == k, number, picked)
        key = tl.where(expert == number, _LOWEST, key)
    is_picked = (slot < TOP_K) & (picked < NUM_GROUPS * GROUP_SIZE)
    index = tl.where(is_picked, picked // GROUP_SIZE * WIDTH + picked % GROUP_SIZE, 0)
    weight = tl.where(is_picked, tl.gather(tl.reshape(score, [GROUPS * WIDTH]), index, 0), 0.0)
    if NORMALIZES:
        weight = weight / tl.maximum(tl.sum(weight, axis=0), 1.1754943508222875e-38)
    if HAS_PADDING:
        is_own = tl.load(is_real + token) != 0
        picked, weight = tl.where(is_own, picked, -1), tl.where(is_own, weight, 0.0)
    tl.store(ids + token * TOP_K + slot, picked, mask=slot < TOP_K)
    if RECORDS:
        found = table + block * block_stride + offset * offset_stride + slot
        tl.store(found, picked.to(tl.int16), mask=block >= 0)
    NUM_WEIGHTS: tl.constexpr = TOP_K + (1 if GATE_INPUTS > 0 else 0)
    tl.store(weights + token * NUM_WEIGHTS + slot, weight * scale, mask=slot < TOP_K)
    if GATE_INPUTS > 0:
        shared = _shared_weight(x + token * x_stride, gate, GATE_INPUTS, GATE_WIDTH)
        tl.store(weights + token * NUM_WEIGHTS + TOP_K, shared)


def route(
    logits: Tensor,
    bias: Tensor | None,
    rule: RoutingRule,
    is_real: Tensor | None = None,
    shared: SharedGate | None = None,
    record: RouteRecord | None = None,
) -> tuple[Tensor, Tensor]:
    """Select the experts for each token, highest score first, and compute their weights.

    Among experts with equal scores, the lowest index wins. float64 logits use the reference. The
    function is long because all of its arguments are documented.

    Args:
        logits: [parts, tokens, experts], summed over parts; experts contiguous.
        bias: [experts], added to the scores for the selection but not for the weights; None: no bias.
        is_real: [tokens] int32, 0 for padding tokens, which get expert -1 and weight 0; None: no padding.
        shared: Gate of the shared expert; None: the shared expert has no gate.
        record: Memory to which the experts are also written; None: they are not recorded.

    Returns:
        Experts [tokens, top_k] int32 and weights [tokens, top_k] float32. With `shared`, weights are
        [tokens, top_k + 1], and the last column is for the shared expert.

    Raises:
        ValueError: If shapes, strides or devices disagree, or the rule does not match the number of experts.

    Reference: `route_ref`. CUDA-graph safe: no host sync, one launch.
    """
    _check(logits, bias, rule)
    if shared is not None:
        _check_gate(shared, logits)
    if record is not None:
        _check_record(record, logits, rule)
    if not launches_kernel(logits) or logits.dtype == torch.float64:
        return route_ref(logits, bias, rule, is_real, shared, record)
    num_parts, num_tokens, num_experts = logits.shape
    ids = torch.empty(num_tokens, rule.top_k, dtype=torch.int32, device=logits.device)
    num_weights = rule.top_k + (shared is not None)
    weights = torch.empty(num_tokens, num_weights, dtype=torch.float32, device=logits.device)
    if not num_tokens:
        return ids, weights
    size = num_experts // rule.num_groups
    _route_kernel[(num_tokens,)](
        logits=logits,
        bias=logits if bias is None else bias,
        is_real=ids if is_real is None else is_real,
        x=logits if shared is None else shared.x,
        gate=logits if shared is None else shared.weight,
        ids=ids,
        weights=weights,
        stride=logits.stride(1),
        part_stride=logits.stride(0),
        x_stride=0 if shared is None else shared.x.stride(0),
        scale=rule.scale,
        table=ids if record is None else record.table,
        token_blocks=ids if record is None else record.blocks,
        token_offsets=ids if record is None else record.offsets,
        block_stride=0 if record is None else record.table.stride(0),
        offset_stride=0 if record is None else record.table.stride(1),
        first_recorded=0 if record is None else record.first,
        num_recorded=0 if record is None else len(record.blocks),
        PARTS=num_parts,
        NUM_GROUPS=rule.num_groups,
        GROUP_SIZE=size,
        GROUPS=triton.next_power_of_2(rule.num_groups),
        WIDTH=triton.next_power_of_2(size),
        TOP_GROUPS=rule.top_groups,
        NUM_SCORING=min(rule.num_scoring, size),
        TOP_K=rule.top_k,
        SLOTS=triton.next_power_of_2(rule.top_k),
        IS_SIGMOID=rule.score == "sigmoid",
        HAS_BIAS=bias is not None,
        HAS_PADDING=is_real is not None,
        NORMALIZES=rule.normalizes,
        GATE_INPUTS=0 if shared is None else shared.weight.shape[1],
        GATE_WIDTH=_GATE_WIDTH,
        RECORDS=record is not None,
        num_warps=1,
        enable_fp_fusion=True,
        **overlapping(logits.device),
    )
    return ids, weights


def _check(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> None:
    if logits.dim() != 3 or (bias is not None and bias.shape != logits.shape[2:]):
        found = "none" if bias is None else tuple(bias.shape)
        raise ValueError(
            "logits must have shape [parts, tokens, experts], and bias [experts] if given; found logits "
            f"{tuple(logits.shape)} and bias {found}"
        )
    rule.check(logits.shape[2])
    if logits.shape[2] > 1 and (logits.stride(2) != 1 or (bias is not None and bias.stride(0) != 1)):
        raise ValueError(f"experts must be contiguous in logits and bias, found logits strides {logits.stride()}")
    if bias is not None and bias.device != logits.device:
        devices = f"logits on {logits.device} and bias on {bias.device}"
        raise ValueError(f"logits and bias must be on the same device, found {devices}")


def _check_gate(shared: SharedGate, logits: Tensor) -> None:
    x, weight = shared
    if x.dim() != 2 or len(x) != logits.shape[1] or weight.shape != (1, x.shape[1]):
        raise ValueError(
            f"the shared expert's gate must have x [{logits.shape[1]}, inputs] and weight [1, inputs], found x "
            f"{tuple(x.shape)} and weight {tuple(weight.shape)}"
        )
    if x.dtype != weight.dtype or not x.device == weight.device == logits.device:
        raise ValueError(
            f"x and weight of the shared expert's gate must have the same dtype on {logits.device}, found x {x.dtype} "
            f"on {x.device} and weight {weight.dtype} on {weight.device}"
        )
    if x.shape[1] > 1 and not x.stride(1) == weight.stride(1) == 1:
        strides = f"x {x.stride()}, weight {weight.stride()}"
        raise ValueError(f"inputs of the shared expert's gate must be contiguous, found strides {strides}")


def _check_record(record: RouteRecord, logits: Tensor, rule: RoutingRule) -> None:
    table, blocks, offsets = record.table, record.blocks, record.offsets
    if table.dim() != 3 or table.shape[2] != rule.top_k or table.stride(2) != 1 or table.dtype != torch.int16:
        raise ValueError(
            f"recorded experts must be contiguous [blocks, block size, {rule.top_k}] int16, found {tuple(table.shape)} "
            f"{table.dtype} with strides {table.stride()}"
        )
    if not blocks.shape == offsets.shape or not blocks.dtype == offsets.dtype == torch.int32:
        raise ValueError(
            f"blocks and offsets of recorded tokens must be int32 of one length, found {blocks.dtype} "
            f"{tuple(blocks.shape)} and {offsets.dtype} {tuple(offsets.shape)}"
        )
    if not table.device == blocks.device == offsets.device == logits.device:
        raise ValueError(
            f"recorded experts, blocks and offsets must be on {logits.device}, found {table.device}, {blocks.device} "
            f"and {offsets.device}"
        )
