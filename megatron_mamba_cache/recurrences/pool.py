"""The one pool of Mamba states: live, reserved and cached slots are rows of the same tensors.

Only where cached states are rounded, those are rows of a `RoundedPool` beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .align_copy import AlignRows, align_copy
from .draft_inputs import DraftInputs
from .layout import StateLayout
from .mamba2.replay_rows import BoundaryFolds, ReplayRing
from .mamba2.state_replay import fold_boundaries
from .prefill_rows import PAD_SLOT
from .rounded_pool import RoundedPool
from .rounded_states import RoundedStates
from .slot_copies import copy_slots, copy_slots_between, zero_slots
from .slot_numbers import sent_to


@dataclass(frozen=True, slots=True)
class LayerStates:
    """One layer's view of the pool, and where its boundary states go: to the same slots, unless they are rounded."""

    conv: Tensor  # [slots, window, conv_dim]
    ssm: Tensor  # [slots, heads, d_state, head_dim]
    ring: ReplayRing | None = None  # None: states are not replayed
    ring_len: int = 0
    draft_inputs: Tensor | None = None  # [rings, drafts, conv_dim]; None: a window is in its slot alone
    conv_ends: Tensor | None = None  # [cached slots, d_conv - 1, conv_dim]; None: states are not rounded
    rounded: RoundedStates | None = None  # with `conv_ends`


@dataclass(frozen=True, slots=True)
class DraftWindow:
    """The location of a draft window's accepted state.

    Args:
        live: Slot of column 0, which holds the conv window, or what of it is not beside the ring.
        slot: Slot of the accepted column, with its SSM state.
        offset: Where the accepted column's conv window begins in that of column 0; at least 1.
        ring: The request's ring, if states are replayed.
    """

    live: int
    slot: int
    offset: int
    ring: int = 0


class RingState(NamedTuple):
    """A live state that is replayed: where it is, and from which to which position it is in the ring."""

    slot: int
    ring: int
    folded: int
    end: int


class StatePool:
    """Conv windows and SSM states of all slots and layers, at fixed addresses for the pool's life."""

    def __init__(
        self,
        layout: StateLayout,
        conv: Tensor,
        ssm: Tensor,
        rings: ReplayRing | None = None,
        ring_len: int = 0,
        draft_inputs: Tensor | None = None,
        rounded: RoundedPool | None = None,
    ) -> None:
        """Take tensors over; see `recurrences/pool_tensors.py`.

        Args:
            conv: [layers, slots, window, conv_dim]; a slot and layer contiguous.
            ssm: [layers, slots, heads, d_state, head_dim]; likewise.
            rings: [layers, rings, ...]; what live states are replayed from, None if they are not.
            ring_len: Tokens after which a replayed state is written.
            draft_inputs: [layers, rings, drafts, conv_dim]; where the conv windows of replayed states go on, None if
                they are in `conv` alone.
            rounded: Where cached states are; None: in this pool.
        """
        self.layout = layout
        self.num_slots = conv.shape[1]
        self.conv = conv
        self.ssm = ssm
        self.rings = rings
        self.ring_len = ring_len
        self.draft_inputs = draft_inputs
        self.rounded = rounded

    @staticmethod
    def zeros(layout: StateLayout, num_slots: int, device: torch.device | int | str) -> "StatePool":
        """Return a pool with memory of its own, all zero."""
        lead = (layout.num_layers, num_slots)
        conv = torch.zeros(lead + layout.conv_shape, dtype=layout.conv_dtype, device=device)
        return StatePool(layout, conv, torch.zeros(lead + layout.ssm_shape, dtype=layout.ssm_dtype, device=device))

    def with_rings(self, rings: ReplayRing, ring_len: int, draft_inputs: Tensor | None) -> "StatePool":
        """Return a pool over the same states, whose live ones are replayed from rings."""
        return StatePool(self.layout, self.conv, self.ssm, rings, ring_len, draft_inputs, self.rounded)

    @property
    def cached(self) -> "StatePool | RoundedPool":
        """The pool with the cached states."""
        return self.rounded or self

    @property
    def device(self) -> torch.device:
        """Where the pool is."""
        return self.ssm.device

    def layer(self, index: int) -> LayerStates:
        """Return the states of Mamba layer `index` (counted over this rank's Mamba layers)."""
        rings = self.rings
        ring = None if rings is None else ReplayRing(rings.x[index], rings.B[index], rings.steps[index])
        draft_inputs = None if self.draft_inputs is None else self.draft_inputs[index]
        states = LayerStates(self.conv[index], self.ssm[index], ring, self.ring_len, draft_inputs)
        rounded = self.rounded
        return (
            states
            if rounded is None
            else replace(states, conv_ends=rounded.conv[index], rounded=rounded.ssm_layer(index))
        )

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Copy whole slots, all layers and state types, in place.

        Args:
            src, dst: [n] int32 slot numbers on the pool's device; see `copy_slots`.
        """
        copy_slots((self.conv, self.ssm), src, dst)

    def align_copy(self, rows: AlignRows, block_size: int, window_len: int) -> None:
        """Write the states at the boundaries that rows reached into their targets; see `align_copy`.

        Args:
            window_len: Conv inputs that a state keeps.
        """
        if self.rounded is None:
            align_copy(self.conv, self.ssm, rows, block_size, window_len)
        else:
            self.rounded.align_copy(self.conv, self.ssm, rows, block_size)

    def copy_windows(self, rows: AlignRows, block_size: int, rings: Tensor) -> None:
        """Write the conv windows at the boundaries that rows reached into their targets, whose states are folded.

        Args:
            rings: [rows] int32; the rows' rings.
        """
        drafts, window_len = self._draft_inputs_of(rings), self.layout.conv_shape[0]
        if self.rounded is None:
            align_copy(self.conv, self._without_ssm, rows, block_size, window_len, drafts=drafts)
        else:
            self.rounded.align_copy(self.conv, self._without_ssm, rows, block_size, drafts)

    def fold_boundaries(self, folds: BoundaryFolds) -> None:
        """Write replayed states at boundaries into their targets; the pool has rings. See `fold_boundaries`."""
        assert self.rings is not None
        rounded = None if self.rounded is None else self.rounded.ssm
        fold_boundaries(self.ssm, self.rings, folds, self.ring_len, rounded)

    def store_layer(self, layer: int, slot: int, conv: Tensor, ssm: Tensor) -> None:
        """Write one layer's state into a slot.

        Args:
            conv, ssm: Of the layout's shapes.
        """
        self.conv[layer, slot].copy_(conv)
        self.ssm[layer, slot].copy_(ssm)

    def store_from(self, conv: Tensor, ssm: Tensor, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy slots `src` of other pools with the same slot shapes into slots `dst` of this one, all layers.

        Args:
            conv, ssm: [layers, slots, ...]; may be this pool's own if no slot is in both lists.
            dst: Pairwise distinct.
        """
        sources, targets = sent_to(self.device, src, dst)
        copy_slots_between((conv, ssm), (self.conv, self.ssm), sources, targets)

    def restore_to(self, conv: Tensor, ssm: Tensor, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy slots `src` of this pool into slots `dst` of other pools: `store_from`, the other way."""
        sources, targets = sent_to(self.device, src, dst)
        copy_slots_between((self.conv, self.ssm), (conv, ssm), sources, targets)

    def settle(self, windows: Sequence[DraftWindow], window_len: int) -> None:
        """Copy the accepted state of each draft window to column 0, all layers, in place.

        Where states are replayed, only its conv window is copied; see `fold`.

        Args:
            window_len: Conv inputs that a state keeps.
        """
        if not windows:
            return
        # This is the align copy of a step in which every token ends a block, and so does the accepted one.
        width = 1 + max(window.offset for window in windows)
        numbers = [
            [window.live, 1 + window.offset, window.ring]
            + [window.slot if column == window.offset else window.live for column in range(width)]
            for window in windows
        ]
        table = _columns_of(numbers).to(self.ssm.device)[:, : len(windows)]
        ones, zeros = torch.ones_like(table[0]), torch.zeros_like(table[0])
        rows = AlignRows(
            computed=ones,
            scheduled=zeros,
            drafts=zeros,
            accepted=table[1],
            columns=table[3:].T.contiguous(),
            state_columns=zeros,
            targets=table[0],
        )
        if self.rings is None:
            align_copy(self.conv, self.ssm, rows, block_size=1, window_len=window_len)
        else:
            drafts = self._draft_inputs_of(table[2])
            align_copy(self.conv, self._without_ssm, rows, block_size=1, window_len=window_len, drafts=drafts)

    def fold(self, rows: Sequence[RingState]) -> None:
        """Fold what the rings of replayed states hold into their checkpoints, all layers, in place.

        Without rings, do nothing.
        """
        if self.rings is not None and rows:
            slots, rings, folded, ends = _columns_of(rows).to(self.ssm.device)[:, : len(rows)]
            fold_boundaries(self.ssm, self.rings, BoundaryFolds(slots, rings, folded, ends, slots), self.ring_len)

    @property
    def _without_ssm(self) -> Tensor:
        """SSM states of no heads: an align copy of them moves conv windows alone."""
        return self.ssm[:, :, :0]

    def _draft_inputs_of(self, rings: Tensor) -> DraftInputs | None:
        return None if self.draft_inputs is None else DraftInputs(self.draft_inputs, rings)

    def zero(self, slots: Tensor) -> None:
        """Zero whole slots, all layers and state types, in place."""
        zero_slots((self.conv, self.ssm), slots)


def _columns_of(lines: Sequence[Sequence[int]]) -> Tensor:
    """Return lines of numbers as columns, [numbers, at least lines] int32.

    Rows are padded to 16 bytes, so that every number of lines runs the same compiled kernel.
    """
    table = torch.full((len(lines[0]), -(-len(lines) // 4) * 4), PAD_SLOT, dtype=torch.int32)
    table[:, : len(lines)] = torch.tensor(lines, dtype=torch.int32).T
    return table
