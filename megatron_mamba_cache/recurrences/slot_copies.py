"""Whole-slot copies and clears of state pools: all layers and state types in one launch.

Layout: see `slot_tiles`; a slot and layer are one time, so only their bytes matter. Grid: the programs that stay
resident. Each reads all slot numbers, skips padding, and takes every n-th tile of what is left: one slot spreads
over the whole device. Graph safe: no host sync, one launch, grid fixed at capture.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.kernel_launches import launches_kernel
from .reference_slots import copy_slots_between_ref, copy_slots_ref, zero_slots_ref
from .rows import PAD_SLOT
from .slot_tiles import (
    CopyTiling,
    SlotTiles,
    access_bytes,
    copy_tiles,
    cut_slots,
    next_turn,
    numbered,
    of_number,
    one_time,
    zero_tiles,
)

__all__ = ["TILING", "copy_slots", "copy_slots_between", "copy_slots_ref", "zero_slots", "zero_slots_ref"]

TILING = CopyTiling(tile_len=4096, num_warps=16, programs_per_sm=1)
SLOTS_AT_A_TIME = 256
"""Slot numbers that a program reads at once; more take several rounds."""
_PAD = tl.constexpr(PAD_SLOT)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["src", "dst"])
def _copy_slots_kernel(
    sources,
    pools,
    src,
    dst,
    num_slots,
    SLOTS: tl.constexpr,
    LAYERS: tl.constexpr,
    LENGTHS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTHS: tl.constexpr,
):
    turn = tl.program_id(0)
    for first in range(0, num_slots, SLOTS):
        index = first + tl.arange(0, SLOTS)
        exists = index < num_slots
        source_slots = tl.load(src + index, mask=exists, other=_PAD).to(tl.int64)
        target_slots = tl.load(dst + index, mask=exists, other=_PAD).to(tl.int64)
        copies = (source_slots != _PAD) & (target_slots != _PAD)
        numbers = numbered(copies)
        for number in range(1, tl.max(numbers, axis=0) + 1):
            source, target = of_number(source_slots, numbers, number), of_number(target_slots, numbers, number)
            for i in tl.static_range(len(LAYERS)):
                copy_tiles(sources[i], pools[i], source, target, turn, LAYERS[i], LENGTHS[i], LANES[i], WIDTHS[i])
                turn = next_turn(turn, LAYERS[i] * ((LENGTHS[i] + WIDTHS[i] - 1) // WIDTHS[i]))


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slots"])
def _zero_slots_kernel(
    pools,
    slots,
    num_slots,
    SLOTS: tl.constexpr,
    LAYERS: tl.constexpr,
    LENGTHS: tl.constexpr,
    LANES: tl.constexpr,
    WIDTHS: tl.constexpr,
):
    turn = tl.program_id(0)
    for first in range(0, num_slots, SLOTS):
        index = first + tl.arange(0, SLOTS)
        targets = tl.load(slots + index, mask=index < num_slots, other=_PAD).to(tl.int64)
        clears = targets != _PAD
        numbers = numbered(clears)
        for number in range(1, tl.max(numbers, axis=0) + 1):
            target = of_number(targets, numbers, number)
            for i in tl.static_range(len(LAYERS)):
                zero_tiles(pools[i], target, turn, LAYERS[i], LENGTHS[i], LANES[i], WIDTHS[i])
                turn = next_turn(turn, LAYERS[i] * ((LENGTHS[i] + WIDTHS[i] - 1) // WIDTHS[i]))


def copy_slots(pools: Sequence[Tensor], src: Tensor, dst: Tensor, tiling: CopyTiling = TILING) -> None:
    """Copy whole slots within each pool, all layers, in place.

    Slots that `dst` does not name, and bytes between the slots of a strided pool, stay as they are.

    Args:
        pools: Each [layers, slots, ...]; a slot and layer contiguous.
        src, dst: [n] int32 slot numbers; a pair holding PAD_SLOT is skipped. Otherwise dst is unique, and no pair's
            dst is the src of another: copies happen in any order.

    Raises:
        ValueError: If lengths, shapes, dtypes, strides or devices disagree.

    Reference: `copy_slots_ref`. CUDA-graph safe: no host sync, one launch, grid fixed at capture.
    """
    copy_slots_between(pools, pools, src, dst, tiling)


def copy_slots_between(
    sources: Sequence[Tensor], pools: Sequence[Tensor], src: Tensor, dst: Tensor, tiling: CopyTiling = TILING
) -> None:
    """Copy whole slots of each source pool into the pool of the same position, all layers, in place.

    As `copy_slots`, for pools that differ only in their number of slots; if dtypes differ too, the reference casts.

    Reference: `copy_slots_between_ref`.
    """
    for source, pool in zip(sources, pools, strict=True):
        if source.shape[:1] + source.shape[2:] != pool.shape[:1] + pool.shape[2:]:
            raise ValueError(
                f"need pools that differ in slots only, found {tuple(source.shape)} and {tuple(pool.shape)}"
            )
    _check([*sources, *pools], src, dst)
    moved = [pair for pair in zip(sources, pools, strict=True) if pair[0].numel() and pair[1].numel()]
    if not moved or src.shape[0] == 0:
        return
    if not launches_kernel(src) or any(source.dtype != pool.dtype for source, pool in moved):
        copy_slots_between_ref(sources, pools, src, dst)
        return
    from_tiles, to_tiles = [], []
    for source, pool in moved:
        from_times, to_times = one_time(source), one_time(pool)
        access = access_bytes(from_times, to_times)
        from_tiles.append(cut_slots(from_times, tiling, access))
        to_tiles.append(cut_slots(to_times, tiling, access))
    _copy_slots_kernel[(tiling.num_programs(src.device),)](
        sources=tuple(tiles.states for tiles in from_tiles),
        pools=tuple(tiles.states for tiles in to_tiles),
        src=src,
        dst=dst,
        num_slots=src.shape[0],
        **_sizes([pool for _, pool in moved], to_tiles),
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
    )


def zero_slots(pools: Sequence[Tensor], slots: Tensor, tiling: CopyTiling = TILING) -> None:
    """Clear whole slots of each pool, all layers, in place.

    Args:
        pools: Each [layers, slots, ...]; a slot and layer contiguous.
        slots: [n] int32 slot numbers; PAD_SLOT is skipped.

    Raises:
        ValueError: If shapes, dtypes, strides or devices disagree.

    Reference: `zero_slots_ref`. CUDA-graph safe: no host sync, one launch, grid fixed at capture.
    """
    _check(pools, slots, slots)
    cleared = [pool for pool in pools if pool.numel()]
    if not cleared or slots.shape[0] == 0:
        return
    if not launches_kernel(slots):
        zero_slots_ref(pools, slots)
        return
    tiles = [cut_slots(one_time(pool), tiling) for pool in cleared]
    _zero_slots_kernel[(tiling.num_programs(slots.device),)](
        pools=tuple(cut.states for cut in tiles),
        slots=slots,
        num_slots=slots.shape[0],
        **_sizes(cleared, tiles),
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
    )


def _sizes(pools: Sequence[Tensor], tiles: Sequence[SlotTiles]) -> dict[str, object]:
    return {
        "SLOTS": SLOTS_AT_A_TIME,
        "LAYERS": tuple(pool.shape[0] for pool in pools),
        "LENGTHS": tuple(cut.length for cut in tiles),
        "LANES": tuple(cut.lanes for cut in tiles),
        "WIDTHS": tuple(cut.width for cut in tiles),
    }


def _check(pools: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    for name, slots in (("src", src), ("dst", dst)):
        if slots.dtype != torch.int32 or slots.dim() != 1 or not slots.is_contiguous():
            raise ValueError(f"need contiguous {name} [n] int32, found {slots.dtype} of strides {slots.stride()}")
    if src.shape != dst.shape:
        raise ValueError(f"need as many src as dst, found {src.shape[0]} and {dst.shape[0]}")
    for pool in pools:
        if pool.device != src.device or pool.device != dst.device:
            raise ValueError(f"need pools and slots on one device, found {pool.device}, {src.device}, {dst.device}")
        if pool.dim() < 3 or not pool[:1, :1].is_contiguous():
            raise ValueError(
                "need pools [layers, slots, ...] whose slots are contiguous, "
                f"found {tuple(pool.shape)} with strides {pool.stride()}"
            )
