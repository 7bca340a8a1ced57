"""What all states of a group share when they are replayed: the weights of the ring's tokens, and their appending.

With L the sum of dt * A from the checkpoint on, C_t the step's t-th token and S the checkpoint,

    y_t = exp(L_t) (C_t S) + sum over j <= t of exp(L_t - L_j) dt_j (B_j . C_t) x_j + D x_t

This kernel computes the factors of S and of each x_j, D among them, appends the step's tokens to the ring and clears
the outputs of padding; `state_replay` does the rest.

Sums of logarithms run between two tokens, never as differences of longer sums, which would lose digits. Grid: a
program for each row and group, plus one row that clears the outputs past the last row. Graph safe: no host sync, one
launch, grid fixed by the shapes of the arguments.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..overlap import await_then_release, overlapping
from ..prefill_rows import PAD_SLOT
from .replay_rows import ReplayRing, ReplayRows
from .ssm_inputs import SSMTokens, SSMWeights
from .time_steps import time_step

_PAD = tl.constexpr(PAD_SLOT)
_NUM_WARPS = 4
_LEAST_OWN = 8  # one form of the kernels up to that many tokens


@dataclass(frozen=True, slots=True)
class ReplayCoefficients:
    """The factors of a step's outputs, float32; those of tokens that a row lacks are undefined.

    Args:
        checkpoint: [rows, max_tokens, heads]; of the checkpoint's product with C.
        inputs: [rows, max_tokens, heads, ring_len + own]; of x of the ring's tokens, oldest first, then of the step's
            tokens; 0 for one that is absent or comes later.
        ring_len: Places for the ring's tokens.
        own: Places for the step's tokens, a power of two.
    """

    checkpoint: Tensor
    inputs: Tensor
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
def _clear_outputs(y, start, end, group, HEADS: tl.constexpr, HEADS_A_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    WIDTH: tl.constexpr = HEADS_A_GROUP * HEAD_DIM
    channel = tl.arange(0, triton.next_power_of_2(WIDTH))
    zeros = tl.zeros_like(channel).to(y.dtype.element_ty)
    for token in range(start, end):
        at = tl.cast(token, tl.int64) * (HEADS * HEAD_DIM) + group * WIDTH
        tl.store(y + at + channel, zeros, mask=channel < WIDTH)


@triton.jit
def _append_inputs(tokens, ring, number, computed, start, count, group, WIDTH: tl.constexpr, CAPACITY: tl.constexpr):
    """Copy x of a group's heads, WIDTH channels, to the ring."""
    channel = tl.arange(0, triton.next_power_of_2(WIDTH))
    for t in range(0, count):
        source = tokens.x + tl.cast(start + t, tl.int64) * tokens.x_stride + group * WIDTH + channel
        target = ring.x + number * ring.x_ring + ((computed + t) % CAPACITY) * ring.x_place + group * WIDTH + channel
        tl.store(target, tl.load(source, mask=channel < WIDTH), mask=channel < WIDTH)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "max_tokens"])
def _coefficients_kernel(
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
    OVERLAPS: tl.constexpr,
):
    """Long because a token's factors follow from those of the token before it, in registers."""
    await_then_release(OVERLAPS)
    HEADS_A_GROUP: tl.constexpr = HEADS // GROUPS
    group = tl.program_id(0) % GROUPS
    row = tl.program_id(0) // GROUPS
    is_row = row < num_rows
    start = tl.load(rows.cu_tokens + row)
    end = tl.load(rows.cu_tokens + row + 1, mask=is_row, other=num_tokens)
    slot = tl.load(rows.slots + row, mask=is_row, other=_PAD)
    if slot == _PAD:
        _clear_outputs(y, start, end, group, HEADS, HEADS_A_GROUP, HEAD_DIM)
        return

    number = tl.load(rows.rings + row).to(tl.int64)
    computed = tl.load(rows.computed + row)
    first = tl.maximum(tl.load(rows.folded + row), computed // RING * RING)
    kept = computed - first  # tokens of the ring that no fold has reached, fewer than RING
    count = end - start

    h = tl.arange(0, triton.next_power_of_2(HEADS_A_GROUP))
    n = tl.arange(0, triton.next_power_of_2(D_STATE))
    w = tl.arange(0, RING)
    u = tl.arange(0, OWN)
    has_h = h < HEADS_A_GROUP
    has_n = n < D_STATE
    head = group * HEADS_A_GROUP + h

    places = (first + w) % CAPACITY
    ring_b = tl.load(
        ring.B + number * ring.B_ring + places[:, None] * ring.B_place + group * D_STATE + n[None, :],
        mask=(w < kept)[:, None] & has_n[None, :],
        other=0.0,
    ).to(tl.float32)  # [RING, d_state]
    is_own = (u < count)[:, None] & has_n[None, :]
    own_b = tl.load(
        tokens.B + (start + u).to(tl.int64)[:, None] * tokens.B_stride + group * D_STATE + n[None, :],
        mask=is_own,
        other=0.0,
    )  # [OWN, d_state]
    new_places = (computed + u) % CAPACITY
    tl.store(
        ring.B + number * ring.B_ring + new_places[:, None] * ring.B_place + group * D_STATE + n[None, :],
        own_b,
        mask=is_own,
    )
    own_b = own_b.to(tl.float32)
    steps = ring.steps + number * ring.steps_ring + head
    is_kept = has_h[:, None] & (w < kept)[None, :]
    ring_dt = tl.load(steps[:, None] + places[None, :] * ring.steps_place, mask=is_kept, other=0.0)
    decays = tl.load(steps[:, None] + places[None, :] * ring.steps_place + HEADS, mask=is_kept, other=0.0)
    later = tl.load(
        steps[:, None] + ((first + w + 1) % CAPACITY)[None, :] * ring.steps_place + HEADS,
        mask=has_h[:, None] & (w + 1 < kept)[None, :],
        other=0.0,
    )
    since_ring = tl.cumsum(later, axis=1, reverse=True)  # [heads, RING]: log decay after each token
    since_checkpoint = tl.sum(decays, axis=1)  # [heads]
    since_own = tl.zeros([h.shape[0], OWN], dtype=tl.float32)
    own_dt = tl.zeros([h.shape[0], OWN], dtype=tl.float32)

    A = -tl.exp(tl.load(weights.A_log + head, mask=has_h, other=0.0).to(tl.float32))
    skip = tl.load(weights.D + head, mask=has_h, other=0.0).to(tl.float32)
    bias = tl.load(weights.dt_bias + head, mask=has_h, other=0.0)
    for t in range(0, count):
        token = tl.cast(start + t, tl.int64)
        c = tl.load(tokens.C + token * tokens.C_stride + group * D_STATE + n, mask=has_n, other=0.0).to(tl.float32)
        dt = tl.load(tokens.dt + token * tokens.dt_stride + head, mask=has_h, other=0.0)
        dt = time_step(dt, bias, weights.dt_min, weights.dt_max)
        decay = dt * A
        new_steps = steps + ((computed + t) % CAPACITY) * ring.steps_place
        tl.store(new_steps, dt, mask=has_h)
        tl.store(new_steps + HEADS, decay, mask=has_h)

        since_checkpoint += decay
        since_ring += decay[:, None]
        since_own = tl.where((u < t)[None, :], since_own + decay[:, None], 0.0)
        own_dt = tl.where((u == t)[None, :], dt[:, None], own_dt)
        of_ring = tl.exp(since_ring) * ring_dt * tl.sum(ring_b * c[None, :], axis=1)[None, :]
        of_own = tl.exp(since_own) * own_dt * tl.sum(own_b * c[None, :], axis=1)[None, :]
        of_own = tl.where((u <= t)[None, :], of_own, 0.0) + tl.where((u == t)[None, :], skip[:, None], 0.0)
        line = (tl.cast(row, tl.int64) * max_tokens + t) * HEADS + head
        tl.store(checkpoint_factors + line, tl.exp(since_checkpoint), mask=has_h)
        factors = input_factors + line[:, None] * (RING + OWN)
        tl.store(factors + w[None, :], of_ring, mask=has_h[:, None])
        tl.store(factors + (RING + u)[None, :], of_own, mask=has_h[:, None])
    _append_inputs(tokens, ring, number, computed, start, count, group, HEADS_A_GROUP * HEAD_DIM, CAPACITY)


def append_and_weigh(
    y: Tensor, tokens: SSMTokens, weights: SSMWeights, ring: ReplayRing, rows: ReplayRows, ring_len: int
) -> ReplayCoefficients:
    """Append each row's tokens to its ring, clear the outputs of padding in `y`, in place; return the factors."""
    heads, head_dim = tokens.x.shape[1:]
    groups, d_state = tokens.B.shape[1:]
    num_rows = rows.slots.shape[0]
    own = max(_LEAST_OWN, triton.next_power_of_2(rows.max_tokens))
    factors = ReplayCoefficients(
        torch.empty(num_rows, rows.max_tokens, heads, dtype=torch.float32, device=y.device),
        torch.empty(num_rows, rows.max_tokens, heads, ring_len + own, dtype=torch.float32, device=y.device),
        ring_len,
        own,
    )
    _coefficients_kernel[((num_rows + 1) * groups,)](
        y=y,
        checkpoint_factors=factors.checkpoint,
        input_factors=factors.inputs,
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
