"""Write states at block boundaries in Triton, token by token, for every shape and device; see `boundary_folds`.

Grid: the programs that stay resident. Each reads all rows, numbers those that have a target, and takes every n-th of
their tiles, all layers: one row spreads over the whole device, and a step without a target costs one decision. Graph
safe: no host sync, one launch, grid fixed at capture.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.kernel_launches import num_multiprocessors
from ..prefill_rows import PAD_SLOT
from ..rounded_states import RoundedStates, rounded_places, store_rounded
from ..slot_tiles import next_turn, numbered, of_number
from .replay_fold import fold_entries
from .replay_rows import BoundaryFolds, ReplayRing
from .replay_views import kernel_folds, kernel_layers, kernel_ring

ROWS_AT_A_TIME = 256
"""Rows that a program reads at once; more rows take several rounds."""
WIDTH = 32
NUM_WARPS = 4
PROGRAMS_PER_SM = 4
_INTERPRETED_PROGRAMS = 2
_PAD = tl.constexpr(PAD_SLOT)


@triton.jit(do_not_specialize=["num_rows"])
def _fold_boundaries_kernel(
    pool,
    slot_stride,
    rounded,
    ring,
    layers,
    rows,
    num_rows,
    ROWS: tl.constexpr,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_A_GROUP: tl.constexpr,
    D_STATE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    X_CAPACITY: tl.constexpr,
    RING: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
):
    """Long because what is decided stays in registers."""
    programs = tl.num_programs(0)
    PARTS: tl.constexpr = (HEAD_DIM + TILE_WIDTH - 1) // TILE_WIDTH
    A_LAYER: tl.constexpr = HEADS * PARTS
    n = tl.arange(0, triton.next_power_of_2(D_STATE))
    has_n = n < D_STATE
    turn = tl.program_id(0)
    for first_row in range(0, num_rows, ROWS):
        row = first_row + tl.arange(0, ROWS)
        targets = tl.load(rows.targets + row, mask=row < num_rows, other=_PAD)
        slots = tl.load(rows.slots + row, mask=row < num_rows, other=_PAD)
        writes = (targets != _PAD) & (slots != _PAD)
        num_writes = tl.sum(writes.to(tl.int32), axis=0)
        if num_writes > 0:
            numbers = numbered(writes)
            for number in range(1, num_writes + 1):
                at = of_number(row, numbers, number)
                slot = tl.load(rows.slots + at).to(tl.int64)
                target = tl.load(rows.targets + at).to(tl.int64)
                ring_number = tl.load(rows.rings + at).to(tl.int64)
                folded = tl.load(rows.folded + at)
                end = tl.load(rows.ends + at)
                for tile in range(turn, LAYERS * A_LAYER, programs):
                    layer = tl.cast(tile // A_LAYER, tl.int64)
                    head = tile % A_LAYER // PARTS
                    p = tile % PARTS * TILE_WIDTH + tl.arange(0, TILE_WIDTH)
                    has_p = p < HEAD_DIM
                    states = pool + layer * layers.pool + head * (D_STATE * HEAD_DIM)
                    states += n[:, None] * HEAD_DIM + p[None, :]
                    is_state = has_n[:, None] & has_p[None, :]
                    state = tl.load(states + slot * slot_stride, mask=is_state, other=0.0).to(tl.float32)
                    x = ring.x + layer * layers.x + ring_number * ring.x_ring + head * HEAD_DIM + p
                    b = ring.B + layer * layers.B + ring_number * ring.B_ring + head // HEADS_A_GROUP * D_STATE + n
                    steps = ring.steps + layer * layers.steps + ring_number * ring.steps_ring + head
                    state = fold_entries(
                        state, pool, x, b, steps, ring, folded, end, has_n, has_p, HEADS, CAPACITY, X_CAPACITY, RING
                    )
                    if rounded is None:
                        tl.store(states + target * slot_stride, state.to(pool.dtype.element_ty), mask=is_state)
                    else:
                        store_rounded(rounded, layer, target, state, head, n, p, has_n, has_p, D_STATE, HEAD_DIM)
                turn = next_turn(turn, LAYERS * A_LAYER)


def fold_portably(
    ssm_pools: Tensor, rings: ReplayRing, rows: BoundaryFolds, ring_len: int, rounded: RoundedStates | None
) -> None:
    """Write each row's state at its end into its target, all layers, in place; see `fold_boundaries`, which checks."""
    num_layers, _, heads, d_state, head_dim = ssm_pools.shape
    _fold_boundaries_kernel[(_num_programs(ssm_pools.device),)](
        pool=ssm_pools,
        slot_stride=ssm_pools.stride(1),
        rounded=rounded_places(rounded),
        ring=kernel_ring(rings),
        layers=kernel_layers(ssm_pools, rings),
        rows=kernel_folds(rows),
        num_rows=rows.targets.shape[0],
        ROWS=ROWS_AT_A_TIME,
        LAYERS=num_layers,
        HEADS=heads,
        HEADS_A_GROUP=heads // rings.B.shape[3],
        D_STATE=d_state,
        HEAD_DIM=head_dim,
        CAPACITY=rings.capacity,
        X_CAPACITY=rings.x_capacity,
        RING=ring_len,
        TILE_WIDTH=min(WIDTH, triton.next_power_of_2(head_dim)),
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )


def _num_programs(device: torch.device) -> int:
    return PROGRAMS_PER_SM * num_multiprocessors(device) if device.type == "cuda" else _INTERPRETED_PROGRAMS
