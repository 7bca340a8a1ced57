"""Outputs of decode and verify steps with replay: each state is read once, and written only when entries are folded.

    y_t = factor_t (C_t S) + sum over the tokens j since the base S of factor_tj x_j

`coefficients` computes the factors and appends B and time steps to the ring. A second kernel does the rest: on a Hopper
GPU, one in `outputs_sums` or `outputs_mma`, otherwise the Triton kernel here, which supports all shapes and devices.

If the number of computed tokens has reached a multiple of `ring_len` since the last fold, the kernel first folds ring
entries into the base: S = exp(dt * A) * S + B (dt * x). It folds one token at a time, as `state_verify` does, or, on a
Hopper GPU with bf16 x and B, one period of `ring_len` tokens at a time. The state is cast to the pool's dtype at every
multiple of `ring_len`, so the bits of a base depend only on its tokens. The kernel appends x last, because x may
overwrite folded entries.

Each program has one request and `width` columns of one head's state [d_state, head_dim], with all of d_state, so no sum
spans programs. Safe in CUDA graphs: no host sync, two launches, and the grids depend only on the shapes of the
arguments.
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
from ...replay.ring import ReplayRing, check_replay_batch, check_ring, kernel_ring, kernel_rows, load_request
from ...stochastic_rounding import check_seed
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
    seed: int | None = None,
) -> Tensor:
    """Compute the outputs of each request's tokens and append the tokens to its ring; fold older ring entries if due.

    With boundary = computed // ring_len * ring_len, a request with folded < boundary first folds the ring entries from
    `folded` to `boundary` - 1 into its base. The caller must then set `folded` to `boundary`. No other state is
    written. The bits of a base depend only on its tokens. For padding, outputs are zeros and nothing is written.

    Args:
        ssm_pool: [slots, heads, d_state, head_dim]; each slot is contiguous.
        ring: Rings in the dtypes of `tokens`; capacity must be at least ring_len + 2 * max_tokens - 1, and x_capacity
            at least ring_len + max_tokens - 1.
        ring_len: Number of tokens between two folds; a power of two, at least 4.
        after_conv: True if the previous launch is the `conv_verify` that computes x, B and C. All other inputs are then
            read before `conv_verify` ends.
        seed: Seed of the layer for stochastic rounding to an fp16 pool; None: round to nearest.

    Returns:
        [tokens, heads, head_dim] in the dtype of `x`.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `state_replay_ref`, which runs for float64 inputs. CUDA-graph safe: no host sync, two launches, grids
    fixed at capture.
    """
    check_tokens(tokens, weights)
    check_pool(tokens, ssm_pool)
    check_replay_batch(rows, ssm_pool.device)
    check_seed(ssm_pool, seed)
    check_ring(ring, tokens.x, tokens.B, ring_len, rows.max_tokens)
    if not launches_kernel(ssm_pool) or not is_computed_in_fp32(tokens.x, ssm_pool):
        return state_replay_ref(tokens, weights, ssm_pool, ring, rows, ring_len, seed)
    tiling = choose_tiling(tokens, ssm_pool, rows.max_tokens)
    return replay_tiled(tokens, weights, ssm_pool, ring, rows, ring_len, tiling, after_conv=after_conv, seed=seed)


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
    seed: int | None = None,
) -> Tensor:
    """Run `state_replay` with the kernel and sizes of `tiling`; the arguments are not checked."""
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
        "seed": seed,
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
    """Return the function that launches the kernel of `tiling`; Gluon is imported only if needed."""
    if tiling.kernel == "sums":
        from .outputs_sums import replay_by_sums as launch
    elif tiling.kernel == "mma":
        from .outputs_mma import replay_by_mma as launch
    else:
        launch = replay_portably
    return launch


@triton.jit(do_not_specialize=["max_tokens"])
def _state_replay_kernel(
    y, tokens, pool, slot_stride, seed, ring, rows, base_factors, input_factors, max_tokens,
    HEADS: tl.constexpr, HEADS_A_GROUP: tl.constexpr, D_STATE: tl.constexpr, HEAD_DIM: tl.constexpr,
    CAPACITY: tl.constexpr, X_CAPACITY: tl.constexpr, RING: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Replay one request and WIDTH columns of one head. Long because state and inputs stay in registers."""
    release(OVERLAPS)
    PARTS: tl.constexpr = (HEAD_DIM + WIDTH - 1) // WIDTH
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % HEADS
    row = tl.program_id(0) // (PARTS * HEADS)
    slot, start, count, number, folded, computed = load_request(rows, row)
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
            state, pool, seed, head * D_STATE + n[:, None], p[None, :], xs, ring_b, steps, ring, folded, first, has_n,
            has_p, HEADS, CAPACITY, X_CAPACITY, RING,
        )  # fmt: skip
        tl.store(states, state.to(pool.dtype.element_ty), mask=is_state)
        tl.debug_barrier()  # the appended x may overwrite entries that other threads still fold
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
        # Later tokens must be masked: if one is NaN, a factor of 0 is not enough.
        out += tl.sum(of_own[:, None] * tl.where((u <= t)[:, None], own_x, 0.0), axis=0)
        tl.store(y + token * (HEADS * HEAD_DIM) + head * HEAD_DIM + p, out, mask=has_p)


def replay_portably(arguments: dict[str, Any], num_heads: int, tiling: ReplayTiling) -> None:
    """Launch the Triton kernel, which folds, appends x and writes the outputs; call it right after `append_and_weigh`.

    Args:
        arguments: Arguments that are common to all output kernels.
        num_heads: Total number of heads over all requests.
    """
    head_dim = arguments["HEAD_DIM"]
    width = min(tiling.width, triton.next_power_of_2(head_dim))
    _state_replay_kernel[(num_heads * triton.cdiv(head_dim, width),)](
        **arguments, WIDTH=width, enable_fp_fusion=True, **overlapping(arguments["pool"].device)
    )
