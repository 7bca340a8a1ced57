"""Folds by bf16 tensor-core matmuls, in Gluon, for Hopper GPUs and bf16 rings.

All kernels that use these folds give bit-identical states. A period is `ring_len` positions that start at a multiple
of `ring_len`. For the ring entries j of one period, with L the sum of dt * A over them and L_j the same sum over the
entries after j, the new state is

    S' = exp(L) S + sum over j of B_j (exp(L_j) dt_j x_j)

This replaces two operations per entry and state element by one matmul per period. The factors of x are split into three
bf16 numbers that add up to them, so every product is exact. A state's tile is processed in slices of d_state, because a
whole tile with its sums and operands does not fit in registers.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ...kernels.kernel_launches import num_multiprocessors
from ..batches import PAD_SLOT
from ..stochastic_rounding import SEED_STEP, cast_state
from .operands import as_left, as_right_rows, from_sums, left_layout, split_into_bf16, sync_lanes
from .ring import BoundaryFolds, ReplayRing, fold_arguments
from .tiling import hopper_width

PROGRAMS_PER_SM = 8
_PAD = gl.constexpr(PAD_SLOT)


@gluon.constexpr_function
def _eighths(d_state: int, bits: int) -> int:
    """Return how many elements a slice takes from each eighth of d_state, so that it fits in registers.

    Args:
        bits: Size of a state element.
    """
    return min(64 // bits, d_state // 8)


@gluon.constexpr_function
def _padded(ring_len: int) -> int:
    """Return the inner dimension of the matmul: `ring_len`, but at least 16."""
    return max(16, ring_len)


@gluon.jit
def _factors(
    steps, ring, begin, position, until, HEADS: gl.constexpr, CAPACITY: gl.constexpr, LAYOUT: gl.constexpr, PADDED
):
    """Return the float32 factor of the state, and those of x at PADDED positions from `begin` on."""
    j = gl.arange(0, PADDED, layout=LAYOUT)
    at = begin + j
    dt = gl.load(steps + at % CAPACITY * ring.steps_stride, mask=(at >= position) & (at < until), other=0.0)  # [PADDED]
    later = gl.zeros([PADDED], gl.float64, layout=LAYOUT)
    total = gl.full([], 0.0, gl.float64)
    # Entries are added one at a time, so that the sums do not depend on the kernel's layout.
    for i in gl.static_range(PADDED):
        entry = begin + i
        decay = gl.load(
            steps + entry % CAPACITY * ring.steps_stride + HEADS, mask=(entry >= position) & (entry < until), other=0.0
        ).to(gl.float64)
        later = gl.where(j < i, later + decay, later)
        total += decay
    return gl.exp(total.to(gl.float32)), dt * gl.exp(later.to(gl.float32))


@gluon.jit
def _load_slice(
    source, b, ring, begin, position, until,
    SLICE: gl.constexpr, EIGHTHS: gl.constexpr, D_STATE: gl.constexpr, HEAD_DIM: gl.constexpr, CAPACITY: gl.constexpr,
    PADDED: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Load a slice of the state, [elements, width], and of the entries' B, [PADDED, elements]."""
    TILE: gl.constexpr = left_layout(8 * EIGHTHS, WIDTH)
    KEYS: gl.constexpr = left_layout(PADDED, 8 * EIGHTHS)
    at = begin + gl.arange(0, PADDED, layout=gl.SliceLayout(1, KEYS))
    keys = gl.load(
        b
        + (at % CAPACITY)[:, None] * ring.B_stride
        + _elements(SLICE, EIGHTHS, D_STATE, gl.SliceLayout(0, KEYS))[None, :],
        mask=((at >= position) & (at < until))[:, None],
        other=0.0,
    )
    return gl.load(source + _tile_offsets(SLICE, EIGHTHS, D_STATE, HEAD_DIM, WIDTH, TILE)), keys


@gluon.jit
def _elements(SLICE: gl.constexpr, EIGHTHS: gl.constexpr, D_STATE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the d_state indices of a slice: equally many from each eighth of d_state.

    A lane loads B for the indices from one eighth.
    """
    r = gl.arange(0, 8 * EIGHTHS, layout=LAYOUT)
    return r // EIGHTHS * (D_STATE // 8) + SLICE * EIGHTHS + r % EIGHTHS


@gluon.jit
def _tile_offsets(
    SLICE: gl.constexpr, EIGHTHS: gl.constexpr, D_STATE: gl.constexpr, HEAD_DIM: gl.constexpr, WIDTH: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """Return the memory offsets of a slice within a state's tile, [elements, width]."""
    n = _elements(SLICE, EIGHTHS, D_STATE, gl.SliceLayout(1, TILE))
    return n[:, None] * HEAD_DIM + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, TILE))[None, :]


@gluon.jit
def _fold_period(
    source, target, seed, row, column, x, b, steps, ring, begin, position, until,
    HEADS: gl.constexpr, D_STATE: gl.constexpr, HEAD_DIM: gl.constexpr, CAPACITY: gl.constexpr,
    X_CAPACITY: gl.constexpr, RING: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Fold the entries from `position` to `until` - 1, all in the period that starts at `begin`."""
    PADDED: gl.constexpr = _padded(RING)
    EIGHTHS: gl.constexpr = _eighths(D_STATE, target.dtype.element_ty.primitive_bitwidth if seed is None else 32)
    SLICES: gl.constexpr = D_STATE // (8 * EIGHTHS)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])  # [width, elements]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    ENTRIES: gl.constexpr = left_layout(PADDED, WIDTH)
    TILE: gl.constexpr = left_layout(8 * EIGHTHS, WIDTH)
    state, keys = _load_slice(
        source, b, ring, begin, position, until, 0, EIGHTHS, D_STATE, HEAD_DIM, CAPACITY, PADDED, WIDTH
    )
    at = begin + gl.arange(0, PADDED, layout=gl.SliceLayout(1, ENTRIES))
    values = gl.load(
        x
        + (at % X_CAPACITY)[:, None] * ring.x_stride
        + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ENTRIES))[None, :],
        mask=((at >= position) & (at < until))[:, None],
        other=0.0,
    )
    of_state, of_values = _factors(
        steps, ring, begin, position, until, HEADS, CAPACITY, gl.SliceLayout(1, ENTRIES), PADDED
    )
    low, middle, high = split_into_bf16(of_values[:, None] * values.to(gl.float32))
    low, middle, high = as_left(low, LEFT), as_left(middle, LEFT), as_left(high, LEFT)
    for number in gl.static_range(SLICES):
        # Load the next slice before the store below, because loads are not moved ahead of stores.
        if number + 1 < SLICES:
            following = _load_slice(
                source, b, ring, begin, position, until, number + 1, EIGHTHS, D_STATE, HEAD_DIM, CAPACITY, PADDED, WIDTH
            )
        right = as_right_rows(keys, RIGHT)
        sums = gl.zeros([WIDTH, 8 * EIGHTHS], gl.float32, layout=SUMS)
        sums = mma_v2(low, right, sums)
        sums = mma_v2(middle, right, sums)
        sums = mma_v2(high, right, sums)
        folded = gl.fma(of_state, state.to(gl.float32), from_sums(sums, TILE))
        targets = target + _tile_offsets(number, EIGHTHS, D_STATE, HEAD_DIM, WIDTH, TILE)
        if seed is not None:
            n = row + _elements(number, EIGHTHS, D_STATE, gl.SliceLayout(1, TILE))
            p = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, TILE))
            folded = cast_state(folded, target.dtype.element_ty, seed, until, n[:, None], p[None, :])
        gl.store(targets, folded.to(target.dtype.element_ty))
        if number + 1 < SLICES:
            state, keys = following


@gluon.jit
def fold_tile(
    source, target, seed, row, column, x, b, steps, ring, position, end,
    HEADS: gl.constexpr, D_STATE: gl.constexpr, HEAD_DIM: gl.constexpr, CAPACITY: gl.constexpr,
    X_CAPACITY: gl.constexpr, RING: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Fold ring entries from `position` to `end` - 1 into a tile of a state, `WIDTH` columns wide.

    The state is cast to its dtype at every multiple of RING and at the end. Without entries, the tile is copied.
    After the call, every lane may read the tile and overwrite the entries. Programs must have one warp.

    Args:
        source, target: Pointers to the tile before and after the fold; may be equal.
        seed, row, column: As in `cast_state`, for the first element of the tile.
        x, b, steps: Pointers to the head's inputs at index 0 of the ring; `x` points to the tile's columns.
    """
    begin = position // RING * RING
    for _ in range(gl.maximum((end + RING - 1) // RING - position // RING, 1)):
        until = gl.minimum(begin + RING, end)
        _fold_period(
            source, target, seed, row, column, x, b, steps, ring, begin, position, until,
            HEADS, D_STATE, HEAD_DIM, CAPACITY, X_CAPACITY, RING, WIDTH,
        )  # fmt: skip
        source = target
        begin += RING
        position = until
    sync_lanes()


@gluon.jit(do_not_specialize=["num_rows"])
def _fold_boundaries_kernel(
    pool, slot_stride, seed, ring, layers, rows, num_rows,
    ROWS: gl.constexpr, LAYERS: gl.constexpr, HEADS: gl.constexpr, HEADS_A_GROUP: gl.constexpr, D_STATE: gl.constexpr,
    HEAD_DIM: gl.constexpr, CAPACITY: gl.constexpr, X_CAPACITY: gl.constexpr, RING: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = HEAD_DIM // WIDTH
    A_LAYER: gl.constexpr = HEADS * PARTS
    TILES: gl.constexpr = LAYERS * A_LAYER
    programs = gl.num_programs(0)
    turn = gl.program_id(0)
    for first_row in range(0, num_rows, ROWS):
        row = first_row + gl.arange(0, ROWS, layout=gl.BlockedLayout([ROWS // 32], [32], [1], [0]))
        targets = gl.load(rows.targets + row, mask=row < num_rows, other=_PAD)
        slots = gl.load(rows.slots + row, mask=row < num_rows, other=_PAD)
        to_write = gl.where((targets != _PAD) & (slots != _PAD), row, num_rows)
        at = gl.min(to_write, axis=0)
        while at < num_rows:
            slot = gl.load(rows.slots + at).to(gl.int64)
            target = gl.load(rows.targets + at).to(gl.int64)
            number = gl.load(rows.buffers + at).to(gl.int64)
            folded = gl.load(rows.folded + at)
            end = gl.load(rows.ends + at)
            for tile in range(turn, TILES, programs):
                layer = (tile // A_LAYER).to(gl.int64)
                of_layer = seed
                if seed is not None:
                    of_layer = seed + tile // A_LAYER * SEED_STEP
                head = tile % A_LAYER // PARTS
                first = tile % PARTS * WIDTH
                states = pool + layer * layers.pool + head * (D_STATE * HEAD_DIM) + first
                fold_tile(
                    states + slot * slot_stride, states + target * slot_stride,
                    of_layer, head * D_STATE, first,
                    ring.x + layer * layers.x + number * ring.x_ring + head * HEAD_DIM + first,
                    ring.B + layer * layers.B + number * ring.B_ring + head // HEADS_A_GROUP * D_STATE,
                    ring.steps + layer * layers.steps + number * ring.steps_ring + head,
                    ring, folded, end, HEADS, D_STATE, HEAD_DIM, CAPACITY, X_CAPACITY, RING, WIDTH,
                )  # fmt: skip
            turn = (turn + programs - TILES % programs) % programs
            to_write = gl.where(row > at, to_write, num_rows)
            at = gl.min(to_write, axis=0)


def fold_by_mma(pools: Tensor, rings: ReplayRing, rows: BoundaryFolds, ring_len: int, seed: int | None = None) -> None:
    """Fold with the Gluon kernel, for pools that satisfy `folds_by_mma`; `fold_boundaries` checks the arguments."""
    _fold_boundaries_kernel[(PROGRAMS_PER_SM * num_multiprocessors(pools.device),)](
        **fold_arguments(pools, rings, rows, ring_len, seed),
        WIDTH=hopper_width(pools.shape[4], pools.shape[3]),
        num_warps=1,
        enable_fp_fusion=True,
    )
