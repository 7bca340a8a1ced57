"""Outputs of decode and verify steps whose states are replayed: a state is read once, and written only by a fold.

    y_t = factor_t (C_t S) + sum over the tokens j since the base S of factor_tj x_j

`coefficients` computes the factors and appends B and time steps; then one kernel does the rest: that of `outputs_sums`
or `outputs_mma` on a Hopper GPU, or the one here, in Triton, for every shape and device. If a request's kept tokens
have passed a multiple of the ring's length, it folds them first: S = exp(dt * A) * S + B (dt * x), token by token as
`state_verify` does or, on a Hopper GPU where x and B are bf16, a period at once; rounded to the pool's dtype at every
multiple. So a base's bits depend on its tokens alone. It appends x last, and may overwrite what it has folded.

Layout: a program owns one request and `width` columns of one head's state [d_state, head_dim], all of d_state: no sum
crosses programs. Graph safe: no host sync, two launches, grids fixed by the shapes of the arguments.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....kernels.kernel_launches import is_computed_in_fp32, launches_kernel
from ....kernels.overlap import await_launcher, overlapping, release
from ...batches import PAD_SLOT, ReplayBatch
from ...replay.fold import fold_entries
from ...replay.ring import ReplayRing, check_replay_batch, check_ring, kernel_ring, kernel_rows
from ..inputs import SSMTokens, SSMWeights, check_pool, check_tokens, kernel_tokens
from .coefficients import append_and_weigh
from .reference import state_replay_ref
from .tiling import ReplayTiling, choose_tiling

_PAD = tl.constexpr(PAD_SLOT)


def state_replay(
    tokens: SSMTokens,
    weights: SSMWeights,
    ssm_pool: Tensor,
    ring: ReplayRing,
    rows: ReplayBatch,
    ring_len: int,
    *,
    after_conv: bool = False,
) -> Tensor:
    """Fold due ring entries, compute the outputs of each request's tokens, and append them to its ring, in place.

    With boundary = computed // ring_len * ring_len, a request with boundary > folded first folds the ring's entries
    from `folded` to `boundary` into its base; the caller then counts them as folded. No other state is written. The
    bits of a base depend on its tokens alone. Padding requests and tokens past the last request give zeros and write
    nothing.

    Args:
        ssm_pool: [slots, heads, d_state, head_dim]; a slot's state contiguous.
        ring: Of the inputs' dtypes; at least ring_len + 2 * max_tokens - 1 positions, of x ring_len + max_tokens - 1.
        ring_len: Positions from one fold to the next, a power of two from 4 on.
        after_conv: True if `conv_verify` was launched right before and wrote x, B and C: all else is read concurrently.

    Returns:
        [tokens, heads, head_dim] in x's dtype.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `state_replay_ref`, which also computes float64. CUDA-graph safe: no host sync, two launches, grids fixed
    at capture.
    """
    check_tokens(tokens, weights)
    check_pool(tokens, ssm_pool)
    check_replay_batch(rows, ssm_pool.device)
    check_ring(ring, tokens.x, tokens.B, ring_len, rows.max_tokens)
    if not launches_kernel(ssm_pool) or not is_computed_in_fp32(tokens.x, ssm_pool):
        return state_replay_ref(tokens, weights, ssm_pool, ring, rows, ring_len)
    tiling = choose_tiling(tokens, ssm_pool, rows.max_tokens)
    return replay_tiled(tokens, weights, ssm_pool, ring, rows, ring_len, tiling, after_conv=after_conv)


def replay_tiled(
    tokens: SSMTokens,
    weights: SSMWeights,
    ssm_pool: Tensor,
    ring: ReplayRing,
    rows: ReplayBatch,
    ring_len: int,
    tiling: ReplayTiling,
    *,
    after_conv: bool = False,
) -> Tensor:
    """Compute with this tiling's kernel; `state_replay` checks and chooses."""
    y = torch.empty_like(tokens.x, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y
    factors = append_and_weigh(y, tokens, weights, ring, rows, ring_len, after_conv=after_conv)
    num_rows, heads, head_dim = rows.slots.shape[0], *tokens.x.shape[1:]
    if num_rows == 0:
        return y
    arguments = {
        "y": y,
        "tokens": kernel_tokens(tokens),
        "pool": ssm_pool,
        "slot_stride": ssm_pool.stride(0),
        "ring": kernel_ring(ring),
        "rows": kernel_rows(rows),
        "base_factors": factors.base,
        "input_factors": factors.inputs,
        "max_tokens": rows.max_tokens,
        "HEADS": heads,
        "HEADS_A_GROUP": heads // tokens.B.shape[1],
        "D_STATE": tokens.B.shape[2],
        "HEAD_DIM": head_dim,
        "CAPACITY": ring.capacity,
        "X_CAPACITY": ring.x_capacity,
        "RING": ring_len,
        "OWN": factors.own,
        "num_warps": tiling.num_warps,
        "maxnreg": tiling.max_registers,
    }
    _launcher(tiling)(arguments, num_rows * heads, tiling)
    return y


def _launcher(tiling: ReplayTiling) -> Callable[..., None]:
    """Return the launch function of a tiling's kernel; imports Gluon on demand."""
    if tiling.kernel == "sums":
        from .outputs_sums import replay_by_sums as launch
    elif tiling.kernel == "mma":
        from .outputs_mma import replay_by_mma as launch
    else:
        launch = replay_portably
    return launch


@triton.jit(do_not_specialize=["max_tokens"])
def _state_replay_kernel(
    y, tokens, pool, slot_stride, ring, rows, base_factors, input_factors, max_tokens,
    HEADS: tl.constexpr, HEADS_A_GROUP: tl.constexpr, D_STATE: tl.constexpr, HEAD_DIM: tl.constexpr,
    CAPACITY: tl.constexpr, X_CAPACITY: tl.constexpr, RING: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Long because state and inputs stay in registers."""
    release(OVERLAPS)
    PARTS: tl.constexpr = (HEAD_DIM + WIDTH - 1) // WIDTH
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % HEADS
    row = tl.program_id(0) // (PARTS * HEADS)
    slot = tl.load(rows.slots + row).to(tl.int64)
    start = tl.load(rows.cu_tokens + row)
    count = tl.load(rows.cu_tokens + row + 1) - start
    number = tl.load(rows.buffers + row).to(tl.int64)
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
        xs[None, :] + ((first + w) % X_CAPACITY)[:, None] * ring.x_stride,
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
    tl.store(xs[None, :] + ((computed + u) % X_CAPACITY)[:, None] * ring.x_stride, own_x, mask=is_own)
    own_x = own_x.to(tl.float32)

    await_launcher(OVERLAPS)
    for t in range(0, count):
        token = tl.cast(start + t, tl.int64)
        c = tl.load(tokens.C + token * tokens.C_stride + group * D_STATE + n, mask=has_n, other=0.0).to(tl.float32)
        line = (tl.cast(row, tl.int64) * max_tokens + t) * HEADS + head
        of_ring = tl.load(input_factors + line * (RING + OWN) + w)
        of_own = tl.load(input_factors + line * (RING + OWN) + RING + u, mask=u < count, other=0.0)
        out = tl.load(base_factors + line) * tl.sum(state * c[:, None], axis=0)
        out += tl.sum(of_ring[:, None] * ring_x, axis=0)
        # A later token may hold NaN, which a factor of 0 would not keep out.
        out += tl.sum(of_own[:, None] * tl.where((u <= t)[:, None], own_x, 0.0), axis=0)
        tl.store(y + token * (HEADS * HEAD_DIM) + head * HEAD_DIM + p, out, mask=has_p)


def replay_portably(arguments: dict[str, Any], num_heads: int, tiling: ReplayTiling) -> None:
    """Fold, append x and write the outputs, in place, right after `append_and_weigh`.

    Args:
        arguments: What all kernels of outputs take.
        num_heads: Heads of all requests.
    """
    head_dim = arguments["HEAD_DIM"]
    width = min(tiling.width, triton.next_power_of_2(head_dim))
    _state_replay_kernel[(num_heads * triton.cdiv(head_dim, width),)](
        **arguments, WIDTH=width, enable_fp_fusion=True, **overlapping(arguments["pool"].device)
    )
