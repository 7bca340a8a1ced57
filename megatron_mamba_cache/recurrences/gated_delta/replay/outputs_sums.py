"""Replay outputs of Gated DeltaNet by plain sums, in Gluon, for Hopper GPUs and bf16 tokens.

A warp owns `width` columns of a head's state, in registers. Each lane holds a run of key_dim elements in a few columns;
the state is a tuple of tiles [lanes, width], one per element of the run. So keys are loaded in 16-byte accesses, and
only two sums per token and column cross lanes. State, keys, queries and values are loaded while `factors` still runs.
The products of a token's key and query with the state do not depend on the token before it, and are computed while that
token is finished. Every token uses the same operations with explicit fma, so its bits do not depend on other tokens of
the step. Folds are bit-identical to `fold_entries`.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....kernels.gluon_common import await_launcher, release
from ....kernels.kernel_language import appended
from ....kernels.overlap import overlapping
from ...batches import PAD_SLOT
from ...replay.operands import sync_lanes
from ...replay.ring import load_request
from ...stochastic_rounding import cast_state
from .staging import (
    SCALARS,
    STAGED,
    allocate_staged,
    await_staged,
    load_entry,
    load_factors,
    load_keys,
    restage,
    stage_entries,
    stage_factors,
    stage_tokens,
)
from .tiling import LANES, ReplayTiling

_PAD = gl.constexpr(PAD_SLOT)


@gluon.jit
def _halves(tile):
    """Return the halves of a tile [lanes, depth, width]; no data moves."""
    LANES: gl.constexpr = tile.shape[0]
    DEPTH: gl.constexpr = tile.shape[1] // 2
    V: gl.constexpr = tile.shape[2] * LANES // 32
    PAIRS: gl.constexpr = gl.BlockedLayout([1, DEPTH, V, 2], [LANES, 1, 32 // LANES, 1], [1, 1, 1, 1], [3, 2, 1, 0])
    tile = tile.reshape([LANES, 2, DEPTH, tile.shape[2]]).permute((0, 2, 3, 1))
    return gl.split(gl.convert_layout(tile, PAIRS))


@gluon.jit
def _halved(tiles):
    """Return the halves of all tiles, in order."""
    halves = ()
    for index in gl.static_range(len(tiles)):
        first, second = _halves(tiles[index])
        halves = appended(appended(halves, first), second)
    return halves


@gluon.jit
def _spread(factors, WIDTH: gl.constexpr, SUMS: gl.constexpr):
    """Broadcast [lanes, depth] over columns; return a tuple of `depth` tiles [lanes, width]. No data moves."""
    V: gl.constexpr = WIDTH * factors.shape[0] // 32
    tile = gl.zeros([factors.shape[0], factors.shape[1], WIDTH], factors.dtype, _tile_layout(factors.shape, V))
    tile, _ = gl.broadcast(factors[:, :, None], tile)
    tiles = (tile,)
    for exponent in gl.static_range(1, 6):
        if 2**exponent <= factors.shape[1]:
            tiles = _halved(tiles)
    lines = ()
    for index in gl.static_range(len(tiles)):
        line = tiles[index].reshape([factors.shape[0], WIDTH])
        lines = appended(lines, gl.convert_layout(line, SUMS))
    return lines


@gluon.constexpr_function
def _tile_layout(shape: tuple[int, int], columns: int) -> gl.BlockedLayout:
    """Return the layout of tiles [lanes, depth, width] in which a lane holds all of depth in `columns` columns."""
    return gl.BlockedLayout([1, shape[1], columns], [shape[0], 1, 32 // shape[0]], [1, 1, 1], [2, 1, 0])


@gluon.jit
def _spread_bf16(pairs, WIDTH: gl.constexpr, SUMS: gl.constexpr):
    """Do the same as `_spread` for pairs of bf16 numbers in int32 [lanes, depth / 2]; the tiles are float32."""
    even = _spread((pairs << 16).to(gl.float32, bitcast=True), WIDTH, SUMS)
    odd = _spread((pairs & -65536).to(gl.float32, bitcast=True), WIDTH, SUMS)
    lines = ()
    for index in gl.static_range(len(even)):
        lines = appended(appended(lines, even[index]), odd[index])
    return lines


@gluon.jit
def _fold_entries(
    state, pool, seed, row, column, staged, ring_pointers, ring, position, end,
    HEADS: gl.constexpr, CAPACITY: gl.constexpr, X_CAPACITY: gl.constexpr, RING: gl.constexpr,
    WIDTH: gl.constexpr, SUMS: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """Fold the ring entries from `position` to `end` - 1, at least one, into `state` as `fold_entries` does."""
    while position < end:
        stop = gl.minimum((position // RING + 1) * RING, end)
        stage_entries(staged, ring_pointers, ring, position, stop, HEADS, CAPACITY, X_CAPACITY, RING)
        while position < stop:
            pairs, increments, decay = load_entry(staged, position % RING, PAIRS, SUMS)
            keys = _spread_bf16(pairs, WIDTH, SUMS)
            factor = gl.exp(decay)[None, :]
            position += 1
            lines = ()
            for index in gl.static_range(len(state)):
                lines = appended(lines, gl.fma(factor, state[index], keys[index] * increments[None, :]))
            state = lines
        if position % RING == 0:
            state = _cast(state, pool.dtype.element_ty, seed, position, row, column)
    return state


@gluon.jit
def _cast(state, DTYPE: gl.constexpr, seed, position, row, column):
    """Cast a state to DTYPE and back to float32; `row` is that of the first tile."""
    lines = ()
    for index in gl.static_range(len(state)):
        lines = appended(lines, cast_state(state[index], DTYPE, seed, position, row + index, column).to(gl.float32))
    return lines


@gluon.jit
def _multiply(state, k, q, WIDTH: gl.constexpr, SUMS: gl.constexpr):
    """Return each lane's part of the products k S and q S, both [lanes, width]."""
    k = _spread_bf16(k, WIDTH, SUMS)
    q = _spread_bf16(q, WIDTH, SUMS)
    held, asked = state[0] * k[0], state[0] * q[0]
    for index in gl.static_range(1, len(state)):
        held = gl.fma(state[index], k[index], held)
        asked = gl.fma(state[index], q[index], asked)
    return held, asked


@gluon.jit
def _finish_token(
    held, asked, factors, written, y, xs, x_stride, t, position, j,
    HEADS: gl.constexpr, VALUE_DIM: gl.constexpr, X_CAPACITY: gl.constexpr, RING: gl.constexpr,
    WIDTH: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Store the output and the corrected value of the step's token `t`; return `written` with that value.

    Args:
        held, asked: Products of `_multiply`.
        written: Corrected values of the period, a tuple of tiles [lanes, width].
        j: [lanes, 1]; position within the period of each lane's first value in `written`.
    """
    v, of_value, of_held, of_asked, of_keys, of_queries = factors
    of_keys = _spread(of_keys, WIDTH, SUMS)
    of_queries = _spread(of_queries, WIDTH, SUMS)
    read = held * of_held[None, :]
    for index in gl.static_range(len(written)):
        read = gl.fma(of_keys[index], written[index], read)
    new = gl.fma(v.to(gl.float32), of_value, -gl.sum(read, axis=0))
    out = asked * of_asked[None, :]
    with_new = ()
    for index in gl.static_range(len(written)):
        each = gl.where(j == position % RING - index, new[None, :], written[index])
        out = gl.fma(of_queries[index], each, out)
        with_new = appended(with_new, each)
    gl.store(xs + position % X_CAPACITY * x_stride, new)
    gl.store(y + t * (HEADS * VALUE_DIM), gl.sum(out, axis=0).to(y.dtype.element_ty))
    return with_new


@gluon.jit(do_not_specialize=["max_tokens"])
def _delta_sums_kernel(
    y, tokens, pool, slot_stride, seed, ring, rows, scalars, inputs, max_tokens,
    HEADS: gl.constexpr, HEADS_A_KEY: gl.constexpr, KEY_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    CAPACITY: gl.constexpr, X_CAPACITY: gl.constexpr, RING: gl.constexpr, WIDTH: gl.constexpr, LANES: gl.constexpr,
    OVERLAPS: gl.constexpr,
):  # fmt: skip
    """Replay one request and WIDTH columns of one head. Long because state and corrected values stay in registers."""
    release(OVERLAPS)
    V: gl.constexpr = WIDTH * LANES // 32
    DEPTH: gl.constexpr = KEY_DIM // LANES
    KEPT: gl.constexpr = RING // LANES
    PAIRS: gl.constexpr = gl.SliceLayout(2, _tile_layout((LANES, DEPTH // 2), V))
    FACTORS: gl.constexpr = gl.SliceLayout(2, _tile_layout((LANES, KEPT), V))
    SUMS: gl.constexpr = gl.BlockedLayout([1, V], [LANES, 32 // LANES], [1, 1], [1, 0])
    PARTS: gl.constexpr = VALUE_DIM // WIDTH
    part = gl.program_id(0) % PARTS
    head = gl.program_id(0) // PARTS % HEADS
    row = gl.program_id(0) // (PARTS * HEADS)
    slot, start, count, number, folded, computed = load_request(rows, row)
    if slot == _PAD:
        await_launcher(OVERLAPS)
        return

    lane = gl.arange(0, LANES, layout=gl.SliceLayout(1, SUMS))[:, None]
    p = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, SUMS))
    channel = head * VALUE_DIM + part * WIDTH
    in_states, column = head * KEY_DIM + lane * DEPTH, (part * WIDTH + p)[None, :]
    token = start.to(gl.int64)
    k_stride, q_stride, v_stride = tokens.k_stride // 2, tokens.q_stride // 2, tokens.v_stride // 2
    heads_key = head // HEADS_A_KEY * (KEY_DIM // 2)
    keys = tokens.k.to(gl.pointer_type(gl.int32), bitcast=True) + token * k_stride + heads_key
    queries = tokens.q.to(gl.pointer_type(gl.int32), bitcast=True) + token * q_stride + heads_key
    values = tokens.v.to(gl.pointer_type(gl.int32), bitcast=True) + token * v_stride + channel // 2
    staged = allocate_staged(KEY_DIM, WIDTH, LANES, RING)
    stage_tokens(staged, keys, k_stride, queries, q_stride, values, v_stride, 0, count, WIDTH)

    states = pool + slot * slot_stride + head * (KEY_DIM * VALUE_DIM) + part * WIDTH
    states += lane * (DEPTH * VALUE_DIM) + p[None, :]
    state = ()
    for index in gl.static_range(DEPTH):
        state = appended(state, gl.load(states + index * VALUE_DIM).to(gl.float32))
    first = gl.maximum(folded, computed // RING * RING)
    xs = ring.x + number * ring.x_ring + channel + p
    bs = ring.B.to(gl.pointer_type(gl.int32), bitcast=True) + number * (ring.B_ring // 2) + heads_key
    ring_pointers = (ring.x + number * ring.x_ring + channel, bs, ring.steps + number * ring.steps_ring + head)
    j = lane * KEPT
    written = ()
    for index in gl.static_range(KEPT):
        positions = computed // RING * RING + j + index
        is_kept = (positions >= first) & (positions < computed)
        x = xs[None, :] + positions % X_CAPACITY * ring.x_stride
        written = appended(written, gl.load(x, mask=is_kept, other=0.0))
    line = row.to(gl.int64) * max_tokens * HEADS + head
    scalars += line * SCALARS
    inputs += line * (2 * RING)
    await_launcher(OVERLAPS)
    stage_factors(staged, scalars, inputs, 0, count, HEADS)
    if first > folded:
        state = _fold_entries(
            state, pool, seed, in_states, column, staged, ring_pointers, ring, folded, first,
            HEADS, CAPACITY, X_CAPACITY, RING, WIDTH, SUMS, PAIRS,
        )  # fmt: skip
        for index in gl.static_range(DEPTH):
            gl.store(states + index * VALUE_DIM, state[index].to(pool.dtype.element_ty))
        sync_lanes()  # appended values may overwrite entries that other lanes still fold

    y += token * (HEADS * VALUE_DIM) + channel + p
    await_staged(1)
    if count == 0:
        return

    k, q = load_keys(staged, 0, PAIRS)
    held, asked = _multiply(state, k, q, WIDTH, SUMS)
    await_staged(0)
    factors = load_factors(staged, 0, WIDTH, SUMS, FACTORS)
    t = 0
    while t < count:
        stop = gl.minimum(((computed + t) // RING + 1) * RING - computed, count)
        for at in range(t + 1, stop):
            if at % STAGED == 0:
                restage(
                    staged, keys, k_stride, queries, q_stride, values, v_stride, scalars, inputs, at, count,
                    HEADS, WIDTH,
                )  # fmt: skip
            k, q = load_keys(staged, at, PAIRS)
            next_held, next_asked = _multiply(state, k, q, WIDTH, SUMS)
            next_factors = load_factors(staged, at, WIDTH, SUMS, FACTORS)
            written = _finish_token(
                held, asked, factors, written, y, xs, ring.x_stride, at - 1, computed + at - 1, j,
                HEADS, VALUE_DIM, X_CAPACITY, RING, WIDTH, SUMS,
            )  # fmt: skip
            held, asked, factors = next_held, next_asked, next_factors
        written = _finish_token(
            held, asked, factors, written, y, xs, ring.x_stride, stop - 1, computed + stop - 1, j,
            HEADS, VALUE_DIM, X_CAPACITY, RING, WIDTH, SUMS,
        )  # fmt: skip
        if stop < count:
            sync_lanes()  # other lanes may have appended the entries that this lane folds
            position = computed + stop
            begin = gl.maximum(first, position - RING)
            state = _fold_entries(
                state, pool, seed, in_states, column, staged, ring_pointers, ring, begin, position,
                HEADS, CAPACITY, X_CAPACITY, RING, WIDTH, SUMS, PAIRS,
            )  # fmt: skip
            cleared = ()
            for _ in gl.static_range(KEPT):
                cleared = appended(cleared, gl.zeros([LANES, WIDTH], gl.float32, layout=SUMS))
            written = cleared
            if stop % STAGED == 0:
                restage(
                    staged, keys, k_stride, queries, q_stride, values, v_stride, scalars, inputs, stop, count,
                    HEADS, WIDTH,
                )  # fmt: skip
            k, q = load_keys(staged, stop, PAIRS)
            held, asked = _multiply(state, k, q, WIDTH, SUMS)
            factors = load_factors(staged, stop, WIDTH, SUMS, FACTORS)
        t = stop


def replay_by_sums(arguments: dict[str, Any], num_heads: int, tiling: ReplayTiling) -> None:
    """Launch the sums kernel, which folds, appends x and writes the outputs; arguments as in `replay_portably`."""
    pool = arguments["pool"]
    _delta_sums_kernel[(num_heads * (arguments["VALUE_DIM"] // tiling.width),)](
        **arguments, WIDTH=tiling.width, LANES=LANES, enable_fp_fusion=False, **overlapping(pool.device)
    )
