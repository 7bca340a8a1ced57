"""Whole-slot reads, writes, copies and clears of a state pool; torch only, without a host sync.

A masked write must not branch on device values, nor index with a mask (its size is data). So padded entries are
redirected to the first valid one, slot and value: duplicates that write equal bytes. If no entry is valid, slot 0
gets its own content back.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.reference import along_first_dim, redirect_padding
from .rows import PAD_SLOT, PrefillRows


def load_slots(pool: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Read slots as fresh tensors [n, ...] of `dtype`, zeros where `slots` [n] int32 holds PAD_SLOT."""
    states = pool.index_select(0, slots.clamp_min(0).to(torch.int64))
    return torch.where(along_first_dim(slots != PAD_SLOT, states), states, 0).to(dtype)


def store_slots(pool: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write values [n, ...], cast to the pool's dtype, into slots [n] int32 of `pool` in place; skip PAD_SLOT."""
    if slots.shape[0] == 0:
        return
    redirect = redirect_padding(slots != PAD_SLOT)
    targets = slots.index_select(0, redirect).to(torch.int64)
    states = values.index_select(0, redirect).to(pool.dtype)
    states = torch.where(along_first_dim(targets != PAD_SLOT, states), states, pool[:1])
    pool.index_copy_(0, targets.clamp_min(0), states)


def store_empty_rows(pool: Tensor, rows: PrefillRows) -> None:
    """Write the initial state of each row without tokens into its final slot."""
    is_empty = rows.cu_rows[1:] == rows.cu_rows[:-1]
    states = load_slots(pool, rows.initial_slots, pool.dtype)
    store_slots(pool, torch.where(is_empty, rows.final_slots, PAD_SLOT), states)


def copy_slots_ref(pools: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy whole slots within each pool, all layers, in place; see `copy_slots`."""
    copy_slots_between_ref(pools, pools, src, dst)


def copy_slots_between_ref(sources: Sequence[Tensor], pools: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy whole slots of each source pool into its pool, all layers, in place; see `copy_slots_between`."""
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


def zero_slots_ref(pools: Sequence[Tensor], slots: Tensor) -> None:
    """Clear whole slots of each pool, all layers, in place.

    Args:
        pools: Each [layers, slots, ...].
        slots: [n] int32 slot numbers; PAD_SLOT is skipped.
    """
    if slots.shape[0] == 0:
        return
    targets = slots.index_select(0, redirect_padding(slots != PAD_SLOT)).to(torch.int64)
    for pool in pools:
        content = pool.index_select(1, targets.clamp_min(0))
        valid = (targets != PAD_SLOT).reshape(1, -1, *[1] * (pool.dim() - 2))
        pool.index_copy_(1, targets.clamp_min(0), torch.where(valid, 0, content))
