"""Outputs of decode and verify steps whose states are replayed: a state is read once, and written only by a fold.

    kept = exp(g) S;  w = r beta (v - r k kept);  S = kept + k w;  y = s q S

Everything that a token reads of the state S before it is a sum over the base and the tokens since, each of which the
ring holds as its key k and its corrected value w: only the tokens of the step itself follow from one another.
`factors` computes what the columns of a head share and appends keys and log decays; then one kernel does the rest: that
of `outputs_sums` on a Hopper GPU, or the one here, in Triton, for every shape and device.

A period is the positions from one multiple of the ring's length to the next. If kept tokens have passed the end of a
period, they are folded first, as the boundary fold does, and the base is stored; if the step's own tokens pass one,
they are folded in registers. So each token is computed from the base of its period: the bits of outputs, ring and bases
depend on the request's tokens alone.

Layout: a program owns one request and `width` columns of value_dim of one head's state [key_dim, value_dim], all of
key_dim: no sum crosses programs. Graph safe: no host sync, two launches, grids fixed by the shapes of the arguments.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....kernels.kernel_launches import is_computed_in_fp32, launches_kernel
from ....kernels.overlap import await_launcher, overlapping, release
from ....kernels.reference import compute_dtype
from ...batches import PAD_SLOT, ReplayBatch
from ...replay.fold import fold_entries
from ...replay.ring import ReplayRing, check_replay_batch, check_ring, kernel_ring, kernel_rows
from ..inputs import DeltaTokens, GateWeights, check_pool, check_tokens, kernel_tokens
from .factors import NUM_SCALARS, ReplayFactors, append_and_weigh
from .reference import delta_replay_ref
from .tiling import ReplayTiling, choose_tiling

_PAD = tl.constexpr(PAD_SLOT)
_SCALARS = tl.constexpr(NUM_SCALARS)


def delta_replay(
    tokens: DeltaTokens,
    gates: GateWeights,
    pool: Tensor,
    ring: ReplayRing,
    rows: ReplayBatch,
    ring_len: int,
    tiling: ReplayTiling | None = None,
    *,
    after_conv: bool = False,
) -> Tensor:
    """Fold due ring entries, compute the outputs of each request's tokens, and append them to its ring, in positions.

    With boundary = computed // ring_len * ring_len, a request with boundary > folded first folds the ring's entries
    from `folded` to `boundary` into its base; the caller then counts them as folded. No other state is written. The
    bits of a base depend on its tokens alone, not on the steps that fed them. Padding requests and tokens past the last
    request give zeros and write nothing.

    Args:
        pool: [slots, value heads, key_dim, value_dim]; a slot's state contiguous.
        ring: x [rings, positions, value heads, value_dim] of the dtype of computation, B [..., key heads, key_dim] of
            the keys'; at least ring_len + 2 * max_tokens - 1 positions, of x ring_len + max_tokens - 1.
        ring_len: Positions from one fold to the next, a power of two from 4 on.
        tiling: Of the kernel of outputs; None chooses the fastest. It must be the same for all steps of a request.
        after_conv: True if `conv_verify` was launched right before and wrote q, k and v: all else is read concurrently.

    Returns:
        [tokens, value heads, value_dim] in v's dtype.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `delta_replay_ref`, which also computes float64. CUDA-graph safe: no host sync, two launches, grids fixed
    at capture.
    """
    check_tokens(tokens, gates)
    check_pool(tokens, pool)
    check_replay_batch(rows, pool.device)
    check_ring(ring, tokens.v[:0].to(compute_dtype(tokens.v)), tokens.k, ring_len, rows.max_tokens)
    if not launches_kernel(pool) or not is_computed_in_fp32(tokens.v, pool):
        return delta_replay_ref(tokens, gates, pool, ring, rows, ring_len)
    y = torch.empty_like(tokens.v, memory_format=torch.contiguous_format)
    if y.numel() > 0:
        factors = append_and_weigh(y, tokens, gates, ring, rows, ring_len, after_conv=after_conv)
        if rows.slots.shape[0] > 0:
            _launch(y, tokens, pool, ring, rows, factors, tiling or choose_tiling(tokens, pool))
    return y


def _launch(
    y: Tensor,
    tokens: DeltaTokens,
    pool: Tensor,
    ring: ReplayRing,
    rows: ReplayBatch,
    factors: ReplayFactors,
    tiling: ReplayTiling,
) -> None:
    heads, value_dim = tokens.v.shape[1:]
    arguments = {
        "y": y,
        "tokens": kernel_tokens(tokens),
        "pool": pool,
        "slot_stride": pool.stride(0),
        "ring": kernel_ring(ring),
        "rows": kernel_rows(rows),
        "scalars": factors.scalars,
        "inputs": factors.inputs,
        "max_tokens": rows.max_tokens,
        "HEADS": heads,
        "TIMES": heads // tokens.k.shape[1],
        "KEY_DIM": tokens.k.shape[2],
        "VALUE_DIM": value_dim,
        "CAPACITY": ring.capacity,
        "X_CAPACITY": ring.x_capacity,
        "RING": factors.inputs.shape[-1],
        "num_warps": tiling.num_warps,
        "maxnreg": tiling.max_registers,
    }
    _launcher(tiling)(arguments, rows.slots.shape[0] * heads, tiling)


def _launcher(tiling: ReplayTiling) -> Callable[..., None]:
    """Return the launch function of a tiling's kernel; imports Gluon on demand."""
    if tiling.kernel == "sums":
        from .outputs_sums import replay_by_sums as launch
    else:
        launch = replay_portably
    return launch


@triton.jit(do_not_specialize=["max_tokens"])
def _delta_replay_kernel(
    y, tokens, pool, slot_stride, ring, rows, scalars, inputs, max_tokens,
    HEADS: tl.constexpr, TIMES: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CAPACITY: tl.constexpr,
    X_CAPACITY: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Long because state and corrected values stay in registers."""
    release(OVERLAPS)
    PARTS: tl.constexpr = (VALUE_DIM + WIDTH - 1) // WIDTH
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
    keys = head // TIMES * KEY_DIM
    n = tl.arange(0, triton.next_power_of_2(KEY_DIM))
    p = part * WIDTH + tl.arange(0, WIDTH)
    has_n = n < KEY_DIM
    has_p = p < VALUE_DIM
    states = pool + slot * slot_stride + head * (KEY_DIM * VALUE_DIM) + n[:, None] * VALUE_DIM + p[None, :]
    is_state = has_n[:, None] & has_p[None, :]
    state = tl.load(states, mask=is_state, other=0.0).to(tl.float32)  # [key_dim, width]
    values = head * VALUE_DIM + p
    xs = ring.x + number * ring.x_ring + values
    bs = ring.B + number * ring.B_ring + keys + n
    steps = ring.steps + number * ring.steps_ring + head
    positions = computed // RING * RING + tl.arange(0, RING)
    written = tl.load(
        xs[None, :] + (positions % X_CAPACITY)[:, None] * ring.x_stride,
        mask=((positions >= first) & (positions < computed))[:, None] & has_p[None, :],
        other=0.0,
    )  # [RING, width]
    if first > folded:
        state = fold_entries(
            state, pool, xs, bs, steps, ring, folded, first, has_n, has_p, HEADS, CAPACITY, X_CAPACITY, RING
        )
        tl.store(states, state.to(pool.dtype.element_ty), mask=is_state)
        tl.debug_barrier()  # what is appended may overwrite what another thread of this program folds

    line = tl.cast(row, tl.int64) * max_tokens * HEADS + head
    scalars += line * _SCALARS
    inputs += line * (2 * RING)
    y += tl.cast(start, tl.int64) * (HEADS * VALUE_DIM) + values
    await_launcher(OVERLAPS)
    w = tl.arange(0, RING)
    for t in range(0, count):
        position = computed + t
        if (t > 0) & (position % RING == 0):
            tl.debug_barrier()  # another thread of this program may have appended what this one folds
            begin = tl.maximum(first, position - RING)
            state = fold_entries(
                state, pool, xs, bs, steps, ring, begin, position, has_n, has_p, HEADS, CAPACITY, X_CAPACITY, RING
            )
            written = tl.zeros_like(written)
        token = tl.cast(start + t, tl.int64)
        k = tl.load(tokens.k + token * tokens.k_stride + keys + n, mask=has_n, other=0.0).to(tl.float32)
        q = tl.load(tokens.q + token * tokens.q_stride + keys + n, mask=has_n, other=0.0).to(tl.float32)
        v = tl.load(tokens.v + token * tokens.v_stride + values, mask=has_p, other=0.0).to(tl.float32)
        held = tl.sum(state * k[:, None], axis=0)
        asked = tl.sum(state * q[:, None], axis=0)
        of_earlier = tl.sum(tl.load(inputs + w)[:, None] * written, axis=0)
        new = tl.fma(v, tl.load(scalars), -tl.fma(held, tl.load(scalars + 1), of_earlier))
        written = tl.where((w == position % RING)[:, None], new[None, :], written)
        of_written = tl.sum(tl.load(inputs + RING + w)[:, None] * written, axis=0)
        out = tl.fma(asked, tl.load(scalars + 2), of_written)
        tl.store(y + t * (HEADS * VALUE_DIM), out.to(y.dtype.element_ty), mask=has_p)
        tl.store(xs + position % X_CAPACITY * ring.x_stride, new, mask=has_p)
        scalars += HEADS * _SCALARS
        inputs += HEADS * 2 * RING


def replay_portably(arguments: dict[str, Any], num_heads: int, tiling: ReplayTiling) -> None:
    """Fold, append corrected values and write the outputs, in place, right after `append_and_weigh`.

    Args:
        arguments: What all kernels of outputs take.
        num_heads: Value heads of all requests.
    """
    value_dim = arguments["VALUE_DIM"]
    width = min(tiling.width, triton.next_power_of_2(value_dim))
    _delta_replay_kernel[(num_heads * triton.cdiv(value_dim, width),)](
        **arguments, WIDTH=width, enable_fp_fusion=True, **overlapping(arguments["pool"].device)
    )
