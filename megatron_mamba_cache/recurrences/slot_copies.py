"""Whole-slot copies of state pools: all layers and state types in one launch.

Layout: as in `slot_tiles`; a slot and layer are one time, so only their bytes matter. Each resident program reads all
slot numbers, skips padding, and takes every n-th remaining tile: one slot uses the whole device. Graph safe: no host
sync, one launch, grid fixed at capture.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.kernel_launches import launches_kernel, resident_programs
from ..kernels.reference import along_first_dim, redirect_padding
from .batches import PAD_SLOT, PrefillBatch
from .slot_tiles import CopyTiling, access_bytes, copy_tiles, cut_slots, next_turn, numbered, of_number, one_time

TILING = CopyTiling(tile_len=4096, num_warps=16, programs_per_sm=1)
SLOTS_AT_A_TIME = 256
"""Slot numbers read at once; more take several rounds."""
_PAD = tl.constexpr(PAD_SLOT)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["src", "dst"])
def _copy_slots_kernel(
    sources, pools, src, dst, num_slots,
    SLOTS: tl.constexpr, LAYERS: tl.constexpr, LENGTHS: tl.constexpr, LANES: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
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


def copy_slots(
    sources: Sequence[Tensor], pools: Sequence[Tensor], src: Tensor, dst: Tensor, tiling: CopyTiling = TILING
) -> None:
    """Copy whole slots of each source pool into the pool of the same index, possibly itself, in place, all layers.

    Slots not in `dst`, and bytes between the slots of a strided pool, are unchanged. If dtypes differ, the reference
    casts.

    Args:
        sources, pools: Each [layers, slots, ...]; a slot and layer contiguous. They differ in slots only.
        src, dst: [n] int32 slot numbers; a pair holding PAD_SLOT is skipped. Otherwise dst is unique, and within a pool
            no pair's dst is the src of another: copies happen in any order.

    Raises:
        ValueError: If lengths, shapes, dtypes, strides or devices disagree.

    Reference: `copy_slots_ref`. CUDA-graph safe: no host sync, one launch, grid fixed at capture.
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
        copy_slots_ref(sources, pools, src, dst)
        return
    from_tiles, to_tiles = [], []
    for source, pool in moved:
        from_times, to_times = one_time(source), one_time(pool)
        access = access_bytes(from_times, to_times)
        from_tiles.append(cut_slots(from_times, tiling, access))
        to_tiles.append(cut_slots(to_times, tiling, access))
    _copy_slots_kernel[(resident_programs(src.device, tiling.programs_per_sm),)](
        sources=tuple(tiles.states for tiles in from_tiles),
        pools=tuple(tiles.states for tiles in to_tiles),
        src=src,
        dst=dst,
        num_slots=src.shape[0],
        SLOTS=SLOTS_AT_A_TIME,
        LAYERS=tuple(pool.shape[0] for _, pool in moved),
        LENGTHS=tuple(tiles.length for tiles in to_tiles),
        LANES=tuple(tiles.lanes for tiles in to_tiles),
        WIDTHS=tuple(tiles.width for tiles in to_tiles),
        num_warps=tiling.num_warps,
        enable_fp_fusion=True,
    )


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


def load_slots(pool: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Read slots as fresh tensors [n, ...] of `dtype`, zeros for PAD_SLOT in `slots` [n] int32."""
    states = pool.index_select(0, slots.clamp_min(0).to(torch.int64))
    return torch.where(along_first_dim(slots != PAD_SLOT, states), states, 0).to(dtype)


def store_slots(pool: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write values [n, ...], cast to the pool's dtype, into slots [n] int32, in place; skip PAD_SLOT.

    A masked write must not index with a mask, so padding repeats a valid write, or gives slot 0 its own content.
    """
    if slots.shape[0] == 0:
        return
    redirect = redirect_padding(slots != PAD_SLOT)
    targets = slots.index_select(0, redirect).to(torch.int64)
    states = values.index_select(0, redirect).to(pool.dtype)
    states = torch.where(along_first_dim(targets != PAD_SLOT, states), states, pool[:1])
    pool.index_copy_(0, targets.clamp_min(0), states)


def store_empty_requests(pool: Tensor, rows: PrefillBatch) -> None:
    """Write the initial state of each request without tokens into its final slot."""
    is_empty = rows.cu_seqlens[1:] == rows.cu_seqlens[:-1]
    states = load_slots(pool, rows.initial_slots, pool.dtype)
    store_slots(pool, torch.where(is_empty, rows.final_slots, PAD_SLOT), states)


def copy_slots_ref(sources: Sequence[Tensor], pools: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Torch reference for `copy_slots`."""
    if src.shape[0] == 0:
        return
    valid = (src != PAD_SLOT) & (dst != PAD_SLOT)
    redirect = redirect_padding(valid)
    from_slot = torch.where(valid, src, 0).index_select(0, redirect).to(torch.int64)
    to_slot = torch.where(valid, dst, 0).index_select(0, redirect).to(torch.int64)
    any_valid = valid.any()
    for source, pool in zip(sources, pools, strict=True):
        states = source.index_select(1, from_slot).to(pool.dtype)
        pool.index_copy_(1, to_slot, torch.where(any_valid, states, pool[:, :1]))
