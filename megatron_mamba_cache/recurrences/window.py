"""Draft states in slots of their own: works for every recurrence.

A draft window is a request's columns of slots. Column 0 is its live slot; column j has the state after token j of the
step. Windows of inputs are in column 0's slot only, which has room for those of drafts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .batches import PAD_SLOT, AlignBatch
from .cached_form import StoredStates
from .interface import LiveState


class WindowStorage:
    """Draft states in slots of the pool, whose own tensors are `live`; a `DraftStorage`."""

    def __init__(self, live: StoredStates) -> None:
        self._live = live

    def layer(self, index: int) -> None:
        """Return None: slots alone hold a layer's states."""

    def cache_boundaries(self, stored: StoredStates, replay: object, rows: AlignBatch, block_size: int) -> None:
        """Cache the states at the boundaries that requests reached, by an align copy."""
        stored.align_copy(rows, block_size)

    def resolve(self, states: Sequence[LiveState]) -> None:
        """Copy the accepted column of each draft window to column 0, all layers, in place."""
        shifted = [state for state in states if state.accepted > 1]
        if shifted:
            rows, _ = accepted_columns(shifted, self._live.device)
            self._live.align_copy(rows, block_size=1)


def accepted_columns(states: Sequence[LiveState], device: torch.device) -> tuple[AlignBatch, Tensor]:
    """Return an align copy to column 0, as of blocks of one token that end at the accepted one, and the buffers."""
    width = max(state.accepted for state in states)
    numbers = [
        [state.slot, state.accepted, state.buffer]
        + [state.accepted_slot if column == state.accepted - 1 else state.slot for column in range(width)]
        for state in states
    ]
    table = columns_of(numbers).to(device)[:, : len(states)]
    ones, zeros = torch.ones_like(table[0]), torch.zeros_like(table[0])
    rows = AlignBatch(
        computed=ones,
        scheduled=zeros,
        drafts=zeros,
        accepted=table[1],
        columns=table[3:].T.contiguous(),
        state_columns=zeros,
        targets=table[0],
    )
    return rows, table[2]


def columns_of(lines: Sequence[Sequence[int]]) -> Tensor:
    """Return lines of numbers as columns, [numbers, at least lines] int32, padded so that all counts run one kernel."""
    table = torch.full((len(lines[0]), -(-len(lines) // 4) * 4), PAD_SLOT, dtype=torch.int32)
    table[:, : len(lines)] = torch.tensor(lines, dtype=torch.int32).T
    return table
