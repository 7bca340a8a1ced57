"""Compute the factors for the outputs of a replayed step; append its B and time steps to the ring.

With S the base state and L_t the sum of dt * A over the tokens after the base up to token t,

    y_t = exp(L_t) (C_t S) + sum over j <= t of exp(L_t - L_j) dt_j (B_j . C_t) x_j + D x_t

This kernel computes the factors of C_t S and of each x_j (including D), appends B and the time steps of the step's
tokens to the ring, and zeroes the outputs of padding. The kernels in `outputs` do the rest.

Sums of log decays are float64, because differences of long float32 sums would lose accuracy. If the previous launch is
the convolution, this kernel overlaps with it and first reads the inputs that the convolution does not compute. Grid:
one program per request and block of heads; the programs of one additional request zero the outputs after the last
request. Safe in CUDA graphs: no host sync, one launch, and the grid depends only on the shapes of the arguments.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....kernels.kernel_language import only_if
from ....kernels.overlap import await_then_release, overlapping
from ...batches import PAD_SLOT, ReplayBatch
from ...replay.ring import ReplayRing, kernel_ring, kernel_rows, load_request_or_tail
from ..inputs import SSMTokens, SSMWeights, kernel_tokens, kernel_weights, time_step

_LEAST_OWN = 8  # 2 to 8 tokens per request share one compiled kernel
_HEADS_AT_A_TIME = 16
_PAD = tl.constexpr(PAD_SLOT)


@dataclass(frozen=True, slots=True)
class ReplayCoefficients:
    """Factors for the outputs of a step, float32; undefined for tokens after a request's last one.

    Args:
        base: [requests, max_tokens, heads]; factor of the product of C and the base.
        inputs: [requests, max_tokens, heads, ring_len + own]; factor of each x: first those in the ring, oldest first,
            then those of the step. Factors of tokens after the output's token are 0.
        own: Number of factors for the step's own tokens, including padding; a power of two.
    """

    base: Tensor
    inputs: Tensor
    own: int


@triton.jit
def _scores(c, b):
    """Return the dot products [tokens of c, tokens of b], accumulated in float32."""
    if c.shape[0] == 1:
        return tl.sum(c.to(tl.float32) * b.to(tl.float32), axis=1)[None, :]
    if c.dtype == b.dtype and c.dtype != tl.float32:
        return tl.trans(tl.dot(b, tl.trans(c)))
    return tl.trans(tl.dot(b.to(tl.float32), tl.trans(c.to(tl.float32)), input_precision="ieee"))


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "max_tokens"])
def _coefficients_kernel(
    y, base_factors, input_factors, tokens, weights, ring, rows, num_rows, num_tokens, max_tokens,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D_STATE: tl.constexpr, HEAD_DIM: tl.constexpr, CAPACITY: tl.constexpr,
    RING: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, READS_EARLY: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Compute the factors for one request and some heads of a group; append their time steps and B to the ring.

    Long because all factors are computed from the same values in registers.
    """
    if not READS_EARLY:
        await_then_release(OVERLAPS)
    HEADS_A_GROUP: tl.constexpr = HEADS // GROUPS
    BLOCKS: tl.constexpr = (HEADS_A_GROUP + BLOCK - 1) // BLOCK
    block = tl.program_id(0) % BLOCKS
    group = tl.program_id(0) // BLOCKS % GROUPS
    row = tl.program_id(0) // (BLOCKS * GROUPS)
    slot, start, end, number, folded, computed = load_request_or_tail(rows, row, num_rows, num_tokens)
    is_live = slot != _PAD

    # `tl.dot` needs dimensions of at least 16, so smaller ones are padded.
    PADDED: tl.constexpr = RING if TOKENS == 1 or RING > 16 else 16
    SOURCES: tl.constexpr = TOKENS if TOKENS == 1 or TOKENS > 16 else 16
    first = tl.maximum(folded, computed // RING * RING)
    kept = computed - first  # number of ring entries not folded yet; less than RING
    count = end - start
    h = block * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, triton.next_power_of_2(D_STATE) if D_STATE > 16 else 16)
    w = tl.arange(0, PADDED)
    u = tl.arange(0, SOURCES)
    t = tl.arange(0, TOKENS)
    has_h = (h < HEADS_A_GROUP)[:, None]
    has_n = (n < D_STATE)[None, :]
    head = group * HEADS_A_GROUP + h
    indices = (first + w) % CAPACITY
    new_indices = (computed + u) % CAPACITY
    is_kept = has_h & (w < kept)[None, :]
    is_source = has_h & only_if(is_live, u < count)[None, :]
    is_target = has_h & only_if(is_live, t < count)[None, :]

    steps = ring.steps + number * ring.steps_ring + head
    kept_steps = steps[:, None] + indices[None, :] * ring.steps_stride
    kept_dt = tl.load(kept_steps, mask=is_kept, other=0.0)  # [heads, PADDED]
    kept_decay = tl.load(kept_steps + HEADS, mask=is_kept, other=0.0).to(tl.float64)
    dt = tokens.dt + head[:, None]
    new_dt = tl.load(dt + (start + u).to(tl.int64)[None, :] * tokens.dt_stride, mask=is_source, other=0.0)
    own_dt = tl.load(dt + (start + t).to(tl.int64)[None, :] * tokens.dt_stride, mask=is_target, other=0.0)
    A = -tl.exp(tl.load(weights.A_log + head, mask=h < HEADS_A_GROUP, other=0.0).to(tl.float32))[:, None]
    skip = tl.load(weights.D + head, mask=h < HEADS_A_GROUP, other=0.0).to(tl.float32)
    bias = tl.load(weights.dt_bias + head, mask=h < HEADS_A_GROUP, other=0.0)[:, None]
    ring_b = ring.B + number * ring.B_ring + group * D_STATE + n[None, :]
    kept_b = tl.load(ring_b + indices[:, None] * ring.B_stride, mask=(w < kept)[:, None] & has_n, other=0.0)
    new_dt = tl.where(is_source, time_step(new_dt, bias, weights.dt_min, weights.dt_max), 0.0)
    own_dt = tl.where(is_target, time_step(own_dt, bias, weights.dt_min, weights.dt_max), 0.0)
    before = tl.sum(kept_decay, axis=1)[:, None]
    until_kept = tl.cumsum(kept_decay, axis=1)
    until_source = before + tl.cumsum((new_dt * A).to(tl.float64), axis=1)
    until_target = before + tl.cumsum((own_dt * A).to(tl.float64), axis=1)
    of_base = tl.exp(until_target.to(tl.float32))
    of_kept = tl.exp((until_target[:, :, None] - until_kept[:, None, :]).to(tl.float32)) * kept_dt[:, None, :]
    is_same = (t[:, None] == u[None, :])[None, :, :]
    of_new = (until_target[:, :, None] - until_source[:, None, :]).to(tl.float32)
    of_new = tl.where(is_same, 1.0, tl.exp(of_new)) * new_dt[:, None, :]  # [heads, TOKENS, SOURCES]

    if READS_EARLY:
        await_then_release(OVERLAPS)
    if slot == _PAD:
        channel = tl.arange(0, triton.next_power_of_2(BLOCK * HEAD_DIM))
        has_channel = (channel < BLOCK * HEAD_DIM) & (block * BLOCK * HEAD_DIM + channel < HEADS_A_GROUP * HEAD_DIM)
        channel += (group * HEADS_A_GROUP + block * BLOCK) * HEAD_DIM
        for token in range(start, end):
            at = tl.cast(token, tl.int64) * (HEADS * HEAD_DIM)
            tl.store(y + at + channel, tl.zeros_like(channel).to(y.dtype.element_ty), mask=has_channel)
        return

    in_group = group * D_STATE + n[None, :]
    new_b = tokens.B + (start + u).to(tl.int64)[:, None] * tokens.B_stride + in_group
    new_b = tl.load(new_b, mask=(u < count)[:, None] & has_n, other=0.0)  # [SOURCES, d_state]
    c = tokens.C + (start + t).to(tl.int64)[:, None] * tokens.C_stride + in_group
    c = tl.load(c, mask=(t < count)[:, None] & has_n, other=0.0)  # [TOKENS, d_state]
    if block == 0:
        tl.store(ring_b + new_indices[:, None] * ring.B_stride, new_b, mask=(u < count)[:, None] & has_n)
    new_steps = steps[:, None] + new_indices[None, :] * ring.steps_stride
    tl.store(new_steps, new_dt, mask=is_source)
    tl.store(new_steps + HEADS, new_dt * A, mask=is_source)

    line = (tl.cast(row, tl.int64) * max_tokens + t)[None, :] * HEADS + head[:, None]
    tl.store(base_factors + line, of_base, mask=is_target)
    lines = input_factors + line[:, :, None] * (RING + OWN)
    of_kept *= _scores(c, kept_b)[None, :, :]  # [heads, TOKENS, PADDED]
    tl.store(lines + w[None, None, :], of_kept, mask=is_target[:, :, None] & (w < RING)[None, None, :])
    of_new *= _scores(c, new_b)[None, :, :]
    of_new = tl.where(is_same, of_new + skip[:, None, None], of_new)
    of_new = tl.where((t[:, None] >= u[None, :])[None, :, :], of_new, 0.0)
    tl.store(lines + RING + u[None, None, :], of_new, mask=is_target[:, :, None] & (u < OWN)[None, None, :])


def append_and_weigh(
    y: Tensor,
    tokens: SSMTokens,
    weights: SSMWeights,
    ring: ReplayRing,
    rows: ReplayBatch,
    ring_len: int,
    *,
    after_conv: bool,
) -> ReplayCoefficients:
    """Append each request's B and time steps to its ring, zero padding in `y`, both in place; return the factors.

    Long because it passes many named arguments to the kernel.

    Args:
        after_conv: As in `state_replay`.
    """
    heads, head_dim = tokens.x.shape[1:]
    groups, d_state = tokens.B.shape[1:]
    num_rows = rows.slots.shape[0]
    block = min(_HEADS_AT_A_TIME, triton.next_power_of_2(heads // groups))
    num_blocks = groups * triton.cdiv(heads // groups, block)
    own = max(_LEAST_OWN, triton.next_power_of_2(rows.max_tokens))
    factors = ReplayCoefficients(
        torch.empty(num_rows, rows.max_tokens, heads, dtype=torch.float32, device=y.device),
        torch.empty(num_rows, rows.max_tokens, heads, ring_len + own, dtype=torch.float32, device=y.device),
        own,
    )
    _coefficients_kernel[((num_rows + 1) * num_blocks,)](
        y=y,
        base_factors=factors.base,
        input_factors=factors.inputs,
        tokens=kernel_tokens(tokens),
        weights=kernel_weights(weights),
        ring=kernel_ring(ring),
        rows=kernel_rows(rows),
        num_rows=num_rows,
        num_tokens=tokens.x.shape[0],
        max_tokens=rows.max_tokens,
        HEADS=heads,
        GROUPS=groups,
        D_STATE=d_state,
        HEAD_DIM=head_dim,
        CAPACITY=ring.capacity,
        RING=ring_len,
        OWN=own,
        BLOCK=block,
        TOKENS=1 if rows.max_tokens == 1 else own,
        READS_EARLY=after_conv,
        num_warps=8 if rows.max_tokens == 1 else 4,
        enable_fp_fusion=True,
        **overlapping(y.device),
    )
    return factors
