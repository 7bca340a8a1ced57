"""Copy whole state slots, with all layers and state tensors, in one launch.

Layout: as in `slot_tiles`. Each layer of a slot is copied as a flat array, so the tensors' inner shapes do not matter.
Grid: as many programs as can run concurrently. Each reads all slot numbers, skips padding, and copies every n-th tile
of the rest, so a single slot uses the whole device. Safe in CUDA graphs: no host sync, one launch, grid fixed at
capture.
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
"""Number of slot numbers that one loop iteration reads."""
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
    """Copy slots from each source to the pool with the same index, for all layers, in place.

    A source and its pool may be the same tensor. Slots not in `dst` are unchanged, and so are bytes between the slots
    of a strided pool. If dtypes differ, the reference runs and casts.

    Args:
        sources, pools: [layers, slots, ...] each; each layer of a slot is contiguous. Only the number of slots may
            differ between a source and its pool.
        src, dst: [n] int32 slot numbers; pairs that contain PAD_SLOT are skipped. The remaining `dst` are distinct.
            Copies run in any order, so within one pool no `dst` may be the `src` of another pair.

    Raises:
        ValueError: If lengths, shapes, dtypes, strides or devices disagree.

    Reference: `copy_slots_ref`. CUDA-graph safe: no host sync, one launch, grid fixed at capture.
    """
    for source, pool in zip(sources, pools, strict=True):
        if source.shape[:1] + source.shape[2:] != pool.shape[:1] + pool.shape[2:]:
            shapes = f"{tuple(source.shape)} and {tuple(pool.shape)}"
            raise ValueError(f"source and pool may differ only in the number of slots; found {shapes}")
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
            raise ValueError(
                f"{name} must be contiguous int32 [n], found {slots.dtype} {tuple(slots.shape)} with strides "
                f"{slots.stride()}"
            )
    if src.shape != dst.shape:
        raise ValueError(f"src and dst must have the same length, found {src.shape[0]} and {dst.shape[0]}")
    for pool in pools:
        if pool.device != src.device or pool.device != dst.device:
            raise ValueError(
                f"all tensors must be on one device, found pool on {pool.device}, src on {src.device}, dst on "
                f"{dst.device}"
            )
        if pool.dim() < 3 or not pool[:1, :1].is_contiguous():
            raise ValueError(
                "pools must have shape [layers, slots, ...] with contiguous slots, "
                f"found {tuple(pool.shape)} with strides {pool.stride()}"
            )


def load_slots(pool: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy the states in `slots` [n] int32 to a new tensor [n, ...] of `dtype`; zeros for PAD_SLOT."""
    states = pool.index_select(0, slots.clamp_min(0).to(torch.int64))
    return torch.where(along_first_dim(slots != PAD_SLOT, states), states, 0).to(dtype)


def store_slots(pool: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write values [n, ...] to `slots` [n] int32, cast to the pool's dtype, in place; skip PAD_SLOT.

    Indexing with a mask would need a host sync. So a padding entry repeats a valid entry's write; without valid
    entries, it writes slot 0's content back.
    """
    if slots.shape[0] == 0:
        return
    redirect = redirect_padding(slots != PAD_SLOT)
    targets = slots.index_select(0, redirect).to(torch.int64)
    states = values.index_select(0, redirect).to(pool.dtype)
    states = torch.where(along_first_dim(targets != PAD_SLOT, states), states, pool[:1])
    pool.index_copy_(0, targets.clamp_min(0), states)


def store_empty_requests(pool: Tensor, rows: PrefillBatch) -> None:
    """Copy the initial state of each request that has no tokens to its final slot."""
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
        states = source[:, from_slot].to(pool.dtype)  # not index_select, which may copy the whole source on a CPU
        pool.index_copy_(1, to_slot, torch.where(any_valid, states, pool[:, :1]))
