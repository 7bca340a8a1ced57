"""Outputs of decode and verify steps whose states are replayed: a state is read once, and written only by a fold.

    kept = exp(g) S;  w = r beta (v - r k kept);  S = kept + k w;  y = s q S

Everything that a token reads of the state S before it is a sum over the base and the tokens since, each of which the
ring holds as its key k and its corrected value w: only the tokens of the step itself follow from one another.
`factors` computes what the columns of a head share and appends keys and log decays; then one kernel does the rest.

If a request's kept tokens have passed a multiple of the ring's length, the kernel folds them first, as the boundary
fold does, and stores the base. If the step's own tokens pass one, it folds there as well, in registers: a token's sums
begin at the last multiple before it, whatever was computed with it. So the bits of w, and of every base, depend on the
request's tokens alone. Of S no sum but those over key_dim is taken, by one compiled kernel for any number of tokens.

Layout: a program owns one request and `width` columns of value_dim of one head's state [key_dim, value_dim], all of
key_dim: no sum crosses programs. Graph safe: no host sync, two launches, grids fixed by the shapes of the arguments.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....kernels.kernel_language import only_if
from ....kernels.kernel_launches import INTERPRETED, is_computed_in_fp32, is_hopper, launches_kernel
from ....kernels.overlap import await_launcher, overlapping, release
from ....kernels.reference import compute_dtype
from ...batches import PAD_SLOT, ReplayBatch
from ...replay.fold import fold_periods
from ...replay.ring import ReplayRing, check_replay_batch, check_ring, kernel_ring, kernel_rows
from ..inputs import DeltaTokens, GateWeights, check_pool, check_tokens, kernel_tokens
from .factors import NUM_SCALARS, ReplayFactors, append_and_weigh
from .reference import delta_replay_ref

_PAD = tl.constexpr(PAD_SLOT)
_SCALARS = tl.constexpr(NUM_SCALARS)


@dataclass(frozen=True, slots=True)
class ReplayTiling:
    """Columns of a program and launch settings; may change only the order of sums over key_dim.

    Args:
        width: columns of value_dim of a program, a power of two.
        max_registers: registers of a thread, which bound the programs that fit on a multiprocessor.
    """

    width: int
    num_warps: int
    max_registers: int


TILING = ReplayTiling(width=32, num_warps=1, max_registers=255)
_LARGEST_TILE = 128 * 32
"""Elements of a state that a warp holds in registers."""


def replays_fast(key_dim: int) -> bool:
    """Return True if the kernel was measured to be fast on the current device, for keys of so many elements."""
    if not torch.cuda.is_available() or INTERPRETED or triton.next_power_of_2(key_dim) > _LARGEST_TILE // 16:
        return False
    return is_hopper(torch.device("cuda", torch.cuda.current_device()))


def delta_replay(
    tokens: DeltaTokens,
    gates: GateWeights,
    pool: Tensor,
    ring: ReplayRing,
    rows: ReplayBatch,
    ring_len: int,
    tiling: ReplayTiling = TILING,
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
            _launch(y, tokens, pool, ring, rows, factors, tiling)
    return y


@triton.jit
def _load_token(tokens, token, exists, keys, scalars, inputs, head, n, p, w, has_n, has_p, VALUE_DIM, RING):
    """Load a token's k, q and v as they are stored, and its factors; zeros if it does not exist."""
    at = tl.cast(token, tl.int64)
    k = tl.load(tokens.k + at * tokens.k_stride + keys + n, mask=only_if(exists, has_n), other=0.0)
    q = tl.load(tokens.q + at * tokens.q_stride + keys + n, mask=only_if(exists, has_n), other=0.0)
    v = tl.load(tokens.v + at * tokens.v_stride + head * VALUE_DIM + p, mask=only_if(exists, has_p), other=0.0)
    of_keys = tl.load(inputs + w, mask=only_if(exists, w < RING), other=0.0)
    of_queries = tl.load(inputs + RING + w, mask=only_if(exists, w < RING), other=0.0)
    of_value = tl.load(scalars, mask=exists, other=0.0)
    of_held = tl.load(scalars + 1, mask=exists, other=0.0)
    of_asked = tl.load(scalars + 2, mask=exists, other=0.0)
    of_written = tl.load(scalars + 3, mask=exists, other=0.0)
    return k, q, v, of_keys, of_queries, of_value, of_held, of_asked, of_written


@triton.jit(do_not_specialize=["max_tokens"])
def _delta_replay_kernel(
    y,
    tokens,
    pool,
    slot_stride,
    ring,
    rows,
    scalars,
    inputs,
    max_tokens,
    HEADS: tl.constexpr,
    TIMES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    X_CAPACITY: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
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
    key_head = head // TIMES
    n = tl.arange(0, triton.next_power_of_2(KEY_DIM))
    p = part * WIDTH + tl.arange(0, WIDTH)
    w = tl.arange(0, RING)
    has_n = n < KEY_DIM
    has_p = p < VALUE_DIM
    states = pool + slot * slot_stride + head * (KEY_DIM * VALUE_DIM) + n[:, None] * VALUE_DIM + p[None, :]
    is_state = has_n[:, None] & has_p[None, :]
    state = tl.load(states, mask=is_state, other=0.0).to(tl.float32)  # [key_dim, width]
    xs = ring.x + number * ring.x_ring + head * VALUE_DIM + p
    bs = ring.B + number * ring.B_ring + key_head * KEY_DIM + n
    steps = ring.steps + number * ring.steps_ring + head
    positions = computed // RING * RING + w
    written = tl.load(
        xs[None, :] + (positions % X_CAPACITY)[:, None] * ring.x_stride,
        mask=((positions >= first) & (positions < computed))[:, None] & has_p[None, :],
        other=0.0,
    )  # [RING, width]
    if first > folded:
        state = fold_periods(
            state, pool, xs, bs, steps, ring, folded, first, has_n, has_p, HEADS, CAPACITY, X_CAPACITY, RING
        )
        tl.store(states, state.to(pool.dtype.element_ty), mask=is_state)
        tl.debug_barrier()  # what is appended may overwrite what another thread of this program folds

    line = tl.cast(row, tl.int64) * max_tokens * HEADS + head
    scalars += line * _SCALARS
    inputs += line * (2 * RING)
    keys = key_head * KEY_DIM
    y += tl.cast(start, tl.int64) * (HEADS * VALUE_DIM) + head * VALUE_DIM + p
    await_launcher(OVERLAPS)
    following = _load_token(
        tokens, start, count > 0, keys, scalars, inputs, head, n, p, w, has_n, has_p, VALUE_DIM, RING
    )
    for t in range(0, count):
        k, q, v, of_keys, of_queries, of_value, of_held, of_asked, of_written = following
        scalars += HEADS * _SCALARS
        inputs += HEADS * 2 * RING
        following = _load_token(
            tokens, start + t + 1, t + 1 < count, keys, scalars, inputs, head, n, p, w, has_n, has_p, VALUE_DIM, RING
        )
        position = computed + t
        if (t > 0) & (position % RING == 0):
            tl.debug_barrier()  # another thread of this program may have appended what this one folds
            begin = tl.maximum(first, position - RING)
            state = fold_periods(
                state, pool, xs, bs, steps, ring, begin, position, has_n, has_p, HEADS, CAPACITY, X_CAPACITY, RING
            )
            written = tl.zeros_like(written)
        held = tl.sum(state * k.to(tl.float32)[:, None], axis=0)
        asked = tl.sum(state * q.to(tl.float32)[:, None], axis=0)
        of_earlier = tl.sum(of_keys[:, None] * written, axis=0)
        out = tl.fma(asked, of_asked, tl.sum(of_queries[:, None] * written, axis=0))
        new = tl.fma(v.to(tl.float32), of_value, -tl.fma(held, of_held, of_earlier))
        out = tl.fma(new, of_written, out)
        written = tl.where((w == position % RING)[:, None], new[None, :], written)
        tl.store(y + t * (HEADS * VALUE_DIM), out.to(y.dtype.element_ty), mask=has_p)
        tl.store(xs + position % X_CAPACITY * ring.x_stride, new, mask=has_p)


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
    key_heads, key_dim = tokens.k.shape[1:]
    fitting = max(1, _LARGEST_TILE * tiling.num_warps // triton.next_power_of_2(key_dim))
    width = min(tiling.width, triton.next_power_of_2(value_dim), fitting)
    _delta_replay_kernel[(rows.slots.shape[0] * heads * triton.cdiv(value_dim, width),)](
        y=y,
        tokens=kernel_tokens(tokens),
        pool=pool,
        slot_stride=pool.stride(0),
        ring=kernel_ring(ring),
        rows=kernel_rows(rows),
        scalars=factors.scalars,
        inputs=factors.inputs,
        max_tokens=rows.max_tokens,
        HEADS=heads,
        TIMES=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        CAPACITY=ring.capacity,
        X_CAPACITY=ring.x_capacity,
        RING=factors.inputs.shape[-1],
        WIDTH=width,
        num_warps=tiling.num_warps,
        maxnreg=tiling.max_registers,
        enable_fp_fusion=True,
        **overlapping(pool.device),
    )
