"""Outputs of decode and verify steps whose states are replayed: a state is read once, and written only by a fold.

    y_t = factor_t (C_t S) + sum over the tokens j since the checkpoint S of factor_tj x_j

`replay_coefficients` computes the factors and appends the tokens first. Where a row's kept tokens have passed a
multiple of the ring's length, they are folded first: S = exp(dt * A) * S + B (dt * x), token by token as `state_verify`
does, rounded to the pool's dtype at every multiple; so a checkpoint's bits depend on its tokens alone.

Layout: a program owns one row and `width` columns of head_dim of one head's state [d_state, head_dim], all of d_state:
no sum crosses programs. Grid: a program for each row, head and width. On Hopper `state_replay_hopper` replaces this
kernel where it can. Graph safe: no host sync, two launches, grids fixed by the shapes of the arguments.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import is_computed_in_fp32, launches_kernel
from ..overlap import await_launcher, overlapping, release
from ..prefill_rows import PAD_SLOT
from .boundary_folds import fold_boundaries
from .reference_replay import fold_boundaries_ref, state_replay_ref
from .replay_coefficients import ReplayCoefficients, append_and_weigh, kernel_ring, kernel_rows, kernel_tokens
from .replay_fold import fold_entries
from .replay_rows import BoundaryFolds, ReplayRing, ReplayRows, check_replay_rows, check_ring
from .ssm_inputs import SSMTokens, SSMWeights
from .state_verify import check_pool, check_tokens

__all__ = [
    "TILING",
    "BoundaryFolds",
    "ReplayRing",
    "ReplayRows",
    "ReplayTiling",
    "fold_boundaries",
    "fold_boundaries_ref",
    "state_replay",
    "state_replay_ref",
]


@dataclass(frozen=True, slots=True)
class ReplayTiling:
    """How states are split over programs; the choice may change only the order of the sums of an output.

    Args:
        width: columns of head_dim of a program, a power of two.
        num_warps: warps of a program.
        max_registers: registers of a thread, which bound the programs that fit on a multiprocessor.
    """

    width: int
    num_warps: int
    max_registers: int


TILING = ReplayTiling(width=64, num_warps=4, max_registers=128)
_PAD = tl.constexpr(PAD_SLOT)


@triton.jit(do_not_specialize=["max_tokens"])
def _state_replay_kernel(
    y,
    tokens,
    pool,
    slot_stride,
    ring,
    rows,
    checkpoint_factors,
    input_factors,
    max_tokens,
    HEADS: tl.constexpr,
    HEADS_A_GROUP: tl.constexpr,
    D_STATE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    RING: tl.constexpr,
    OWN: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Long because state and inputs stay in registers."""
    release(OVERLAPS)
    PARTS: tl.constexpr = (HEAD_DIM + WIDTH - 1) // WIDTH
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % HEADS
    row = tl.program_id(0) // (PARTS * HEADS)
    slot = tl.load(rows.slots + row).to(tl.int64)
    start = tl.load(rows.cu_tokens + row)
    count = tl.load(rows.cu_tokens + row + 1) - start
    number = tl.load(rows.rings + row).to(tl.int64)
    folded = tl.load(rows.folded + row)
    computed = tl.load(rows.computed + row)
    if slot == _PAD:
        await_launcher(OVERLAPS)
        return

    first = tl.maximum(folded, computed // RING * RING)
    group = head // HEADS_A_GROUP
    n = tl.arange(0, triton.next_power_of_2(D_STATE))
    p = part * WIDTH + tl.arange(0, WIDTH)
    w = tl.arange(0, RING)
    u = tl.arange(0, OWN)
    has_n = n < D_STATE
    has_p = p < HEAD_DIM
    states = pool + slot * slot_stride + head * (D_STATE * HEAD_DIM) + n[:, None] * HEAD_DIM + p[None, :]
    is_state = has_n[:, None] & has_p[None, :]
    state = tl.load(states, mask=is_state, other=0.0).to(tl.float32)  # [d_state, width]
    xs = ring.x + number * ring.x_ring + head * HEAD_DIM + p
    ring_x = tl.load(
        xs[None, :] + ((first + w) % CAPACITY)[:, None] * ring.x_place,
        mask=(w < computed - first)[:, None] & has_p[None, :],
        other=0.0,
    ).to(tl.float32)  # [RING, width]
    own_x = tl.load(
        tokens.x + (start + u).to(tl.int64)[:, None] * tokens.x_stride + (head * HEAD_DIM + p)[None, :],
        mask=(u < count)[:, None] & has_p[None, :],
        other=0.0,
    ).to(tl.float32)  # [OWN, width]
    if first > folded:
        ring_b = ring.B + number * ring.B_ring + group * D_STATE + n
        steps = ring.steps + number * ring.steps_ring + head
        state = fold_entries(state, pool, xs, ring_b, steps, ring, folded, first, has_n, has_p, HEADS, CAPACITY, RING)
        tl.store(states, state.to(pool.dtype.element_ty), mask=is_state)

    await_launcher(OVERLAPS)
    for t in range(0, count):
        token = tl.cast(start + t, tl.int64)
        c = tl.load(tokens.C + token * tokens.C_stride + group * D_STATE + n, mask=has_n, other=0.0).to(tl.float32)
        line = (tl.cast(row, tl.int64) * max_tokens + t) * HEADS + head
        of_ring = tl.load(input_factors + line * (RING + OWN) + w)
        of_own = tl.load(input_factors + line * (RING + OWN) + RING + u)
        out = tl.load(checkpoint_factors + line) * tl.sum(state * c[:, None], axis=0)
        out += tl.sum(of_ring[:, None] * ring_x, axis=0)
        # A later token may hold NaN, which a factor of 0 would not keep out.
        out += tl.sum(of_own[:, None] * tl.where((u <= t)[:, None], own_x, 0.0), axis=0)
        tl.store(y + token * (HEADS * HEAD_DIM) + head * HEAD_DIM + p, out, mask=has_p)


def state_replay(
    tokens: SSMTokens,
    weights: SSMWeights,
    ssm_pool: Tensor,
    ring: ReplayRing,
    rows: ReplayRows,
    ring_len: int,
    tiling: ReplayTiling | None = None,
) -> Tensor:
    """Fold what may be folded, compute the outputs of each row's tokens, and append the tokens to its ring, in place.

    With boundary = computed // ring_len * ring_len, a row with boundary > folded first brings the ring's entries from
    `folded` to `boundary` into its checkpoint, which the caller then counts as folded up to there. No other state is
    written. A checkpoint's bits depend on its tokens alone, not on the steps that fed them. A padding row and tokens
    past the last row give zeros and touch nothing.

    Args:
        ssm_pool: [slots, heads, d_state, head_dim]; a slot's state contiguous.
        ring: Of the inputs' dtypes; at least ring_len + 2 * max_tokens - 1 positions.
        ring_len: Positions from one fold to the next, a power of two from 4 on.
        tiling: The fastest by default.

    Returns:
        [tokens, heads, head_dim] in x's dtype.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `state_replay_ref`, which also computes float64. CUDA-graph safe: no host sync, two launches, grids fixed
    at capture.
    """
    check_tokens(tokens, weights)
    check_pool(tokens, ssm_pool)
    check_replay_rows(rows, ssm_pool.device)
    check_ring(ring, tokens, ring_len, rows.max_tokens)
    if not launches_kernel(ssm_pool) or not is_computed_in_fp32(tokens.x, ssm_pool):
        return state_replay_ref(tokens, weights, ssm_pool, ring, rows, ring_len)
    y = torch.empty_like(tokens.x, memory_format=torch.contiguous_format)
    if y.numel() > 0:
        factors = append_and_weigh(y, tokens, weights, ring, rows, ring_len)
        if rows.slots.shape[0] > 0:
            _launch(y, tokens, ssm_pool, ring, rows, factors, ring_len, tiling or TILING)
    return y


def _launch(
    y: Tensor,
    tokens: SSMTokens,
    ssm_pool: Tensor,
    ring: ReplayRing,
    rows: ReplayRows,
    factors: ReplayCoefficients,
    ring_len: int,
    tiling: ReplayTiling,
) -> None:
    heads, head_dim = tokens.x.shape[1:]
    width = min(tiling.width, triton.next_power_of_2(head_dim))
    _state_replay_kernel[(rows.slots.shape[0] * heads * triton.cdiv(head_dim, width),)](
        y=y,
        tokens=kernel_tokens(tokens),
        pool=ssm_pool,
        slot_stride=ssm_pool.stride(0),
        ring=kernel_ring(ring),
        rows=kernel_rows(rows),
        checkpoint_factors=factors.checkpoint,
        input_factors=factors.inputs,
        max_tokens=rows.max_tokens,
        HEADS=heads,
        HEADS_A_GROUP=heads // tokens.B.shape[1],
        D_STATE=tokens.B.shape[2],
        HEAD_DIM=head_dim,
        CAPACITY=ring.capacity,
        RING=ring_len,
        OWN=factors.own,
        WIDTH=width,
        num_warps=tiling.num_warps,
        maxnreg=tiling.max_registers,
        **overlapping(ssm_pool.device),
    )
