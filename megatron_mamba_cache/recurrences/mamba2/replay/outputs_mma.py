"""Replay outputs by bf16 mma instructions, in Gluon, for Hopper GPUs and bf16 tokens.

A warp owns `width` columns of a head's state, loaded in the layouts of the operands, so no data moves between lanes.
float32 states and factors are split into three bf16 numbers that add up to them: every product is exact, and sums are
float32. Folds are bit-identical to `fold_mma`. Folding and loading the state start while `coefficients` still runs. The
state is loaded in slices, and a second time if it is folded, so 16-bit states are first prefetched to the L2 cache.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ....kernels.gluon_common import await_launcher, release
from ....kernels.overlap import overlapping
from ...batches import PAD_SLOT
from ...replay.fold_mma import fold_tile
from ...replay.operands import (
    as_left,
    as_right,
    left_layout,
    load_slice,
    multiply_slices,
    output_layout,
    prefetch_state,
    right_layout,
    slice_len,
    split_into_bf16,
)
from ...replay.ring import load_request
from .tiling import ReplayTiling

_PAD = gl.constexpr(PAD_SLOT)


@gluon.jit
def _multiply_right(left, right, sums, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Add the product of a bf16 tile and a float32 tile to `sums`."""
    left = as_left(left, LEFT)
    low, middle, high = split_into_bf16(right)
    sums = mma_v2(left, as_right(low, RIGHT), sums)
    sums = mma_v2(left, as_right(middle, RIGHT), sums)
    return mma_v2(left, as_right(high, RIGHT), sums)


@gluon.jit(do_not_specialize=["max_tokens"])
def _state_mma_kernel(
    y, tokens, pool, slot_stride, seed, ring, rows, base_factors, input_factors, max_tokens,
    HEADS: gl.constexpr, HEADS_A_GROUP: gl.constexpr, D_STATE: gl.constexpr, HEAD_DIM: gl.constexpr,
    CAPACITY: gl.constexpr, X_CAPACITY: gl.constexpr, RING: gl.constexpr, OWN: gl.constexpr, WIDTH: gl.constexpr,
    PADDED: gl.constexpr, TOKENS: gl.constexpr, PREFETCHES: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    """Replay one request and WIDTH columns of one head. Long because state and inputs stay in registers."""
    release(OVERLAPS)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])  # [width, tokens]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    PARTS: gl.constexpr = HEAD_DIM // WIDTH
    SLICES: gl.constexpr = D_STATE // slice_len(D_STATE)
    KEPT: gl.constexpr = left_layout(PADDED, WIDTH)
    KEPT_FACTORS: gl.constexpr = right_layout(OWN, PADDED)
    NEW: gl.constexpr = left_layout(TOKENS, WIDTH)
    NEW_FACTORS: gl.constexpr = right_layout(OWN, TOKENS)
    OUTPUT: gl.constexpr = output_layout(OWN, WIDTH)
    part = gl.program_id(0) % PARTS
    head = gl.program_id(0) // PARTS % HEADS
    row = gl.program_id(0) // (PARTS * HEADS)
    slot, start, count, number, folded, computed = load_request(rows, row)
    if slot == _PAD:
        await_launcher(OVERLAPS)
        return

    if PREFETCHES:  # noqa: SIM102 (known when it is compiled)
        if part == 0:
            prefetch_state(pool + slot * slot_stride + head * (D_STATE * HEAD_DIM), D_STATE, HEAD_DIM)
    first = gl.maximum(folded, computed // RING * RING)
    group = head // HEADS_A_GROUP
    channel = head * HEAD_DIM + part * WIDTH
    states = pool + slot * slot_stride + head * (D_STATE * HEAD_DIM) + part * WIDTH
    xs = ring.x + number * ring.x_ring + channel
    if first > folded:
        fold_tile(
            states,
            states,
            seed,
            head * D_STATE,
            part * WIDTH,
            xs,
            ring.B + number * ring.B_ring + group * D_STATE,
            ring.steps + number * ring.steps_ring + head,
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
    u = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, NEW))
    new = tokens.x + start.to(gl.int64) * tokens.x_stride + channel
    new_x = gl.load(
        new + u[:, None] * tokens.x_stride + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, NEW))[None, :],
        mask=(u < count)[:, None],
        other=0.0,
    )
    queries = tokens.C + start.to(gl.int64) * tokens.C_stride + group * D_STATE
    state, keys = load_slice(states, queries, tokens.C_stride, count, 0, D_STATE, HEAD_DIM, OWN, WIDTH)

    w = gl.arange(0, PADDED, layout=gl.SliceLayout(1, KEPT))
    kept_x = gl.load(
        xs
        + ((first + w) % X_CAPACITY)[:, None] * ring.x_stride
        + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, KEPT))[None, :],
        mask=(w < computed - first)[:, None],
        other=0.0,
    )
    sums = gl.zeros([WIDTH, OWN], gl.float32, layout=SUMS)
    state, keys, sums = multiply_slices(
        state,
        keys,
        sums,
        states,
        queries,
        tokens.C_stride,
        count,
        0,
        SLICES // 2,
        D_STATE,
        HEAD_DIM,
        OWN,
        WIDTH,
        LEFT,
        RIGHT,
    )

    # Load the factors while the other slices are loaded.
    await_launcher(OVERLAPS)
    line = row.to(gl.int64) * max_tokens * HEADS + head
    t = gl.arange(0, OWN, layout=gl.SliceLayout(0, SUMS))
    of_base = gl.load(base_factors + line + t * HEADS, mask=t < count, other=0.0)
    input_factors += line * (RING + OWN)
    t = gl.arange(0, OWN, layout=gl.SliceLayout(1, KEPT_FACTORS))
    w = gl.arange(0, PADDED, layout=gl.SliceLayout(0, KEPT_FACTORS))
    of_kept = gl.load(
        input_factors + t[:, None] * (HEADS * (RING + OWN)) + w[None, :],
        mask=(t < count)[:, None] & (w < RING)[None, :],
        other=0.0,
    )
    t = gl.arange(0, OWN, layout=gl.SliceLayout(1, NEW_FACTORS))
    u = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, NEW_FACTORS))
    of_new = gl.load(
        input_factors + t[:, None] * (HEADS * (RING + OWN)) + (RING + u)[None, :],
        mask=(t < count)[:, None] & (u < count)[None, :],
        other=0.0,
    )
    state, keys, sums = multiply_slices(
        state,
        keys,
        sums,
        states,
        queries,
        tokens.C_stride,
        count,
        SLICES // 2,
        SLICES,
        D_STATE,
        HEAD_DIM,
        OWN,
        WIDTH,
        LEFT,
        RIGHT,
    )
    sums *= of_base[None, :]
    sums = _multiply_right(kept_x, of_kept, sums, LEFT, RIGHT)
    u = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, NEW))
    gl.store(
        xs
        + ((computed + u) % X_CAPACITY)[:, None] * ring.x_stride
        + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, NEW))[None, :],
        new_x,
        mask=(u < count)[:, None],
    )
    is_odd = (new_x.to(gl.float32) * 0.0 != 0.0).to(gl.int32)  # 1 for infinity and NaN
    if gl.max(gl.max(is_odd, axis=0), axis=0) == 0:
        sums = _multiply_right(new_x, of_new, sums, LEFT, RIGHT)
    else:
        # Later tokens must be masked: if one is NaN, a factor of 0 is not enough.
        m = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, SUMS))
        column = m % 8 * (WIDTH // 8) + m // 16 * 2 + m // 8 % 2
        target = gl.arange(0, OWN, layout=gl.SliceLayout(0, SUMS))
        for at in range(0, count):
            x = gl.load(new + at * tokens.x_stride + column).to(gl.float32)
            of_x = input_factors + target * (HEADS * (RING + OWN)) + RING + at
            of_x = gl.load(of_x, mask=target < count, other=0.0)
            sums += gl.where((target >= at)[None, :], of_x[None, :] * x[:, None], 0.0)

    out = sums.reshape([WIDTH // 16, 2, 8, OWN]).permute((3, 2, 0, 1)).reshape([OWN, WIDTH])
    out = gl.convert_layout(out.to(y.dtype.element_ty), OUTPUT)
    t = gl.arange(0, OWN, layout=gl.SliceLayout(1, OUTPUT))
    y += start.to(gl.int64) * (HEADS * HEAD_DIM) + channel
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUTPUT))
    gl.store(y + t[:, None] * (HEADS * HEAD_DIM) + column[None, :], out, mask=(t < count)[:, None])


def replay_by_mma(arguments: dict[str, Any], num_heads: int, tiling: ReplayTiling) -> None:
    """Launch the mma kernel, which folds, appends x and writes the outputs; arguments as in `replay_portably`."""
    pool = arguments["pool"]
    _state_mma_kernel[(num_heads * (arguments["HEAD_DIM"] // tiling.width),)](
        **arguments,
        WIDTH=tiling.width,
        PADDED=max(16, arguments["RING"]),
        TOKENS=max(16, arguments["OWN"]),
        # Prefetching to the L2 cache is faster for 16-bit states and slower for others.
        PREFETCHES=pool.element_size() == 2 and pool.data_ptr() % 16 == 0 and pool.stride(0) % 8 == 0,
        enable_fp_fusion=True,
        **overlapping(pool.device),
    )
