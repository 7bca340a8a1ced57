"""Write states at block boundaries into slots of their own: a checkpoint and the ring entries that follow it.

Grid: the programs that stay resident. Each reads all rows, numbers those that have a target, and takes every n-th of
their tiles, all layers: one row spreads over the whole device, and a step without a target costs one decision. Graph
safe: no host sync, one launch, grid fixed at capture.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import is_computed_in_fp32, launches_kernel, num_multiprocessors
from ..prefill_rows import PAD_SLOT
from ..slots.rounded_states import RoundedStates, rounded_places, store_rounded
from ..slots.slot_tiles import next_turn, numbered, of_number
from .reference_replay import fold_boundaries_ref
from .replay_fold import fold_entries
from .replay_rows import BoundaryFolds, ReplayRing, check_boundary_folds, check_entries, check_ring_len
from .replay_views import kernel_ring

ROWS_AT_A_TIME = 256
"""Rows that a program reads at once; more rows take several rounds."""
WIDTH = 32
NUM_WARPS = 4
PROGRAMS_PER_SM = 4
_INTERPRETED_PROGRAMS = 2
_PAD = tl.constexpr(PAD_SLOT)


class _Rows(NamedTuple):
    """The kernel's view of `BoundaryFolds`."""

    slots: Tensor
    rings: Tensor
    folded: Tensor
    ends: Tensor
    targets: Tensor


class _Layers(NamedTuple):
    """The layers' strides of the pool and of the rings."""

    pool: int
    x: int
    B: int
    steps: int


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
                        state, pool, x, b, steps, ring, folded, end, has_n, has_p, HEADS, CAPACITY, RING
                    )
                    if rounded is None:
                        tl.store(states + target * slot_stride, state.to(pool.dtype.element_ty), mask=is_state)
                    else:
                        store_rounded(rounded, layer, target, state, head, n, p, has_n, has_p, D_STATE, HEAD_DIM)
                turn = next_turn(turn, LAYERS * A_LAYER)


def fold_boundaries(
    ssm_pools: Tensor, rings: ReplayRing, rows: BoundaryFolds, ring_len: int, rounded: RoundedStates | None = None
) -> None:
    """Write each row's state after its first `ends` tokens into its target, all layers, in place.

    The state is the row's checkpoint and the ring entries from `folded` to `ends`, folded as `state_replay` does: at a
    multiple of the ring's length it is bit-equal to the checkpoint that a later step would write. A row without a
    target or slot writes nothing, whatever its counts. Every other slot stays as it is.

    Args:
        ssm_pools: [layers, slots, heads, d_state, head_dim]; a slot's state contiguous.
        rings: With the layers as first dimension.
        ring_len: As in `state_replay`.
        rounded: Where the states go, and whose slots the targets are; None: those of `ssm_pools`.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `fold_boundaries_ref`. CUDA-graph safe: no host sync, one launch, grid fixed at capture.
    """
    _check(ssm_pools, rings, ring_len)
    check_boundary_folds(rows, ssm_pools.device)
    if rounded is not None:
        rounded.check(ssm_pools)
    if 0 in (rows.targets.shape[0], ssm_pools.numel()):
        return
    if not launches_kernel(ssm_pools) or not is_computed_in_fp32(rings.x, ssm_pools):
        fold_boundaries_ref(ssm_pools, rings, rows, ring_len, rounded)
        return
    num_layers, _, heads, d_state, head_dim = ssm_pools.shape
    _fold_boundaries_kernel[(_num_programs(ssm_pools.device),)](
        pool=ssm_pools,
        slot_stride=ssm_pools.stride(1),
        rounded=rounded_places(rounded),
        ring=kernel_ring(rings),
        layers=_Layers(ssm_pools.stride(0), rings.x.stride(0), rings.B.stride(0), rings.steps.stride(0)),
        rows=_Rows(rows.slots, rows.rings, rows.folded, rows.ends, rows.targets),
        num_rows=rows.targets.shape[0],
        ROWS=ROWS_AT_A_TIME,
        LAYERS=num_layers,
        HEADS=heads,
        HEADS_A_GROUP=heads // rings.B.shape[3],
        D_STATE=d_state,
        HEAD_DIM=head_dim,
        CAPACITY=rings.capacity,
        RING=ring_len,
        TILE_WIDTH=min(WIDTH, triton.next_power_of_2(head_dim)),
        num_warps=NUM_WARPS,
    )


def _num_programs(device: torch.device) -> int:
    return PROGRAMS_PER_SM * num_multiprocessors(device) if device.type == "cuda" else _INTERPRETED_PROGRAMS


def _check(ssm_pools: Tensor, rings: ReplayRing, ring_len: int) -> None:
    check_ring_len(ring_len)
    if ssm_pools.dim() != 5 or not ssm_pools[:1, :1].is_contiguous():
        raise ValueError(
            "need ssm_pools [layers, slots, heads, d_state, head_dim] of contiguous states, "
            f"found {tuple(ssm_pools.shape)} with strides {ssm_pools.stride()}"
        )
    num_layers, _, heads, d_state, head_dim = ssm_pools.shape
    outer = (num_layers, *rings.steps.shape[1:3])
    groups = rings.B.shape[3] if rings.B.dim() == 5 else 0
    if groups == 0 or heads % groups:
        raise ValueError(f"need B [layers, rings, capacity, groups, d_state], found {tuple(rings.B.shape)}")
    entries = {"x": (heads, head_dim), "B": (groups, d_state), "steps": (2, heads)}
    for name, entry in entries.items():
        tensor: Tensor = getattr(rings, name)
        if tuple(tensor.shape) != (*outer, *entry):
            raise ValueError(f"need {name} of the rings {(*outer, *entry)}, found {tuple(tensor.shape)}")
        check_entries(name, tensor, ssm_pools.device)
