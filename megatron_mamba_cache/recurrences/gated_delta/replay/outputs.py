"""Outputs of decode and verify steps whose states are replayed: a state is read once, and written only by a fold.

    kept = exp(g) S;  w = r beta (v - r k kept);  S = kept + k w;  y = s q S

Everything that a token reads of the state S before it is a sum over the base and the tokens since, each of which the
ring holds as its key k and its corrected value w: only the tokens of the step itself follow from one another.
`factors` computes what the columns of a head share and appends keys and log decays; then one kernel does the rest.

A period is the positions from one multiple of the ring's length to the next. The tokens of a step are computed a
period at a time. Keys and queries, at their positions in the period, multiply the base on tensor cores: a float32 state
is split into three bf16 tensors, once for all tokens, so that every product is exact. Then token after token sums what
the ring and the tokens before it wrote. If kept tokens have passed the end of a period, they are folded first, as the
boundary fold does, and the base is stored; if the step's own tokens pass one, they are folded in registers. So each
token is computed from the base of its period by one compiled kernel, whatever is computed with it: the bits of y, of w
and of every base depend on the request's tokens alone.

Layout: a program owns one request and `width` columns of value_dim of one head's state [key_dim, value_dim], all of
key_dim, read in slices whose loads are all under way at once: no sum crosses programs. Graph safe: no host sync, two
launches, grids fixed by the shapes of the arguments.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....kernels.kernel_language import appended
from ....kernels.kernel_launches import INTERPRETED, is_computed_in_fp32, is_hopper, launches_kernel
from ....kernels.overlap import await_launcher, overlapping, release
from ....kernels.reference import compute_dtype
from ...batches import PAD_SLOT, ReplayBatch
from ...replay.fold import fold_periods, multiply
from ...replay.ring import ReplayRing, check_replay_batch, check_ring, kernel_ring, kernel_rows
from ...request_tiles import LEAST_WIDTH
from ..inputs import DeltaTokens, GateWeights, check_pool, check_tokens, kernel_tokens
from .factors import NUM_SCALARS, ReplayFactors, append_and_weigh
from .reference import delta_replay_ref

_PAD = tl.constexpr(PAD_SLOT)
_SCALARS = tl.constexpr(NUM_SCALARS)


@dataclass(frozen=True, slots=True)
class ReplayTiling:
    """Columns of a program and launch settings, which change no bit.

    Args:
        width: columns of value_dim of a program, a power of two.
        num_warps: 1 outside of measurements: boundary folds have one, and sum decays in the same order.
        max_registers: registers of a thread, which bound the programs that fit on a multiprocessor.
    """

    width: int
    num_warps: int
    max_registers: int


TILING = ReplayTiling(width=32, num_warps=1, max_registers=255)
_SLICE = 32
"""Rows of a state that are multiplied at once."""
_MOST_KEYS = 256
"""The largest key_dim whose columns fit in registers."""


def replays_fast(key_dim: int) -> bool:
    """Return True if the kernel was measured to be fast on the current device, for keys of so many elements."""
    if not torch.cuda.is_available() or INTERPRETED or key_dim > _MOST_KEYS:
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
def _read(k, q, tile, held, asked):
    """Add the matmuls of keys and of queries [tokens, slice] and a slice of a state, as it is stored, to two sums."""
    if tile.dtype == tl.bfloat16 and k.dtype == tl.bfloat16:
        return tl.dot(k, tile, held), tl.dot(q, tile, asked)
    tile = tile.to(tl.float32)
    return multiply(k, tile, held), multiply(q, tile, asked)


@triton.jit
def _load_slices(states, n, is_column, SLICES: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Return the slices of a state's columns, as they are stored: all loads are under way at once."""
    tiles = ()
    for index in tl.static_range(SLICES):
        key = index * n.shape[0] + n
        is_state = (key < KEY_DIM)[:, None] & is_column
        tiles = appended(tiles, tl.load(states + key[:, None] * VALUE_DIM, mask=is_state, other=0.0))
    return tiles


@triton.jit
def _load_rows(rows, stride, token, is_own, n, index, KEY_DIM: tl.constexpr):
    """Load a slice of the tokens' keys or queries, [tokens, slice]; zeros for tokens of other periods."""
    key = index * n.shape[0] + n
    return tl.load(rows + token * stride + key[None, :], mask=is_own & (key < KEY_DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=["max_tokens"])
def _delta_replay_kernel(
    y, tokens, pool, slot_stride, ring, rows, scalars, inputs, max_tokens,
    HEADS: tl.constexpr, TIMES: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, CAPACITY: tl.constexpr,
    X_CAPACITY: tl.constexpr, RING: tl.constexpr, TOKENS: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr,
    WIDTH: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Long because state and corrected values stay in registers."""
    release(OVERLAPS)
    PARTS: tl.constexpr = (VALUE_DIM + WIDTH - 1) // WIDTH
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % HEADS
    row = tl.program_id(0) // (PARTS * HEADS)
    slot = tl.load(rows.slots + row).to(tl.int64)
    start = tl.load(rows.cu_tokens + row)
    until = tl.load(rows.cu_tokens + row + 1) - start
    number = tl.load(rows.buffers + row).to(tl.int64)
    folded = tl.load(rows.folded + row)
    computed = tl.load(rows.computed + row)
    if slot == _PAD:
        await_launcher(OVERLAPS)
        return

    until += computed
    first = tl.maximum(folded, computed // RING * RING)
    keys = head // TIMES * KEY_DIM
    n = tl.arange(0, SLICE)
    p = part * WIDTH + tl.arange(0, WIDTH)
    w = tl.arange(0, TOKENS)
    has_p = p < VALUE_DIM
    is_column = has_p[None, :]
    states = pool + slot * slot_stride + head * (KEY_DIM * VALUE_DIM) + p[None, :]
    xs = ring.x + number * ring.x_ring + head * VALUE_DIM + p
    bs = ring.B + number * ring.B_ring + keys + n
    steps = ring.steps + number * ring.steps_ring + head
    line = tl.cast(row, tl.int64) * max_tokens * HEADS + head
    scalars += line * _SCALARS
    inputs += line * (2 * RING)
    y += tl.cast(start, tl.int64) * (HEADS * VALUE_DIM) + head * VALUE_DIM + p
    base = folded
    position = computed
    for period in range(computed // RING, tl.maximum((until - 1) // RING, computed // RING) + 1):
        begin = period * RING
        tiles = _load_slices(states, n, is_column, SLICES, KEY_DIM, VALUE_DIM)
        positions = begin + w
        written = tl.load(
            xs[None, :] + (positions % X_CAPACITY)[:, None] * ring.x_stride,
            mask=((positions >= first) & (positions < computed))[:, None] & is_column,
            other=0.0,
        )  # [TOKENS, width]
        end = tl.maximum(first, begin)
        stop = tl.minimum(begin + RING, until)
        is_own = ((positions >= position) & (positions < stop))[:, None]
        token = (start + positions - computed).to(tl.int64)[:, None]
        await_launcher(OVERLAPS)
        of_values = token * tokens.v_stride + (head * VALUE_DIM + p)[None, :]
        v = tl.load(tokens.v + of_values, mask=is_own & is_column, other=0.0)
        of_token = scalars + (positions - computed)[:, None] * (HEADS * _SCALARS)
        of_value = tl.load(of_token, mask=is_own, other=0.0)
        of_held = tl.load(of_token + 1, mask=is_own, other=0.0)
        of_asked = tl.load(of_token + 2, mask=is_own, other=0.0)
        held = tl.zeros((TOKENS, WIDTH), tl.float32)
        asked = tl.zeros((TOKENS, WIDTH), tl.float32)
        if end > base:
            for index in range(SLICES):
                has_n = index * SLICE + n < KEY_DIM
                of_slice = states + (index * SLICE + n)[:, None] * VALUE_DIM
                is_state = has_n[:, None] & is_column
                tile = tl.load(of_slice, mask=is_state, other=0.0).to(tl.float32)
                tile = fold_periods(
                    tile, pool, xs, bs + index * SLICE, steps, ring, base, end, has_n, has_p,
                    HEADS, CAPACITY, X_CAPACITY, RING,
                )  # fmt: skip
                if begin <= computed:
                    tl.store(of_slice, tile.to(pool.dtype.element_ty), mask=is_state)
                k = _load_rows(tokens.k + keys, tokens.k_stride, token, is_own, n, index, KEY_DIM)
                q = _load_rows(tokens.q + keys, tokens.q_stride, token, is_own, n, index, KEY_DIM)
                held, asked = _read(k, q, tile.to(pool.dtype.element_ty), held, asked)
        else:
            k = _load_rows(tokens.k + keys, tokens.k_stride, token, is_own, n, 0, KEY_DIM)
            q = _load_rows(tokens.q + keys, tokens.q_stride, token, is_own, n, 0, KEY_DIM)
            for index in tl.static_range(SLICES):
                if index + 1 < SLICES:
                    next_k = _load_rows(tokens.k + keys, tokens.k_stride, token, is_own, n, index + 1, KEY_DIM)
                    next_q = _load_rows(tokens.q + keys, tokens.q_stride, token, is_own, n, index + 1, KEY_DIM)
                held, asked = _read(k, q, tiles[index], held, asked)
                if index + 1 < SLICES:
                    k = next_k
                    q = next_q
        base = tl.where(begin <= computed, end, base)
        tl.debug_barrier()  # what is appended may overwrite what another thread of this program folds
        corrected = tl.fma(held, -of_held, of_value * v.to(tl.float32))
        asked *= of_asked
        for at in range(position, stop):
            of_inputs = inputs + (at - computed) * (HEADS * 2 * RING) + w
            of_keys = tl.load(of_inputs, mask=w < RING, other=0.0)[:, None]
            of_queries = tl.load(of_inputs + RING, mask=w < RING, other=0.0)[:, None]
            # A later token may hold NaN, which a factor of 0 would not keep out.
            is_this = (positions == at)[:, None]
            new = tl.sum(tl.where(is_this, corrected, -of_keys * written), axis=0)
            written = tl.where(is_this, new[None, :], written)
            out = tl.sum(tl.fma(of_queries, written, tl.where(is_this, asked, 0.0)), axis=0)
            tl.store(y + (at - computed) * (HEADS * VALUE_DIM), out.to(y.dtype.element_ty), mask=has_p)
            tl.store(xs + at % X_CAPACITY * ring.x_stride, new, mask=has_p)
        tl.debug_barrier()  # the next period folds what other threads of this program have appended
        position = stop


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
    ring_len, depth = factors.inputs.shape[-1], max(LEAST_WIDTH, triton.next_power_of_2(key_dim))
    width = max(LEAST_WIDTH, min(tiling.width, triton.next_power_of_2(value_dim)))
    length = min(_SLICE, depth)
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
        RING=ring_len,
        TOKENS=max(LEAST_WIDTH, ring_len),
        SLICE=length,
        SLICES=depth // length,
        WIDTH=width,
        num_warps=tiling.num_warps,
        maxnreg=tiling.max_registers,
        enable_fp_fusion=True,
        **overlapping(pool.device),
    )
