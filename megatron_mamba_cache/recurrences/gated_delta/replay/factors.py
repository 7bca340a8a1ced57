"""The factors of a replayed step's outputs and writes, which the columns of a head share; its tokens in the ring.

With S the base, G the sum of log decays from it on, k and q as they are stored, and r their inverse lengths, token t
writes k_t w_t, where

    w_t = r_t beta_t v_t - (r_t^2 beta_t exp(G_t)) k_t S - sum over j < t of r_t^2 beta_t exp(G_t - G_j) (k_j . k_t) w_j
    y_t = (s_t exp(G_t)) q_t S + sum over j <= t of s_t exp(G_t - G_j) (k_j . q_t) w_j

with s = r / sqrt(key_dim). So w is u = beta (v - S k), times the inverse length of its key: the ring holds keys as they
come, exactly, and no length. This kernel computes every factor, appends keys and log decays to the ring and clears the
outputs of padding; the kernel of `outputs` does the rest.

A factor's bits do not depend on the tokens of the step: j counts positions from the last multiple of the ring's length,
in the ring or not, and each token is computed by itself. Log decays are summed in float64. Grid: `splits` programs, of
every `splits`-th token, for each request and key head, plus one request that clears the outputs past the last request.
Graph safe: no host sync, one launch, grid fixed by the shapes of the arguments.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....kernels.kernel_language import only_if
from ....kernels.overlap import await_then_release, overlapping
from ...batches import PAD_SLOT, ReplayBatch
from ...replay.ring import ReplayRing, kernel_ring, kernel_rows
from ..inputs import EPS, DeltaTokens, GateWeights, KernelGates, kernel_tokens, log_decay, write_strength

NUM_SCALARS = 4
_RESIDENT_PROGRAMS = 1056
"""Programs that a Hopper GPU runs at once; more would start the next kernel late."""
_PAD = tl.constexpr(PAD_SLOT)
_EPS = tl.constexpr(EPS)
_SCALARS = tl.constexpr(NUM_SCALARS)


class ReplayFactors(NamedTuple):
    """The factors of a step's tokens, float32; those of tokens that a request lacks are undefined.

    Args:
        scalars: [requests, max_tokens, value heads, 4]; of w: of v, and of k S (subtracted); of y: of q S; undefined.
        inputs: [requests, max_tokens, value heads, 2, ring_len]; of the tokens' w, by their positions after a multiple
            of the ring's length: of w (subtracted; of earlier ones), then of y (no later ones); 0 for the others.
    """

    scalars: Tensor
    inputs: Tensor


@triton.jit
def _load_token(tokens, token, exists, keys, head, has_n, has_h):
    """Load k and q of a key head, and b of its value heads."""
    token = token.to(tl.int64)
    k = tl.load(tokens.k + token * tokens.k_stride + keys, mask=only_if(exists, has_n), other=0.0)
    q = tl.load(tokens.q + token * tokens.q_stride + keys, mask=only_if(exists, has_n), other=0.0)
    return k, q, tl.load(tokens.b + token * tokens.b_stride + head, mask=only_if(exists, has_h), other=0.0)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "max_tokens", "splits"])
def _factors_kernel(
    y,
    scalars,
    inputs,
    tokens,
    gates,
    ring,
    rows,
    scale,
    num_rows,
    num_tokens,
    max_tokens,
    splits,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    RING: tl.constexpr,
    READS_EARLY: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Long because all factors follow from the same few values in registers."""
    if not READS_EARLY:
        await_then_release(OVERLAPS)
    TIMES: tl.constexpr = HEADS // KEY_HEADS
    key_head = tl.program_id(0) % KEY_HEADS
    split = tl.program_id(1)
    row = tl.program_id(0) // KEY_HEADS
    is_row = row < num_rows
    start = tl.load(rows.cu_tokens + row)
    end = tl.load(rows.cu_tokens + row + 1, mask=is_row, other=num_tokens)
    slot = tl.load(rows.slots + row, mask=is_row, other=_PAD)
    is_live = slot != _PAD
    number = tl.load(rows.buffers + row, mask=is_live, other=0).to(tl.int64)
    folded = tl.load(rows.folded + row, mask=is_live, other=0)
    computed = tl.load(rows.computed + row, mask=is_live, other=0)

    n = tl.arange(0, triton.next_power_of_2(KEY_DIM))
    w = tl.arange(0, RING)
    h = tl.arange(0, triton.next_power_of_2(TIMES))
    has_n = n < KEY_DIM
    has_h = h < TIMES
    head = key_head * TIMES + h
    begin = computed // RING * RING
    positions = begin + w
    is_kept = (positions >= folded) & (positions < computed)
    keys = ring.B + number * ring.B_ring + key_head * KEY_DIM + n
    kept = tl.load(
        keys[None, :] + (positions % CAPACITY)[:, None] * ring.B_stride,
        mask=is_kept[:, None] & has_n[None, :],
        other=0.0,
    )  # [RING, key_dim]
    steps = ring.steps + number * ring.steps_ring + head
    kept_decays = tl.load(
        steps[:, None] + HEADS + (positions % CAPACITY)[None, :] * ring.steps_stride,
        mask=has_h[:, None] & is_kept[None, :],
        other=0.0,
    )  # [value heads, RING]
    A_log = tl.load(gates.A_log + head, mask=has_h, other=0.0)
    dt_bias = tl.load(gates.dt_bias + head, mask=has_h, other=0.0)

    if READS_EARLY:
        await_then_release(OVERLAPS)
    if slot == _PAD:
        channel = tl.arange(0, triton.next_power_of_2(TIMES * VALUE_DIM))
        out = y + key_head * (TIMES * VALUE_DIM) + channel
        zeros = tl.zeros_like(channel).to(y.dtype.element_ty)
        for token in range(start + split, end, splits):
            tl.store(out + tl.cast(token, tl.int64) * (HEADS * VALUE_DIM), zeros, mask=channel < TIMES * VALUE_DIM)
        return

    until = computed + end - start
    own_keys = key_head * KEY_DIM + n
    following = _load_token(tokens, start + split, split < end - start, own_keys, head, has_n, has_h)
    at = computed + split  # the program's next token
    while at < until:
        positions = begin + w
        own = start + positions - computed
        is_own = (positions >= computed) & (positions < until)
        sources = tokens.k + own.to(tl.int64)[:, None] * tokens.k_stride + own_keys[None, :]
        new = tl.load(sources, mask=is_own[:, None] & has_n[None, :], other=0.0)
        tile = tl.where(is_own[:, None], new, kept).to(tl.float32)
        of_gates = tokens.a + own.to(tl.int64)[None, :] * tokens.a_stride + head[:, None]
        a = tl.load(of_gates, mask=has_h[:, None] & is_own[None, :], other=0.0)
        own_decays = log_decay(a, A_log[:, None], dt_bias[:, None])
        decays = tl.where(is_own[None, :], own_decays, kept_decays)
        sums = tl.cumsum(decays.to(tl.float64), axis=1)
        stop = tl.minimum(begin + RING, until)
        while at < stop:
            k, q, b = following
            following = _load_token(
                tokens, start + at - computed + splits, at + splits < until, own_keys, head, has_n, has_h
            )
            is_this = (positions == at)[None, :]
            decay = tl.sum(tl.where(is_this, decays, 0.0), axis=1)
            tl.store(keys + at % CAPACITY * ring.B_stride, k, mask=has_n)
            tl.store(steps + at % CAPACITY * ring.steps_stride, tl.full(h.shape, 1.0, tl.float32), mask=has_h)
            tl.store(steps + at % CAPACITY * ring.steps_stride + HEADS, decay, mask=has_h)

            k, q = k.to(tl.float32), q.to(tl.float32)
            of_k = tl.rsqrt(tl.sum(k * k, axis=0) + _EPS)
            of_q = scale * tl.rsqrt(tl.sum(q * q, axis=0) + _EPS)
            strength = write_strength(b) * of_k
            until_this = tl.sum(tl.where(is_this, sums, 0.0), axis=1)
            since_base = tl.exp(until_this.to(tl.float32))
            since_each = tl.exp((until_this[:, None] - sums).to(tl.float32))
            line = (tl.cast(row, tl.int64) * max_tokens + at - computed) * HEADS + head
            of_scalars = scalars + line * _SCALARS
            tl.store(of_scalars, strength, mask=has_h)
            tl.store(of_scalars + 1, strength * of_k * since_base, mask=has_h)
            tl.store(of_scalars + 2, of_q * since_base, mask=has_h)
            # A rejected draft's NaN stays out: it comes later.
            is_earlier, is_later = (positions < at)[None, :], (positions > at)[None, :]
            of_keys = tl.sum(tile * k[None, :], axis=1)[None, :] * (strength * of_k)[:, None] * since_each
            of_queries = tl.sum(tile * q[None, :], axis=1)[None, :] * of_q * since_each
            of_inputs = inputs + line[:, None] * (2 * RING) + w[None, :]
            tl.store(of_inputs, tl.where(is_earlier, of_keys, 0.0), mask=has_h[:, None])
            tl.store(of_inputs + RING, tl.where(is_later, 0.0, of_queries), mask=has_h[:, None])
            at += splits
        begin += RING
        kept = tl.zeros_like(kept)
        kept_decays = tl.zeros_like(kept_decays)


def append_and_weigh(
    y: Tensor,
    tokens: DeltaTokens,
    gates: GateWeights,
    ring: ReplayRing,
    rows: ReplayBatch,
    ring_len: int,
    *,
    after_conv: bool,
) -> ReplayFactors:
    """Append each request's keys and log decays to its ring, clear padding in `y`, in positions; return the factors.

    Args:
        after_conv: As in `delta_replay`.
    """
    heads, value_dim = tokens.v.shape[1:]
    key_heads, key_dim = tokens.k.shape[1:]
    num_rows = rows.slots.shape[0]
    lead = (num_rows, rows.max_tokens, heads)
    factors = ReplayFactors(
        torch.empty(*lead, NUM_SCALARS, dtype=torch.float32, device=y.device),
        torch.empty(*lead, 2, ring_len, dtype=torch.float32, device=y.device),
    )
    programs = (num_rows + 1) * key_heads
    splits = max(1, min(rows.max_tokens, _RESIDENT_PROGRAMS // programs))
    _factors_kernel[(programs, splits)](
        y=y,
        scalars=factors.scalars,
        inputs=factors.inputs,
        tokens=kernel_tokens(tokens),
        gates=KernelGates(gates.A_log, gates.dt_bias),
        ring=kernel_ring(ring),
        rows=kernel_rows(rows),
        scale=key_dim**-0.5,
        num_rows=num_rows,
        num_tokens=tokens.v.shape[0],
        max_tokens=rows.max_tokens,
        splits=splits,
        HEADS=heads,
        KEY_HEADS=key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        CAPACITY=ring.capacity,
        RING=ring_len,
        READS_EARLY=after_conv,
        num_warps=1,
        enable_fp_fusion=True,
        **overlapping(y.device),
    )
    return factors
