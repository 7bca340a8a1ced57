"""Torch references for folds and their plan, token by token; they support float64 and do not synchronize on a GPU."""

import torch
from torch import Tensor

from ...kernels.reference import compute_dtype, redirect_padding
from ..batches import PAD_SLOT, AlignBatch, ReplayBatch
from ..quantized_states import QuantizedStates, store_quantized_ref
from ..slot_copies import load_slots, store_slots
from ..stochastic_rounding import cast_state_ref, next_seed
from .ring import BoundaryFolds, ReplayRing


def fold_boundaries_ref(
    pools: Tensor,
    rings: ReplayRing,
    rows: BoundaryFolds,
    ring_len: int,
    quantized: QuantizedStates | None = None,
    seed: int | None = None,
) -> None:
    """Torch reference for `fold_boundaries`."""
    if rows.targets.shape[0] == 0:
        return
    targets = torch.where(rows.slots != PAD_SLOT, rows.targets, PAD_SLOT)
    ends = torch.where(targets != PAD_SLOT, rows.ends, rows.folded)
    for layer, pool in enumerate(pools):
        ring = ReplayRing(rings.x[layer], rings.B[layer], rings.steps[layer])
        states = load_slots(pool, rows.slots, compute_dtype(ring.x))
        of_layer = next_seed(seed, layer)
        states = _folded(states, pool.dtype, ring, rows, ends, ring_len, of_layer)
        if quantized is None:
            store_slots(pool, targets, cast_state_ref(states, pool.dtype, of_layer, ends))
        else:
            store_quantized_ref(quantized.of_layer(layer), targets, states)


def plan_boundary_folds_ref(rows: ReplayBatch, align: AlignBatch, ring_len: int, block_size: int) -> BoundaryFolds:
    """Torch reference for `plan_boundary_folds`."""
    running = align.computed + align.scheduled - align.drafts
    end = (running + align.accepted.to(torch.int32).clamp_min(1) - 1) // block_size * block_size
    reached = (align.targets != PAD_SLOT) & (rows.slots != PAD_SLOT) & (end >= running) & (end > 0)
    first = torch.maximum(rows.folded, align.computed // ring_len * ring_len)
    targets = torch.where(reached, align.targets, PAD_SLOT)
    return BoundaryFolds(rows.slots, rows.buffers, first, torch.where(reached, end, first), targets)


def fold_and_replay(
    pool: Tensor, ring: ReplayRing, rows: ReplayBatch, ring_len: int, dtype: torch.dtype, seed: int | None
) -> Tensor:
    """Fold each request's due ring entries into its base, in place; return the states after its `computed` tokens."""
    is_row = rows.slots != PAD_SLOT
    first = torch.maximum(rows.folded, rows.computed // ring_len * ring_len)
    states = _folded(load_slots(pool, rows.slots, dtype), pool.dtype, ring, rows, first, ring_len, seed)
    store_slots(pool, torch.where(first > rows.folded, rows.slots, PAD_SLOT), states)
    for i in range(_most(rows.computed - first, is_row, ring_len)):
        states = advanced(states, ring, rows.buffers, first + i, is_row & (first + i < rows.computed))
    return states


def _folded(
    states: Tensor,
    stored: torch.dtype,
    ring: ReplayRing,
    rows: ReplayBatch | BoundaryFolds,
    ends: Tensor,
    ring_len: int,
    seed: int | None,
) -> Tensor:
    """Return the states after the ring entries before `ends`, rounded to `stored` at every multiple of `ring_len`."""
    is_row = rows.slots != PAD_SLOT
    for i in range(_most(ends - rows.folded, is_row, ring.capacity)):
        position = rows.folded + i
        folds = is_row & (position < ends)
        states = advanced(states, ring, rows.buffers, position, folds)
        is_inexact = (folds & ((position + 1) % ring_len == 0))[:, None, None, None]
        inexact = cast_state_ref(states, stored, seed, position, after=1)
        states = torch.where(is_inexact, inexact.to(states.dtype), states)
    return states


def _most(counts: Tensor, is_row: Tensor, bound: int) -> int:
    """Return the largest count, at most `bound`; on a GPU return `bound`, because reading the counts would wait."""
    return bound if counts.is_cuda else min(bound, max(0, int(torch.where(is_row, counts, 0).max())))


def advanced(states: Tensor, ring: ReplayRing, rings: Tensor, position: Tensor, exists: Tensor) -> Tensor:
    """Return states [requests, heads, d_state, head_dim] advanced by the token at `position`, if it exists."""
    number, index = torch.where(exists, rings, 0).to(torch.int64), position.to(torch.int64) % ring.capacity
    dtype, heads = states.dtype, states.shape[1]
    x = ring.x[number, position.to(torch.int64) % ring.x_capacity].to(dtype)
    steps = ring.steps[number, index].to(dtype)
    b = ring.B[number, index].to(dtype).repeat_interleave(heads // ring.B.shape[2], dim=1)
    increment = b[:, :, :, None] * (steps[:, 0, :, None] * x)[:, :, None, :]
    advanced = torch.exp(steps[:, 1])[:, :, None, None] * states + increment
    return torch.where(exists[:, None, None, None], advanced, states)


def append(held: Tensor, values: Tensor, buffers: Tensor, position: Tensor, exists: Tensor) -> None:
    """Write values to one tensor of the rings, in place; nonexistent tokens are replaced by copies of an existing one.

    Args:
        held: [rings, positions, ...]; modified.
        values, buffers, position, exists: [n, ...] and [n]; for each token its value, its ring, its position in the
            request, and False if it is padding.
    """
    redirect = redirect_padding(exists)
    number = torch.where(exists, buffers, 0).index_select(0, redirect).to(torch.int64)
    index = position.index_select(0, redirect).to(torch.int64) % held.shape[1]
    values = values.index_select(0, redirect).to(held.dtype)
    held[number, index] = torch.where(exists.any(), values, held[number, index])
