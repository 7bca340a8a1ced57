"""What all states of a group share when they are replayed: the weights of the ring's tokens, and their appending.

With L the sum of dt * A from the checkpoint on, C_t the step's t-th token and S the checkpoint,

    y_t = exp(L_t) (C_t S) + sum over j <= t of exp(L_t - L_j) dt_j (B_j . C_t) x_j + D x_t

This kernel computes the factors of S and of each x_j, D among them, appends the step's tokens to the ring and clears
the outputs of padding; `state_replay` does the rest.

Sums of logarithms run between two tokens, never as differences of longer sums, which would lose digits. Grid: a
program for each row and block of heads, plus one row that clears the outputs past the last row, then one for each
token and chunk of x. Graph safe: no host sync, one launch, grid fixed by the shapes of the arguments.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..masks import only_if
from ..overlap import await_then_release, overlapping
from ..prefill_rows import PAD_SLOT
from .replay_rows import ReplayRing, ReplayRows
from .ssm_inputs import SSMTokens, SSMWeights
from .time_steps import time_step

_PAD = tl.constexpr(PAD_SLOT)
_NUM_WARPS = 8
_LEAST_OWN = 8  # one form of the kernels up to that many tokens
_HEADS_AT_A_TIME = 16
CHANNELS_AT_ONCE = 2048
"""Channels of x that a program appends."""


@dataclass(frozen=True, slots=True)
class ReplayCoefficients:
    """The factors of a step's outputs, float32; those of tokens that a row lacks are undefined.

    Args:
        checkpoint: [rows, max_tokens, heads]; of the checkpoint's product with C.
        inputs: [rows, max_tokens, heads, ring_len + own]; of x of the ring's tokens, oldest first, then of the step's
            tokens; 0 for one that is absent or comes later.
        odd: [rows, max_tokens, chunks of channels] int32; 1 where x has an infinite value or NaN, 0 where a row lacks
            the token.
        ring_len: Places for the ring's tokens.
        own: Places for the step's tokens, a power of two.
    """

    checkpoint: Tensor
    inputs: Tensor
    odd: Tensor
    ring_len: int
    own: int


class KernelTokens(NamedTuple):
    """The kernels' view of `SSMTokens`; strides are those between tokens."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    x_stride: int
    dt_stride: int
    B_stride: int
    C_stride: int


class KernelRing(NamedTuple):
    """The kernels' view of a layer's `ReplayRing`: strides between rings, then between positions."""

    x: Tensor
    B: Tensor
    steps: Tensor
    x_ring: int
    B_ring: int
    steps_ring: int
    x_place: int
    B_place: int
    steps_place: int


class KernelRows(NamedTuple):
    """The kernels' view of `ReplayRows`."""

    cu_tokens: Tensor
    slots: Tensor
    rings: Tensor
    folded: Tensor
    computed: Tensor


class _Weights(NamedTuple):
    """The kernel's view of `SSMWeights`."""

    A_log: Tensor
    D: Tensor
    dt_bias: Tensor
    dt_min: float
    dt_max: float


@triton.jit
def _append_input(
    odd, tokens, ring, rows, program, max_tokens, CHANNELS: tl.constexpr, CAPACITY: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Copy some channels of x of a row's token to the ring; note whether any of it is infinite or NaN."""
    CHUNKS: tl.constexpr = (CHANNELS + AT_ONCE - 1) // AT_ONCE
    chunk = program % CHUNKS
    t = program // CHUNKS % max_tokens
    row = program // CHUNKS // max_tokens
    start = tl.load(rows.cu_tokens + row)
    exists = (t < tl.load(rows.cu_tokens + row + 1) - start) & (tl.load(rows.slots + row) != _PAD)
    channel = chunk * AT_ONCE + tl.arange(0, AT_ONCE)
    has_channel = only_if(exists, channel < CHANNELS)
    x = tl.load(tokens.x + (start + t).to(tl.int64) * tokens.x_stride + channel, mask=has_channel, other=0.0)
    place = (tl.load(rows.computed + row) + t) % CAPACITY
    target = ring.x + tl.load(rows.rings + row).to(tl.int64) * ring.x_ring + place * ring.x_place
    tl.store(target + channel, x, mask=has_channel)
    tl.store(odd + program, tl.max((x.to(tl.float32) * 0.0 != 0.0).to(tl.int32), axis=0))


@triton.jit
def _scores(c, b):
    """Return the products [c's tokens, b's tokens]; exact ones of bf16 and fp16, summed in float32."""
    if c.dtype == b.dtype and c.dtype != tl.float32:
        return tl.dot(c, tl.trans(b))
    return tl.dot(c.to(tl.float32), tl.trans(b.to(tl.float32)), input_precision="ieee")


@triton.jit
def _weigh(
    y,
    checkpoint_factors,
    input_factors,
    tokens,
    weights,
    ring,
    rows,
    num_rows,
    num_tokens,
    max_tokens,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D_STATE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    RING: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the factors of a row and some heads of a group; append their time steps, and B.

    Long because all factors follow from the same few values in registers.
    """
    HEADS_A_GROUP: tl.constexpr = HEADS // GROUPS
    BLOCKS: tl.constexpr = (HEADS_A_GROUP + BLOCK - 1) // BLOCK
    TOKENS: tl.constexpr = OWN if OWN > 16 else 16
    PLACES: tl.constexpr = RING if RING > 16 else 16
    block = tl.program_id(0) % BLOCKS
    group = tl.program_id(0) // BLOCKS % GROUPS
    row = tl.program_id(0) // (BLOCKS * GROUPS)
    is_row = row < num_rows
    start = tl.load(rows.cu_tokens + row)
    end = tl.load(rows.cu_tokens + row + 1, mask=is_row, other=num_tokens)
    slot = tl.load(rows.slots + row, mask=is_row, other=_PAD)
    channel = tl.arange(0, triton.next_power_of_2(BLOCK * HEAD_DIM))
    has_channel = (channel < BLOCK * HEAD_DIM) & (block * BLOCK * HEAD_DIM + channel < HEADS_A_GROUP * HEAD_DIM)
    channel += (group * HEADS_A_GROUP + block * BLOCK) * HEAD_DIM
    if slot == _PAD:
        for token in range(start, end):
            at = tl.cast(token, tl.int64) * (HEADS * HEAD_DIM)
            tl.store(y + at + channel, tl.zeros_like(channel).to(y.dtype.element_ty), mask=has_channel)
        return

    number = tl.load(rows.rings + row).to(tl.int64)
    computed = tl.load(rows.computed + row)
    first = tl.maximum(tl.load(rows.folded + row), computed // RING * RING)
    kept = computed - first  # tokens of the ring that no fold has reached, fewer than RING
    count = end - start

    h = block * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, triton.next_power_of_2(D_STATE) if D_STATE > 16 else 16)
    w = tl.arange(0, PLACES)
    t = tl.arange(0, TOKENS)
    has_h = h < HEADS_A_GROUP
    has_n = n < D_STATE
    head = group * HEADS_A_GROUP + h
    places = (first + w) % CAPACITY
    new_places = (computed + t) % CAPACITY
    token = (start + t).to(tl.int64)
    is_token = (t < count)[:, None] & has_n[None, :]

    ring_b = ring.B + number * ring.B_ring + group * D_STATE + n[None, :]
    kept_b = tl.load(
        ring_b + places[:, None] * ring.B_place, mask=(w < kept)[:, None] & has_n[None, :], other=0.0
    )  # [PLACES, d_state]
    own_b = tl.load(
        tokens.B + token[:, None] * tokens.B_stride + group * D_STATE + n[None, :], mask=is_token, other=0.0
    )  # [TOKENS, d_state]
    c = tl.load(
        tokens.C + token[:, None] * tokens.C_stride + group * D_STATE + n[None, :], mask=is_token, other=0.0
    )  # [TOKENS, d_state]
    if block == 0:
        tl.store(ring_b + new_places[:, None] * ring.B_place, own_b, mask=is_token)

    steps = ring.steps + number * ring.steps_ring + head
    is_kept = has_h[:, None] & (w < kept)[None, :]
    kept_dt = tl.load(steps[:, None] + places[None, :] * ring.steps_place, mask=is_kept, other=0.0)
    kept_decay = tl.load(steps[:, None] + places[None, :] * ring.steps_place + HEADS, mask=is_kept, other=0.0)
    later_decay = tl.load(
        steps[:, None] + ((first + w + 1) % CAPACITY)[None, :] * ring.steps_place + HEADS,
        mask=has_h[:, None] & (w + 1 < kept)[None, :],
        other=0.0,
    )
    A = -tl.exp(tl.load(weights.A_log + head, mask=has_h, other=0.0).to(tl.float32))
    skip = tl.load(weights.D + head, mask=has_h, other=0.0).to(tl.float32)
    bias = tl.load(weights.dt_bias + head, mask=has_h, other=0.0)
    is_new = has_h[:, None] & (t < count)[None, :]
    dt = tl.load(tokens.dt + token[None, :] * tokens.dt_stride + head[:, None], mask=is_new, other=0.0)
    dt = time_step(dt, bias[:, None], weights.dt_min, weights.dt_max)
    dt = tl.where(is_new, dt, 0.0)  # [heads, TOKENS]
    decay = tl.where(is_new, dt * A[:, None], 0.0)
    new_steps = steps[:, None] + new_places[None, :] * ring.steps_place
    tl.store(new_steps, dt, mask=is_new)
    tl.store(new_steps + HEADS, decay, mask=is_new)

    since_start = tl.cumsum(decay, axis=1)  # [heads, TOKENS]
    line = (tl.cast(row, tl.int64) * max_tokens + t)[None, :] * HEADS + head[:, None]
    of_checkpoint = tl.exp(tl.sum(kept_decay, axis=1)[:, None] + since_start)
    tl.store(checkpoint_factors + line, of_checkpoint, mask=is_new)

    lines = input_factors + line[:, :, None] * (RING + OWN)
    until_start = tl.cumsum(later_decay, axis=1, reverse=True)  # [heads, PLACES]
    of_ring = tl.exp(until_start[:, None, :] + since_start[:, :, None]) * kept_dt[:, None, :]
    of_ring *= _scores(c, kept_b)[None, :, :]  # [heads, TOKENS, PLACES]
    tl.store(lines + w[None, None, :], of_ring, mask=is_new[:, :, None] & (w < RING)[None, None, :])

    is_later = (t[:, None] > t[None, :])[None, :, :]
    between = tl.cumsum(tl.where(is_later, decay[:, :, None], 0.0), axis=1)
    of_own = tl.exp(between) * dt[:, None, :] * _scores(c, own_b)[None, :, :]  # [heads, TOKENS, TOKENS]
    is_same = (t[:, None] == t[None, :])[None, :, :]
    of_own = tl.where(is_later, of_own, tl.where(is_same, of_own + skip[:, None, None], 0.0))
    tl.store(lines + RING + t[None, None, :], of_own, mask=is_new[:, :, None] & (t < OWN)[None, None, :])


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "max_tokens"])
def _coefficients_kernel(
    y,
    checkpoint_factors,
    input_factors,
    odd,
    tokens,
    weights,
    ring,
    rows,
    num_rows,
    num_tokens,
    max_tokens,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D_STATE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    RING: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    await_then_release(OVERLAPS)
    BLOCKS: tl.constexpr = GROUPS * ((HEADS // GROUPS + BLOCK - 1) // BLOCK)
    weighing = (num_rows + 1) * BLOCKS
    if tl.program_id(0) >= weighing:
        _append_input(
            odd, tokens, ring, rows, tl.program_id(0) - weighing, max_tokens, HEADS * HEAD_DIM, CAPACITY, AT_ONCE
        )
        return
    _weigh(
        y,
        checkpoint_factors,
        input_factors,
        tokens,
        weights,
        ring,
        rows,
        num_rows,
        num_tokens,
        max_tokens,
        HEADS,
        GROUPS,
        D_STATE,
        HEAD_DIM,
        CAPACITY,
        RING,
        OWN,
        BLOCK,
    )


def append_and_weigh(
    y: Tensor, tokens: SSMTokens, weights: SSMWeights, ring: ReplayRing, rows: ReplayRows, ring_len: int
) -> ReplayCoefficients:
    """Append each row's tokens to its ring, clear the outputs of padding in `y`, in place; return the factors."""
    heads, head_dim = tokens.x.shape[1:]
    groups, d_state = tokens.B.shape[1:]
    num_rows = rows.slots.shape[0]
    block = min(_HEADS_AT_A_TIME, triton.next_power_of_2(heads // groups))
    num_blocks = groups * triton.cdiv(heads // groups, block)
    at_once = min(CHANNELS_AT_ONCE, triton.next_power_of_2(heads * head_dim))
    num_chunks = triton.cdiv(heads * head_dim, at_once)
    own = max(_LEAST_OWN, triton.next_power_of_2(rows.max_tokens))
    factors = ReplayCoefficients(
        torch.empty(num_rows, rows.max_tokens, heads, dtype=torch.float32, device=y.device),
        torch.empty(num_rows, rows.max_tokens, heads, ring_len + own, dtype=torch.float32, device=y.device),
        torch.empty(num_rows, rows.max_tokens, num_chunks, dtype=torch.int32, device=y.device),
        ring_len,
        own,
    )
    _coefficients_kernel[((num_rows + 1) * num_blocks + factors.odd.numel(),)](
        y=y,
        checkpoint_factors=factors.checkpoint,
        input_factors=factors.inputs,
        odd=factors.odd,
        tokens=kernel_tokens(tokens),
        weights=_Weights(weights.A_log, weights.D, weights.dt_bias, *weights.dt_limit),
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
        AT_ONCE=at_once,
        num_warps=_NUM_WARPS,
        **overlapping(y.device),
    )
    return factors


def kernel_tokens(tokens: SSMTokens) -> KernelTokens:
    """Return what the kernels read of the tokens."""
    packed = (tokens.x, tokens.dt, tokens.B, tokens.C)
    return KernelTokens(*packed, *(tensor.stride(0) for tensor in packed))


def kernel_ring(ring: ReplayRing) -> KernelRing:
    """Return what the kernels read and write of the rings; the last two strides count rings and positions."""
    tensors = (ring.x, ring.B, ring.steps)
    return KernelRing(*tensors, *(t.stride(-4) for t in tensors), *(t.stride(-3) for t in tensors))


def kernel_rows(rows: ReplayRows) -> KernelRows:
    """Return what the kernels read of the rows."""
    return KernelRows(*(getattr(rows, name) for name in KernelRows._fields))
