"""The outputs of replayed states in Triton, for every shape and device; see `state_replay`.

Layout: a program owns one row and `width` columns of head_dim of one head's state [d_state, head_dim], all of d_state:
no sum crosses programs. Grid: a program for each row, head and width. Graph safe: no host sync, one launch, grid fixed
by the shapes of the arguments.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...kernels.overlap import await_launcher, overlapping, release
from ..prefill_rows import PAD_SLOT
from .replay_coefficients import ReplayCoefficients
from .replay_fold import fold_entries
from .replay_rows import ReplayRing, ReplayRows
from .replay_tiling import ReplayTiling
from .replay_views import kernel_ring, kernel_rows, kernel_tokens
from .ssm_inputs import SSMTokens

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
    X_CAPACITY: tl.constexpr,
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
        xs[None, :] + ((first + w) % X_CAPACITY)[:, None] * ring.x_place,
        mask=(w < computed - first)[:, None] & has_p[None, :],
        other=0.0,
    ).to(tl.float32)  # [RING, width]
    is_own = (u < count)[:, None] & has_p[None, :]
    own_x = tl.load(
        tokens.x + (start + u).to(tl.int64)[:, None] * tokens.x_stride + (head * HEAD_DIM + p)[None, :],
        mask=is_own,
        other=0.0,
    )  # [OWN, width]
    if first > folded:
        ring_b = ring.B + number * ring.B_ring + group * D_STATE + n
        steps = ring.steps + number * ring.steps_ring + head
        state = fold_entries(
            state, pool, xs, ring_b, steps, ring, folded, first, has_n, has_p, HEADS, CAPACITY, X_CAPACITY, RING
        )
        tl.store(states, state.to(pool.dtype.element_ty), mask=is_state)
        tl.debug_barrier()  # what is appended may overwrite what another thread of this program folds
    tl.store(xs[None, :] + ((computed + u) % X_CAPACITY)[:, None] * ring.x_place, own_x, mask=is_own)
    own_x = own_x.to(tl.float32)

    await_launcher(OVERLAPS)
    for t in range(0, count):
        token = tl.cast(start + t, tl.int64)
        c = tl.load(tokens.C + token * tokens.C_stride + group * D_STATE + n, mask=has_n, other=0.0).to(tl.float32)
        line = (tl.cast(row, tl.int64) * max_tokens + t) * HEADS + head
        of_ring = tl.load(input_factors + line * (RING + OWN) + w)
        of_own = tl.load(input_factors + line * (RING + OWN) + RING + u, mask=u < count, other=0.0)
        out = tl.load(checkpoint_factors + line) * tl.sum(state * c[:, None], axis=0)
        out += tl.sum(of_ring[:, None] * ring_x, axis=0)
        # A later token may hold NaN, which a factor of 0 would not keep out.
        out += tl.sum(of_own[:, None] * tl.where((u <= t)[:, None], own_x, 0.0), axis=0)
        tl.store(y + token * (HEADS * HEAD_DIM) + head * HEAD_DIM + p, out, mask=has_p)


def replay_portably(
    y: Tensor,
    tokens: SSMTokens,
    ssm_pool: Tensor,
    ring: ReplayRing,
    rows: ReplayRows,
    factors: ReplayCoefficients,
    tiling: ReplayTiling,
) -> None:
    """Fold, append x and write the outputs into `y`, in place; `append_and_weigh` came right before."""
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
        X_CAPACITY=ring.x_capacity,
        RING=factors.ring_len,
        OWN=factors.own,
        WIDTH=width,
        num_warps=tiling.num_warps,
        maxnreg=tiling.max_registers,
        enable_fp_fusion=True,
        **overlapping(ssm_pool.device),
    )
