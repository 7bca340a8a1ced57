"""Arguments of the align copy, their checks, and its torch reference; none synchronizes with the host."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..kernels.reference import redirect_padding
from .batches import PAD_SLOT, AlignBatch
from .draft_inputs import DraftInputs, check_draft_inputs, windows_with_drafts
from .quantized_states import QuantizedStates, store_quantized_ref


@dataclass(frozen=True, slots=True)
class StateMove:
    """Copy of one state tensor from running requests to the cache.

    Args:
        source: [layers, slots, *shape]; each slot is contiguous, or for a window each input.
        target: A tensor of the same layout, which may be `source` itself or have another number of slots; or
            `QuantizedStates` if the shape is [heads, rows, channels].
        window_len: Number of inputs in a cached window; 0: the tensor is copied as a whole.
        tail: Inputs of the windows from `window_len` on, for all layers; None if slots hold whole windows.
    """

    source: Tensor
    target: Tensor | QuantizedStates
    window_len: int = 0
    tail: DraftInputs | None = None

    @property
    def is_in_place(self) -> bool:
        """True if source and target are the same tensor."""
        return self.target is self.source

    @property
    def num_targets(self) -> int:
        """Number of slots in the target."""
        return (self.target.values if isinstance(self.target, QuantizedStates) else self.target).shape[1]


def align_copy_ref(moves: Sequence[StateMove], rows: AlignBatch, block_size: int) -> None:
    """Torch reference for `align_copy`; all sources are read before any target is written."""
    if rows.targets.shape[0] == 0:
        return
    keeps, window, whole, shift = _decide(rows, block_size)
    # A request without a copy repeats the first request's copy; if no request copies, slot 0 is copied to itself.
    redirect = redirect_padding(keeps)
    targets = torch.where(keeps, rows.targets, 0).index_select(0, redirect).to(torch.int64)
    sources = whole.index_select(0, redirect)
    # Not index_select: on a CPU, it copies a tensor whole whose slots are not adjacent.
    kept = [
        _windows(move, keeps, window, shift).index_select(1, redirect) if move.window_len else move.source[:, sources]
        for move in moves
    ]
    any_kept = keeps.any()
    for move, states in zip(moves, kept, strict=True):
        if isinstance(move.target, QuantizedStates):
            for layer in range(states.shape[0]):
                slots = torch.where(any_kept, targets, PAD_SLOT).to(torch.int32)
                store_quantized_ref(move.target.of_layer(layer), slots, states[layer])
            continue
        target = move.target[:, :, : move.window_len] if move.window_len else move.target
        own = states if move.is_in_place else torch.where(any_kept, states, target[:, :1])
        target.index_copy_(1, targets, own)


def _decide(rows: AlignBatch, block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return [requests] each: True if a state is cached; source slots of windows and of whole tensors; shifts."""
    running = rows.computed + rows.scheduled - rows.drafts
    accepted = rows.accepted.to(torch.int32).clamp_min(1)
    aligned = (running + accepted - 1).div(block_size, rounding_mode="floor") * block_size
    # The counts of padding requests may be stale, so check the column index against the number of columns.
    in_window = rows.state_columns + aligned - running < rows.columns.shape[1]
    reached = (aligned >= running) & (aligned > 0) & (rows.targets != PAD_SLOT) & in_window

    shift = torch.where(reached, aligned - running, 0)
    column = torch.where(reached, rows.state_columns, 0).to(torch.int64)
    window, whole = (rows.columns.gather(1, at[:, None])[:, 0] for at in (column, column + shift))
    keeps = reached & (window != PAD_SLOT) & (whole != PAD_SLOT)
    window, whole, shift = (torch.where(keeps, values, 0).to(torch.int64) for values in (window, whole, shift))
    return keeps, window, whole, shift


def _windows(move: StateMove, keeps: Tensor, slots: Tensor, shift: Tensor) -> Tensor:
    """Return the windows to cache, [layers, requests, window_len, ...]; for other requests, the window in slot 0."""
    pool = move.source if move.tail is None else move.source[:, :, : move.window_len]
    stored = windows_with_drafts(pool[:, slots], move.tail, keeps)
    times = shift[:, None] + torch.arange(move.window_len, device=shift.device)  # [requests, window_len]
    index = times.reshape(1, *times.shape, *[1] * (stored.dim() - 3))
    return stored.gather(2, index.expand(stored.shape[0], -1, -1, *stored.shape[3:]))


def check_moves(moves: Sequence[StateMove], num_rows: int) -> None:
    """Raise a `ValueError` unless all moves are valid and a single align copy can process them."""
    first = moves[0]
    for move in moves:
        source = move.source
        if source.dim() < 3 or source.shape[1] != first.source.shape[1] or source.device != first.source.device:
            raise ValueError(
                f"sources must have shape [layers, {first.source.shape[1]} slots, ...] on {first.source.device}, "
                f"found {tuple(source.shape)} on {source.device}"
            )
        if (move.is_in_place, move.num_targets) != (first.is_in_place, first.num_targets):
            raise ValueError("moves must all be in place, or all have separate targets with the same number of slots")
        if isinstance(move.target, QuantizedStates):
            _check_contiguous(source, "source")
            move.target.check(source)
            continue
        _check_window(move)
        if move.tail is not None:
            check_draft_inputs(move.tail, source, num_rows)


def _check_window(move: StateMove) -> None:
    source, target, window_len = move.source, move.target, move.window_len
    assert isinstance(target, Tensor)
    _check_contiguous(source, "source", 3 if window_len else 2)
    _check_contiguous(target, "target", 3 if window_len else 2)
    if window_len and not window_len <= min(source.shape[2], target.shape[2]):
        raise ValueError(
            f"windows must have at least {window_len} inputs, found source {tuple(source.shape)} and target "
            f"{tuple(target.shape)}"
        )
    lead = 3 if window_len else 2
    fits = source.shape[:1] + source.shape[lead:] == target.shape[:1] + target.shape[lead:]
    if not fits or source.dtype != target.dtype or source.device != target.device:
        raise ValueError(
            f"source and target may differ only in the number of slots; found source {tuple(source.shape)} "
            f"{source.dtype} on {source.device} and target {tuple(target.shape)} {target.dtype} on {target.device}"
        )


def _check_contiguous(pool: Tensor, name: str, lead: int = 2) -> None:
    if not pool[(slice(1),) * lead].is_contiguous():
        inner = "inputs" if lead == 3 else "slots"
        raise ValueError(f"{inner} of {name} must be contiguous, found strides {pool.stride()}")


def check_rows(rows: AlignBatch, device: torch.device) -> None:
    """Raise a `ValueError` unless the tensors of the batch match each other and are on `device`."""
    num_rows = rows.targets.shape[0]
    for name, values in ((field.name, getattr(rows, field.name)) for field in fields(rows)):
        dtypes = (torch.int32, torch.int64) if name == "accepted" else (torch.int32,)
        if values.dtype not in dtypes or values.device != device:
            raise ValueError(
                f"{name} must have a dtype in {dtypes} on {device}, found {values.dtype} on {values.device}"
            )
        if values.dim() != (2 if name == "columns" else 1) or values.shape[0] != num_rows:
            raise ValueError(f"{name} must have {num_rows} entries, one per request, found shape {tuple(values.shape)}")
        if name != "accepted" and values.shape[-1] > 1 and values.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous, found strides {values.stride()}")
