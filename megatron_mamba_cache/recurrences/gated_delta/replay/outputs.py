"""Outputs of decode and verify steps with replay: each state is read once, and written only when entries are folded.

    kept = exp(g) S;  w = r beta (v - r k kept);  S = kept + k w;  y = s q S

r and s are the inverse lengths of k and q, s also divided by sqrt(key_dim). The ring holds the key k, the corrected
value w and the log decay g of each token, so products of a later key or query with the state are sums over the base and
the tokens since: only the tokens of one step depend on each other. `factors` computes the factors that all columns of a
head share, and appends keys and log decays to the ring. A second kernel does the rest: on a Hopper GPU, the one in
`outputs_sums`, otherwise the Triton kernel here, which supports all shapes and devices.

A period is the positions from one multiple of `ring_len` to the next. If the computed tokens have reached the end of a
period since the last fold, the kernel first folds ring entries into the base, as `fold_boundaries` does, and stores it.
If the step's own tokens reach the end of a period, it folds them in registers, and the next step stores that base. Each
token is thus computed from the base of its own period, so the bits of outputs, ring entries and bases depend only on
the request's tokens.

Each program has one request and `width` columns of one head's state [key_dim, value_dim], with all of key_dim, so no
sum spans programs. Safe in CUDA graphs: no host sync, two launches, and the grids depend only on the shapes of the
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
from ....kernels.reference import compute_dtype
from ...batches import PAD_SLOT, ReplayBatch
from ...replay.fold import fold_entries
from ...replay.ring import ReplayRing, check_replay_batch, check_ring, kernel_ring, kernel_rows, load_request
from ...stochastic_rounding import check_seed
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
    seed: int | None = None,
) -> Tensor:
    """Compute the outputs of each request's tokens and append the tokens to its ring; fold older ring entries if due.

    With boundary = computed // ring_len * ring_len, a request with folded < boundary first folds the ring entries from
    `folded` to `boundary` - 1 into its base. The caller must then set `folded` to `boundary`. No other state is
    written. The bits of a base depend only on its tokens. For padding, outputs are zeros and nothing is written.

    Args:
        pool: [slots, value heads, key_dim, value_dim]; each slot is contiguous.
        ring: x [rings, x_capacity, value heads, value_dim] in float32 (float64 if `v` is), B [rings, capacity, key
            heads, key_dim] in the dtype of `k`; capacity must be at least ring_len + 2 * max_tokens - 1, and x_capacity
            at least ring_len + max_tokens - 1.
        ring_len: Number of tokens between two folds; a power of two, at least 4.
        tiling: Output kernel and its sizes; None: the fastest. All steps of a request must use the same kernel.
        after_conv: True if the previous launch is the `conv_verify` of q, k and v; other inputs are then read early.
        seed: Seed of the layer for stochastic rounding to an fp16 pool; None: round to nearest.

    Returns:
        [tokens, value heads, value_dim] in the dtype of `v`.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `delta_replay_ref`, which runs for float64 inputs. CUDA-graph safe: no host sync, two launches, grids
    fixed at capture.
    """
    check_tokens(tokens, gates)
    check_pool(tokens, pool)
    check_replay_batch(rows, pool.device)
    check_seed(pool, seed)
    check_ring(ring, tokens.v[:0].to(compute_dtype(tokens.v)), tokens.k, ring_len, rows.max_tokens)
    if not launches_kernel(pool) or not is_computed_in_fp32(tokens.v, pool):
        return delta_replay_ref(tokens, gates, pool, ring, rows, ring_len, seed)
    y = torch.empty_like(tokens.v, memory_format=torch.contiguous_format)
    if y.numel() > 0:
        factors = append_and_weigh(y, tokens, gates, ring, rows, ring_len, after_conv=after_conv)
        if rows.slots.shape[0] > 0:
            _launch(y, tokens, pool, ring, rows, factors, tiling or choose_tiling(tokens, pool), seed)
    return y


def _launch(
    y: Tensor,
    tokens: DeltaTokens,
    pool: Tensor,
    ring: ReplayRing,
    rows: ReplayBatch,
    factors: ReplayFactors,
    tiling: ReplayTiling,
    seed: int | None,
) -> None:
    heads, value_dim = tokens.v.shape[1:]
    arguments = {
        "y": y,
        "tokens": kernel_tokens(tokens),
        "pool": pool,
        "slot_stride": pool.stride(0),
        "seed": seed,
        "ring": kernel_ring(ring),
        "rows": kernel_rows(rows),
        "scalars": factors.scalars,
        "inputs": factors.inputs,
        "max_tokens": rows.max_tokens,
        "HEADS": heads,
        "HEADS_A_KEY": heads // tokens.k.shape[1],
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
    """Return the function that launches the kernel of `tiling`; Gluon is imported only if needed."""
    if tiling.kernel == "sums":
        from .outputs_sums import replay_by_sums as launch
    else:
        launch = replay_portably
    return launch


@triton.jit(do_not_specialize=["max_tokens"])
def _delta_replay_kernel(
    y, tokens, pool, slot_stride, seed, ring, rows, scalars, inputs, max_tokens,
    HEADS: tl.constexpr, HEADS_A_KEY: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CAPACITY: tl.constexpr, X_CAPACITY: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Replay one request and WIDTH columns of one head. Long because state and corrected values stay in registers."""
    release(OVERLAPS)
    PARTS: tl.constexpr = (VALUE_DIM + WIDTH - 1) // WIDTH
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % HEADS
    row = tl.program_id(0) // (PARTS * HEADS)
    slot, start, count, number, folded, computed = load_request(rows, row)
    if slot == _PAD:
        await_launcher(OVERLAPS)
        return

    first = tl.maximum(folded, computed // RING * RING)
    keys = head // HEADS_A_KEY * KEY_DIM
    n = tl.arange(0, triton.next_power_of_2(KEY_DIM))
    p = part * WIDTH + tl.arange(0, WIDTH)
    has_n = n < KEY_DIM
    has_p = p < VALUE_DIM
    states = pool + slot * slot_stride + head * (KEY_DIM * VALUE_DIM) + n[:, None] * VALUE_DIM + p[None, :]
    is_state = has_n[:, None] & has_p[None, :]
    state = tl.load(states, mask=is_state, other=0.0).to(tl.float32)  # [key_dim, width]
    in_states = head * KEY_DIM + n[:, None]
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
            state, pool, seed, in_states, p[None, :], xs, bs, steps, ring, folded, first, has_n, has_p,
            HEADS, CAPACITY, X_CAPACITY, RING,
        )  # fmt: skip
        tl.store(states, state.to(pool.dtype.element_ty), mask=is_state)
        tl.debug_barrier()  # appended values may overwrite entries that other threads still fold

    line = tl.cast(row, tl.int64) * max_tokens * HEADS + head
    scalars += line * _SCALARS
    inputs += line * (2 * RING)
    y += tl.cast(start, tl.int64) * (HEADS * VALUE_DIM) + values
    await_launcher(OVERLAPS)
    j = tl.arange(0, RING)
    for t in range(0, count):
        position = computed + t
        if (t > 0) & (position % RING == 0):
            tl.debug_barrier()  # other threads may have appended the entries that this thread folds
            begin = tl.maximum(first, position - RING)
            state = fold_entries(
                state, pool, seed, in_states, p[None, :], xs, bs, steps, ring, begin, position, has_n, has_p,
                HEADS, CAPACITY, X_CAPACITY, RING,
            )  # fmt: skip
            written = tl.zeros_like(written)
        token = tl.cast(start + t, tl.int64)
        k = tl.load(tokens.k + token * tokens.k_stride + keys + n, mask=has_n, other=0.0).to(tl.float32)
        q = tl.load(tokens.q + token * tokens.q_stride + keys + n, mask=has_n, other=0.0).to(tl.float32)
        v = tl.load(tokens.v + token * tokens.v_stride + values, mask=has_p, other=0.0).to(tl.float32)
        held = tl.sum(state * k[:, None], axis=0)
        asked = tl.sum(state * q[:, None], axis=0)
        of_earlier = tl.sum(tl.load(inputs + j)[:, None] * written, axis=0)
        new = tl.fma(v, tl.load(scalars), -tl.fma(held, tl.load(scalars + 1), of_earlier))
        written = tl.where((j == position % RING)[:, None], new[None, :], written)
        of_written = tl.sum(tl.load(inputs + RING + j)[:, None] * written, axis=0)
        out = tl.fma(asked, tl.load(scalars + 2), of_written)
        tl.store(y + t * (HEADS * VALUE_DIM), out.to(y.dtype.element_ty), mask=has_p)
        tl.store(xs + position % X_CAPACITY * ring.x_stride, new, mask=has_p)
        scalars += HEADS * _SCALARS
        inputs += HEADS * 2 * RING


def replay_portably(arguments: dict[str, Any], num_heads: int, tiling: ReplayTiling) -> None:
    """Launch the Triton kernel, which folds, appends x and writes the outputs; call it right after `append_and_weigh`.

    Args:
        arguments: Arguments that are common to all output kernels.
        num_heads: Total number of value heads over all requests.
    """
    value_dim = arguments["VALUE_DIM"]
    width = min(tiling.width, triton.next_power_of_2(value_dim))
    _delta_replay_kernel[(num_heads * triton.cdiv(value_dim, width),)](
        **arguments, WIDTH=width, enable_fp_fusion=True, **overlapping(arguments["pool"].device)
    )
