"""Storage of draft states in slots of the pool; works for every recurrence.

A draft window is a list of slots for one request. Column 0 is the live slot; column j holds the state after token j of
the step. Conv windows are stored only in the slot in column 0, which also has room for the inputs of drafts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .batches import PAD_SLOT, AlignBatch
from .cached_form import StoredStates
from .interface import LiveState


class WindowStorage:
    """`DraftStorage` that keeps draft states in slots of the live pool."""

    def __init__(self, live: StoredStates) -> None:
        self._live = live

    def layer(self, index: int) -> None:
        """Return None, because all draft states are in slots."""

    def cache_boundaries(self, stored: StoredStates, replay: object, rows: AlignBatch, block_size: int) -> None:
        """Cache the state of each request that reached a block boundary, with an align copy."""
        stored.align_copy(rows, block_size)

    def resolve(self, states: Sequence[LiveState]) -> None:
        """Copy the state after the last accepted token of each request to column 0, for all layers, in place."""
        shifted = [state for state in states if state.accepted > 1]
        if shifted:
            rows, _ = accepted_columns(shifted, self._live.device)
            self._live.align_copy(rows, block_size=1)


def accepted_columns(states: Sequence[LiveState], device: torch.device) -> tuple[AlignBatch, Tensor]:
    """Return an `AlignBatch` that copies accepted states to live slots with block size 1, and the buffer indices."""
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
    """Transpose equally long `lines` to int32 columns; pad them to a multiple of 4 for 16-byte alignment."""
    table = torch.full((len(lines[0]), -(-len(lines) // 4) * 4), PAD_SLOT, dtype=torch.int32)
    table[:, : len(lines)] = torch.tensor(lines, dtype=torch.int32).T
    return table
