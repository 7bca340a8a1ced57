"""Write states at block boundaries by products, in Gluon, for Hopper GPUs and bf16 rings; see `boundary_folds`.

Grid: the programs that stay resident, one warp each. Each reads all rows, and takes every n-th tile of those that have
a target, all layers: one row spreads over the whole device, and a step without a target costs one decision. Graph safe:
no host sync, one launch, grid fixed at capture.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...kernels.kernel_launches import num_multiprocessors
from ..prefill_rows import PAD_SLOT
from .boundary_folds_portable import ROWS_AT_A_TIME
from .replay_fold_products import fold_tile
from .replay_rows import BoundaryFolds, ReplayRing
from .replay_tiling import hopper_width
from .replay_views import kernel_folds, kernel_layers, kernel_ring

PROGRAMS_PER_SM = 8
_PAD = gl.constexpr(PAD_SLOT)


@gluon.jit(do_not_specialize=["num_rows"])
def _fold_boundaries_kernel(
    pool,
    slot_stride,
    ring,
    layers,
    rows,
    num_rows,
    ROWS: gl.constexpr,
    LAYERS: gl.constexpr,
    HEADS: gl.constexpr,
    HEADS_A_GROUP: gl.constexpr,
    D_STATE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    CAPACITY: gl.constexpr,
    X_CAPACITY: gl.constexpr,
    RING: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """Long because of its arguments and where each tile's inputs lie."""
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
            number = gl.load(rows.rings + at).to(gl.int64)
            folded = gl.load(rows.folded + at)
            end = gl.load(rows.ends + at)
            for tile in range(turn, TILES, programs):
                layer = (tile // A_LAYER).to(gl.int64)
                head = tile % A_LAYER // PARTS
                first = tile % PARTS * WIDTH
                states = pool + layer * layers.pool + head * (D_STATE * HEAD_DIM) + first
                fold_tile(
                    states + slot * slot_stride,
                    states + target * slot_stride,
                    ring.x + layer * layers.x + number * ring.x_ring + head * HEAD_DIM + first,
                    ring.B + layer * layers.B + number * ring.B_ring + head // HEADS_A_GROUP * D_STATE,
                    ring.steps + layer * layers.steps + number * ring.steps_ring + head,
                    ring,
                    folded,
                    end,
                    HEADS,
                    D_STATE,
                    HEAD_DIM,
                    CAPACITY,
                    X_CAPACITY,
                    RING,
                    WIDTH,
                )
            turn = (turn + programs - TILES % programs) % programs
            to_write = gl.where(row > at, to_write, num_rows)
            at = gl.min(to_write, axis=0)


def fold_by_products(ssm_pools: Tensor, rings: ReplayRing, rows: BoundaryFolds, ring_len: int) -> None:
    """Write each row's state at its end into its target, all layers, in place; see `fold_boundaries`, which checks.

    Args:
        ssm_pools: States of a shape that `folds_by_products`.
    """
    num_layers, _, heads, d_state, head_dim = ssm_pools.shape
    _fold_boundaries_kernel[(PROGRAMS_PER_SM * num_multiprocessors(ssm_pools.device),)](
        pool=ssm_pools,
        slot_stride=ssm_pools.stride(1),
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
        WIDTH=hopper_width(head_dim, d_state),
        num_warps=1,
        enable_fp_fusion=True,
    )
