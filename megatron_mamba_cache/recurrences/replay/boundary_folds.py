"""Cache states at block boundaries by replay: find the requests that reached a boundary, and fold their ring entries.

The plan kernel decides on the device. With running = computed + scheduled - drafts,

    end = (running + max(accepted, 1) - 1) // block_size * block_size;  reached iff end >= running and end > 0

The step itself has already folded ring entries up to the last multiple of `ring_len` in `computed`, so the boundary
fold starts there. Each program handles _ROWS requests.

The fold kernel applies ring entries to the base of each request and writes the result to the target. Grid: as many
programs as can run concurrently. Each program reads the targets of all requests, and takes every n-th tile, over all
layers, of the requests that have one. A single request thus uses the whole GPU, and a step without targets is cheap.

Safe in CUDA graphs: no host sync, one launch per kernel, and the grids are fixed at capture.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.kernel_launches import is_computed_in_fp32, launches_kernel, resident_programs
from ..batches import PAD_SLOT, AlignBatch, ReplayBatch
from ..quantized_states import QuantizedStates, quantized_pointers, store_quantized
from ..slot_tiles import next_turn, numbered, of_number
from ..stochastic_rounding import SEED_STEP, cast_state, check_seed
from .fold import fold_entries
from .reference import fold_boundaries_ref, plan_boundary_folds_ref
from .ring import BoundaryFolds, ReplayRing, check_boundary_folds, check_ring_len, check_shapes, fold_arguments
from .tiling import folds_by_mma

_ROWS = 256
_LANES = 4  # number of int32 values in 16 bytes
WIDTH = 32
NUM_WARPS = 4
PROGRAMS_PER_SM = 4
_PAD = tl.constexpr(PAD_SLOT)


@triton.jit(do_not_specialize=["plan_stride", "num_rows", "block_size", "ring_len", "accepted_stride"])
def _plan_kernel(
    plan, plan_stride, computed, scheduled, drafts, accepted, accepted_stride, targets, slots, folded, num_rows,
    block_size, ring_len,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    start = tl.load(computed + row, mask=exists, other=0)
    running = start + tl.load(scheduled + row, mask=exists, other=0) - tl.load(drafts + row, mask=exists, other=0)
    kept = tl.maximum(tl.load(accepted + row * accepted_stride, mask=exists, other=1).to(tl.int32), 1)
    end = (running + kept - 1) // block_size * block_size
    target = tl.load(targets + row, mask=exists, other=_PAD)
    slot = tl.load(slots + row, mask=exists, other=_PAD)
    reached = (target != _PAD) & (slot != _PAD) & (end >= running) & (end > 0)
    first = tl.maximum(tl.load(folded + row, mask=exists, other=0), start // ring_len * ring_len)
    tl.store(plan + row, first, mask=exists)
    tl.store(plan + plan_stride + row, tl.where(reached, end, first), mask=exists)
    tl.store(plan + 2 * plan_stride + row, tl.where(reached, target, _PAD), mask=exists)


def plan_boundary_folds(rows: ReplayBatch, align: AlignBatch, ring_len: int, block_size: int) -> BoundaryFolds:
    """Return the arguments of `fold_boundaries` for the requests of a verify step that reached a block boundary.

    Args:
        align: The same requests, with the number of accepted tokens; its `columns` are not read.

    Reference: `plan_boundary_folds_ref`. CUDA-graph safe: no host sync, one launch, grid fixed at capture.
    """
    num_rows = rows.slots.shape[0]
    if not launches_kernel(rows.slots) or not num_rows:
        return plan_boundary_folds_ref(rows, align, ring_len, block_size)
    # Rows are padded to 16 bytes; otherwise Triton would compile another kernel for unaligned pointers.
    plan = torch.empty((3, -(-num_rows // _LANES) * _LANES), dtype=torch.int32, device=rows.slots.device)
    _plan_kernel[(triton.cdiv(num_rows, _ROWS),)](
        plan=plan,
        plan_stride=plan.stride(0),
        computed=align.computed,
        scheduled=align.scheduled,
        drafts=align.drafts,
        accepted=align.accepted,
        accepted_stride=align.accepted.stride(0),
        targets=align.targets,
        slots=rows.slots,
        folded=rows.folded,
        num_rows=num_rows,
        block_size=block_size,
        ring_len=ring_len,
        ROWS=_ROWS,
        enable_fp_fusion=True,
    )
    return BoundaryFolds(rows.slots, rows.buffers, *plan[:, :num_rows])


def fold_boundaries(
    pools: Tensor,
    rings: ReplayRing,
    rows: BoundaryFolds,
    ring_len: int,
    quantized: QuantizedStates | None = None,
    *,
    seed: int | None = None,
) -> None:
    """Write each request's state after its first `ends` tokens to its target slot, in all layers, in place.

    Ring entries from `folded` to `ends` - 1 are applied to the base as in a replayed step. If `ends` is a multiple of
    `ring_len`, the state is bit-identical to the base of a later step, unless it is quantized. A request without a
    target or slot writes nothing. All other slots are unchanged.

    Args:
        pools: [layers, slots, heads, d_state, head_dim]; each slot is contiguous within a layer.
        rings: Rings of all layers, with the layers as the first dimension.
        ring_len: Number of tokens per period, as in `state_replay`.
        quantized: Storage that contains the target slots; None: these are slots of `pools`.
        seed: Seed of the first layer for stochastic rounding to fp16 pools; None: round to nearest.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `fold_boundaries_ref`. CUDA-graph safe: no host sync, one launch, grid fixed at capture.
    """
    _check(pools, rings, ring_len)
    check_boundary_folds(rows, pools.device)
    check_seed(pools, seed)
    if quantized is not None:
        quantized.check(pools)
    if 0 in (rows.targets.shape[0], pools.numel()):
        return
    if not launches_kernel(pools) or not is_computed_in_fp32(rings.x, pools):
        fold_boundaries_ref(pools, rings, rows, ring_len, quantized, seed)
        return
    if quantized is None and folds_by_mma(pools, rings.x.dtype):
        from .fold_mma import fold_by_mma  # imported here, because other devices may lack Gluon

        fold_by_mma(pools, rings, rows, ring_len, seed)
    else:
        fold_portably(pools, rings, rows, ring_len, quantized, seed)


def _check(pools: Tensor, rings: ReplayRing, ring_len: int) -> None:
    check_ring_len(ring_len)
    if pools.dim() != 5 or not pools[:1, :1].is_contiguous():
        raise ValueError(
            "pools must have shape [layers, slots, heads, d_state, head_dim] with contiguous states, "
            f"found {tuple(pools.shape)} with strides {pools.stride()}"
        )
    num_layers, _, heads, d_state, head_dim = pools.shape
    groups = rings.B.shape[3] if rings.B.dim() == 5 else 0
    if groups == 0 or heads % groups:
        raise ValueError(
            "B of the rings must have shape [layers, rings, capacity, groups, d_state], with a number of groups that "
            f"divides the {heads} heads, found {tuple(rings.B.shape)}"
        )
    num_rings = rings.steps.shape[1]
    check_shapes(rings, (num_layers, num_rings), heads, head_dim, (groups, d_state), pools.device)


@triton.jit(do_not_specialize=["num_rows"])
def _fold_boundaries_kernel(
    pool, slot_stride, quantized, seed, ring, layers, rows, num_rows,
    ROWS: tl.constexpr, LAYERS: tl.constexpr, HEADS: tl.constexpr, HEADS_A_GROUP: tl.constexpr, D_STATE: tl.constexpr,
    HEAD_DIM: tl.constexpr, CAPACITY: tl.constexpr, X_CAPACITY: tl.constexpr, RING: tl.constexpr,
    TILE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Fold the tiles of all requests. Long because of the pointers of a tile."""
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
                ring_number = tl.load(rows.buffers + at).to(tl.int64)
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
                    of_layer = seed
                    if seed is not None:
                        of_layer = seed + tile // A_LAYER * SEED_STEP
                    in_states, column = head * D_STATE + n[:, None], p[None, :]
                    state = fold_entries(
                        state, pool, of_layer, in_states, column, x, b, steps, ring, folded, end, has_n, has_p,
                        HEADS, CAPACITY, X_CAPACITY, RING,
                    )  # fmt: skip
                    if quantized is None:
                        stored = cast_state(state, pool.dtype.element_ty, of_layer, end, in_states, column)
                        tl.store(states + target * slot_stride, stored, mask=is_state)
                    else:
                        store_quantized(quantized, layer, target, state, head, n, p, has_n, has_p, D_STATE, HEAD_DIM)
                turn = next_turn(turn, LAYERS * A_LAYER)


def fold_portably(
    pools: Tensor,
    rings: ReplayRing,
    rows: BoundaryFolds,
    ring_len: int,
    quantized: QuantizedStates | None,
    seed: int | None = None,
) -> None:
    """Fold with the Triton kernel, which supports all shapes; `fold_boundaries` checks the arguments."""
    _fold_boundaries_kernel[(resident_programs(pools.device, PROGRAMS_PER_SM),)](
        **fold_arguments(pools, rings, rows, ring_len, seed),
        quantized=quantized_pointers(quantized),
        TILE_WIDTH=min(WIDTH, triton.next_power_of_2(pools.shape[4])),
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
