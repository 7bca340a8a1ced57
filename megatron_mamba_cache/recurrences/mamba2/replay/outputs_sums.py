"""Replay outputs by plain sums, in Gluon, for Hopper GPUs: the fastest kernel for few tokens per request.

A warp owns `width` columns of a head's state, in registers. Each lane holds a run of d_state elements in a few columns,
so most of the product with C is summed within a lane, and only one sum per column and token crosses lanes. Folds are
bit-identical to `fold_mma` for bf16 tokens, otherwise to `fold`. Folding and loading the state start while
`coefficients` still runs.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....kernels.gluon_common import await_launcher, release
from ....kernels.overlap import overlapping
from ...batches import PAD_SLOT
from ...replay.fold_mma import fold_tile
from ...replay.operands import sync_lanes
from ...replay.ring import load_request
from ...stochastic_rounding import cast_state
from .tiling import ReplayTiling

_PAD = gl.constexpr(PAD_SLOT)
_ACCESS = 16  # bytes per load


@gluon.jit
def load_entry(x, b, steps, ring, position, end, HEADS: gl.constexpr, CAPACITY: gl.constexpr, X_CAPACITY: gl.constexpr):
    """Load the ring entry at `position`: x, B, dt and dt * A; zeros from position `end` on."""
    exists = position < end
    index = position % CAPACITY
    values = gl.load(x + position % X_CAPACITY * ring.x_stride, mask=exists, other=0.0)
    keys = gl.load(b + index * ring.B_stride, mask=exists, other=0.0)
    dt = gl.load(steps + index * ring.steps_stride, mask=exists, other=0.0)
    decay = gl.load(steps + index * ring.steps_stride + HEADS, mask=exists, other=0.0)
    return values, keys, dt, decay


@gluon.jit
def _fold_entries(
    state, pool, seed, row, column, x, b, steps, ring, position, end,
    HEADS: gl.constexpr, CAPACITY: gl.constexpr, X_CAPACITY: gl.constexpr, RING: gl.constexpr,
):  # fmt: skip
    """Fold ring entries into the float32 `state` [lanes, d_state per lane, width]; see `fold_entries` in `fold`."""
    entry = load_entry(x, b, steps, ring, position, end, HEADS, CAPACITY, X_CAPACITY)
    following = load_entry(x, b, steps, ring, position + 1, end, HEADS, CAPACITY, X_CAPACITY)
    while position < end:
        until = gl.minimum((position // RING + 1) * RING, end)
        for at in range(position, until):
            values, keys, dt, decay = entry
            entry = following
            following = load_entry(x, b, steps, ring, at + 2, end, HEADS, CAPACITY, X_CAPACITY)
            scaled = dt * values.to(gl.float32)
            increment = keys.to(gl.float32)[:, :, None] * scaled[None, :][:, None, :]
            state = gl.fma(gl.exp(decay), state, increment)
        if until % RING == 0:
            state = cast_state(state, pool.dtype.element_ty, seed, until, row, column).to(gl.float32)
        position = until
    return state


@gluon.jit
def _load_factors(c, base_factors, input_factors, c_stride, HEADS: gl.constexpr, t, count, w, u, RING, OWN):
    exists = t < count
    line = input_factors + t * (HEADS * (RING + OWN))
    of_ring = gl.load(line + w, mask=exists & (w < RING), other=0.0)
    of_own = gl.load(line + RING + u, mask=exists & (u < count), other=0.0)
    of_base = gl.load(base_factors + t * HEADS, mask=exists, other=0.0)
    return gl.load(c + t * c_stride, mask=exists, other=0.0), of_ring, of_own, of_base


@gluon.jit(do_not_specialize=["max_tokens"])
def _state_sums_kernel(
    y, tokens, pool, slot_stride, seed, ring, rows, base_factors, input_factors, max_tokens,
    HEADS: gl.constexpr, HEADS_A_GROUP: gl.constexpr, D_STATE: gl.constexpr, HEAD_DIM: gl.constexpr,
    CAPACITY: gl.constexpr, X_CAPACITY: gl.constexpr, RING: gl.constexpr, OWN: gl.constexpr, WIDTH: gl.constexpr,
    LANES: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """Replay one request and WIDTH columns of one head. Long because state and inputs stay in registers."""
    release(OVERLAPS)
    BY_PRODUCTS: gl.constexpr = ring.x.dtype.element_ty == gl.bfloat16
    PARTS: gl.constexpr = HEAD_DIM // WIDTH
    DEPTH: gl.constexpr = D_STATE // LANES
    PER_LANE: gl.constexpr = (RING + LANES - 1) // LANES
    TAIL: gl.constexpr = (OWN + LANES - 1) // LANES
    V: gl.constexpr = WIDTH * LANES // (32 * gl.num_warps())
    STATE: gl.constexpr = gl.BlockedLayout([1, DEPTH, V], [LANES, 1, 32 // LANES], [1, 1, gl.num_warps()], [2, 1, 0])
    KEPT: gl.constexpr = gl.BlockedLayout([1, PER_LANE, V], [LANES, 1, 32 // LANES], [1, 1, gl.num_warps()], [2, 1, 0])
    NEW: gl.constexpr = gl.BlockedLayout([1, TAIL, V], [LANES, 1, 32 // LANES], [1, 1, gl.num_warps()], [2, 1, 0])
    SUMS: gl.constexpr = gl.SliceLayout(1, STATE)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SUMS)

    part = gl.program_id(0) % PARTS
    head = gl.program_id(0) // PARTS % HEADS
    row = gl.program_id(0) // (PARTS * HEADS)
    slot, start, count, number, folded, computed = load_request(rows, row)
    if slot == _PAD:
        await_launcher(OVERLAPS)
        return

    first = gl.maximum(folded, computed // RING * RING)
    group = head // HEADS_A_GROUP
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(1, gl.SliceLayout(2, STATE)))
    depth = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, gl.SliceLayout(2, STATE)))
    n = lane[:, None] * DEPTH + depth[None, :]  # [lanes, depth]
    p = head * HEAD_DIM + part * WIDTH + gl.arange(0, WIDTH, layout=COLUMNS)
    tile = pool + slot * slot_stride + head * (D_STATE * HEAD_DIM) + part * WIDTH
    xs = ring.x + number * ring.x_ring + head * HEAD_DIM + part * WIDTH
    b = ring.B + number * ring.B_ring + group * D_STATE
    steps = ring.steps + number * ring.steps_ring + head
    if BY_PRODUCTS:  # noqa: SIM102 (known when it is compiled)
        if first > folded:
            fold_tile(
                tile,
                tile,
                seed,
                head * D_STATE,
                part * WIDTH,
                xs,
                b,
                steps,
                ring,
                folded,
                first,
                HEADS,
                D_STATE,
                HEAD_DIM,
                CAPACITY,
                X_CAPACITY,
                RING,
                WIDTH,
            )
    # Load x before the state, so that x can be appended while the state still loads.
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(1, gl.SliceLayout(2, NEW)))
    u = lane[:, None] * TAIL + gl.arange(0, TAIL, layout=gl.SliceLayout(0, gl.SliceLayout(2, NEW)))[None, :]
    own_column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, NEW)))[None, :][:, None, :]
    new = tokens.x + start.to(gl.int64) * tokens.x_stride + head * HEAD_DIM + part * WIDTH
    own_x = gl.load(new + u[:, :, None] * tokens.x_stride + own_column, mask=(u < count)[:, :, None], other=0.0)

    states = tile + n[:, :, None] * HEAD_DIM + gl.arange(0, WIDTH, layout=COLUMNS)[None, :][:, None, :]
    state = gl.load(states).to(gl.float32)  # [lanes, depth, width]

    lane = gl.arange(0, LANES, layout=gl.SliceLayout(1, gl.SliceLayout(2, KEPT)))
    w = lane[:, None] * PER_LANE + gl.arange(0, PER_LANE, layout=gl.SliceLayout(0, gl.SliceLayout(2, KEPT)))[None, :]
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, KEPT)))[None, :][:, None, :]
    indices = (first + w) % X_CAPACITY
    ring_x = gl.load(
        xs + indices[:, :, None] * ring.x_stride + column, mask=(w < computed - first)[:, :, None], other=0.0
    )

    if not BY_PRODUCTS:  # noqa: SIM102
        if first > folded:
            x = xs + gl.arange(0, WIDTH, layout=COLUMNS)
            columns = part * WIDTH + gl.arange(0, WIDTH, layout=COLUMNS)[None, :][:, None, :]
            state = _fold_entries(
                state, pool, seed, (head * D_STATE + n)[:, :, None], columns, x, b + n, steps, ring, folded, first,
                HEADS, CAPACITY, X_CAPACITY, RING,
            )  # fmt: skip
            gl.store(states, state.to(pool.dtype.element_ty))
            sync_lanes()

    ring_x = ring_x.to(gl.float32)
    c = tokens.C + start.to(gl.int64) * tokens.C_stride + group * D_STATE + n
    line = row.to(gl.int64) * max_tokens * HEADS + head
    base_factors += line
    input_factors += line * (RING + OWN)
    y += start.to(gl.int64) * (HEADS * HEAD_DIM) + p
    await_launcher(OVERLAPS)
    following = _load_factors(c, base_factors, input_factors, tokens.C_stride, HEADS, 0, count, w, u, RING, OWN)
    indices = (computed + u) % X_CAPACITY
    gl.store(xs + indices[:, :, None] * ring.x_stride + own_column, own_x, mask=(u < count)[:, :, None])
    for t in range(0, count):
        keys, of_ring, of_own, of_base = following
        following = _load_factors(c, base_factors, input_factors, tokens.C_stride, HEADS, t + 1, count, w, u, RING, OWN)
        out = of_base * gl.sum(state * keys.to(gl.float32)[:, :, None], axis=1)
        out += gl.convert_layout(gl.sum(of_ring[:, :, None] * ring_x, axis=1), SUMS)
        # Later tokens must be masked: if one is NaN, a factor of 0 is not enough.
        x = gl.where((u <= t)[:, :, None], own_x.to(gl.float32), 0.0)
        out += gl.convert_layout(gl.sum(of_own[:, :, None] * x, axis=1), SUMS)
        gl.store(y + t * (HEADS * HEAD_DIM), gl.sum(out, axis=0).to(y.dtype.element_ty))


def replay_by_sums(arguments: dict[str, Any], num_heads: int, tiling: ReplayTiling) -> None:
    """Launch the sums kernel, which folds, appends x and writes the outputs; arguments as in `replay_portably`."""
    pool = arguments["pool"]
    # Each lane loads 16 contiguous bytes along head_dim; the other lanes split d_state.
    lanes = 32 * tiling.num_warps * (_ACCESS // pool.element_size()) // tiling.width
    _state_sums_kernel[(num_heads * (arguments["HEAD_DIM"] // tiling.width),)](
        **arguments, WIDTH=tiling.width, LANES=lanes, enable_fp_fusion=True, **overlapping(pool.device)
    )
