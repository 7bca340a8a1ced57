"""Compute the factors for the outputs and ring entries of a replayed step; append its keys and log decays to the ring.

With S the base state, G_t the sum of the log decays of the tokens after the base up to token t, k and q not normalized,
r_t = 1 / |k_t| and s_t = 1 / (|q_t| sqrt(key_dim)), token t adds k_t w_t to the state, and

    w_t = r_t beta_t v_t - r_t^2 beta_t (exp(G_t) (k_t S) + sum over j < t of exp(G_t - G_j) (k_j . k_t) w_j)
    y_t = s_t (exp(G_t) (q_t S) + sum over j <= t of exp(G_t - G_j) (k_j . q_t) w_j)

The corrected value w_t includes the key's inverse length, so the ring stores keys exactly as they are. This kernel
computes the factors of v_t, k_t S, q_t S and each w_j, appends keys and log decays to the ring, and zeroes the outputs
of padding. The kernels in `outputs` do the rest.

The bits of a token's factors depend only on the tokens of its period, the positions from one multiple of `ring_len` to
the next: j counts positions of the period, in the ring or in the step, and no factor depends on that of another token.
Sums of log decays are float64, because differences of long float32 sums would lose accuracy. If the previous launch is
the convolution, this kernel overlaps with it and first reads the inputs that the convolution does not compute. Grid:
`splits` programs per request and key head, each for every `splits`-th token; the programs of one additional request
zero the outputs after the last request. Safe in CUDA graphs: no host sync, one launch, and the grid depends only on the
shapes of the arguments.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....kernels.kernel_language import only_if
from ....kernels.overlap import await_then_release, overlapping
from ...batches import PAD_SLOT, ReplayBatch
from ...replay.ring import ReplayRing, kernel_ring, kernel_rows, load_request_or_tail
from ..inputs import EPS, DeltaTokens, GateWeights, KernelGates, kernel_tokens, log_decay, write_strength

NUM_SCALARS = 4
_RESIDENT_PROGRAMS = 1056
"""Number of programs that a Hopper GPU runs concurrently; with more, the next kernel would start late."""
_PAD = tl.constexpr(PAD_SLOT)
_EPS = tl.constexpr(EPS)
_SCALARS = tl.constexpr(NUM_SCALARS)


class ReplayFactors(NamedTuple):
    """Factors for the outputs and ring entries of a step, float32; undefined for tokens after a request's last one.

    Args:
        scalars: [requests, max_tokens, value heads, 4]; factors of v and k S in w, and of q S in y; the last is unused.
        inputs: [requests, max_tokens, value heads, 2, ring_len]; factors of the corrected values at the positions of
            the token's period, in w and in y. Factors of later tokens are 0, and in w that of the token itself.
    """

    scalars: Tensor
    inputs: Tensor


@triton.jit
def _load_token(tokens, token, exists, keys, head, has_n, has_h):
    """Load k and q for one key head and token, and b for the value heads that share it."""
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
    """Compute the factors for one request and key head; append its keys and log decays to the ring.

    Long because all factors are computed from the same values in registers.
    """
    if not READS_EARLY:
        await_then_release(OVERLAPS)
    HEADS_A_KEY: tl.constexpr = HEADS // KEY_HEADS
    key_head = tl.program_id(0) % KEY_HEADS
    split = tl.program_id(1)
    row = tl.program_id(0) // KEY_HEADS
    slot, start, end, number, folded, computed = load_request_or_tail(rows, row, num_rows, num_tokens)

    n = tl.arange(0, triton.next_power_of_2(KEY_DIM))
    j = tl.arange(0, RING)
    h = tl.arange(0, triton.next_power_of_2(HEADS_A_KEY))
    has_n = n < KEY_DIM
    has_h = h < HEADS_A_KEY
    head = key_head * HEADS_A_KEY + h
    begin = computed // RING * RING
    positions = begin + j
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
        CHANNELS: tl.constexpr = HEADS_A_KEY * VALUE_DIM
        channel = tl.arange(0, triton.next_power_of_2(CHANNELS))
        out = y + key_head * CHANNELS + channel
        zeros = tl.zeros_like(channel).to(y.dtype.element_ty)
        for token in range(start + split, end, splits):
            tl.store(out + tl.cast(token, tl.int64) * (HEADS * VALUE_DIM), zeros, mask=channel < CHANNELS)
        return

    until = computed + end - start
    own_keys = key_head * KEY_DIM + n
    following = _load_token(tokens, start + split, split < end - start, own_keys, head, has_n, has_h)
    at = computed + split  # the program's next token
    while at < until:  # once per period; keys and decays are those of its tokens in the ring and in the step
        positions = begin + j
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
            # Mask the factors of later tokens, because the key of a draft may be NaN.
            is_earlier, is_later = (positions < at)[None, :], (positions > at)[None, :]
            of_keys = tl.sum(tile * k[None, :], axis=1)[None, :] * (strength * of_k)[:, None] * since_each
            of_queries = tl.sum(tile * q[None, :], axis=1)[None, :] * of_q * since_each
            of_inputs = inputs + line[:, None] * (2 * RING) + j[None, :]
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
    """Append each request's keys and log decays to its ring, zero padding in `y`, both in place; return the factors.

    Long because it passes many named arguments to the kernel.

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
