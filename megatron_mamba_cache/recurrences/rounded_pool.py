"""The pool of cached states that are rounded to 8 bits; live ones are in a `StatePool`, under other numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .align_copy import AlignRows
from .draft_inputs import DraftInputs
from .layout import RoundedLayout
from .reference_rounding import store_rounded_ref
from .rounded_align import rounded_align_copy
from .rounded_states import RoundedStates, restore_states
from .slot_copies import copy_slots_between
from .slot_numbers import sent_to


class RoundedPool:
    """Conv windows and rounded SSM states of all slots and layers, at fixed addresses for the pool's life."""

    def __init__(self, layout: RoundedLayout, conv: Tensor, values: Tensor, scales: Tensor) -> None:
        """Take tensors over; see `recurrences/pool_tensors.py`.

        Args:
            conv: [layers, slots, d_conv - 1, conv_dim]; a slot and layer contiguous.
            values: [layers, slots, heads, d_state, head_dim] int8; likewise.
            scales: [layers, slots, heads, head_dim] float32; likewise.
        """
        self.layout = layout
        self.num_slots = conv.shape[1]
        self.conv = conv
        self.ssm = RoundedStates(values, scales)

    @property
    def device(self) -> torch.device:
        """Where the pool is."""
        return self.conv.device

    def ssm_layer(self, index: int) -> RoundedStates:
        """Return the states of Mamba layer `index` (counted over this rank's Mamba layers)."""
        return RoundedStates(self.ssm.values[index], self.ssm.scales[index])

    def restore(self, conv: Tensor, ssm: Tensor, src: Tensor, dst: Tensor) -> None:
        """Write slots `src` of this pool, multiplied back, into slots `dst` of a pool of live states, all layers.

        Args:
            conv, ssm: Those of a `StatePool`.
            src, dst: [n] int32 slot numbers on the pool's device; a pair holding PAD_SLOT is skipped.
        """
        restore_states(self.ssm, ssm, src, dst)
        copy_slots_between((self.conv,), (conv[:, :, : self.conv.shape[2]],), src, dst)

    def align_copy(
        self, conv: Tensor, ssm: Tensor, rows: AlignRows, block_size: int, drafts: DraftInputs | None = None
    ) -> None:
        """Round the states at the boundaries that rows reached into their targets here; see `align_copy`.

        Args:
            conv, ssm: Those of a `StatePool`; SSM states without heads leave those here as they are.
            drafts: Where the rows' conv windows go on, if not in `conv`.
        """
        heads = ssm.shape[2]
        states = RoundedStates(self.ssm.values[:, :, :heads], self.ssm.scales[:, :, :heads])
        rounded_align_copy(conv, ssm, rows, block_size, self.conv.shape[2], self.conv, states, drafts=drafts)

    def store_layer(self, layer: int, slot: int, conv: Tensor, ssm: Tensor) -> None:
        """Round one layer's state into a slot.

        Args:
            conv: [d_conv - 1, conv_dim].
            ssm: [heads, d_state, head_dim].
        """
        self.conv[layer, slot].copy_(conv)
        states = self.ssm_layer(layer)
        store_rounded_ref(states.values, states.scales, sent_to(self.device, [slot])[0], ssm[None].to(self.device))

    def store_from(self, conv: Tensor, ssm: Tensor, src: Sequence[int], dst: Sequence[int]) -> None:
        """Round slots `src` of a pool of live states into slots `dst` of this one, all layers.

        Args:
            conv: [layers, slots, window, conv_dim], window >= d_conv - 1.
            ssm: [layers, slots, heads, d_state, head_dim].
            dst: Pairwise distinct.
        """
        sources, targets = sent_to(self.device, src, dst)
        copy_slots_between((conv[:, :, : self.conv.shape[2]],), (self.conv,), sources, targets)
        for layer in range(self.layout.num_layers):
            states = self.ssm_layer(layer)
            store_rounded_ref(states.values, states.scales, targets, ssm[layer].index_select(0, sources.long()))

    def restore_to(self, conv: Tensor, ssm: Tensor, src: Sequence[int], dst: Sequence[int]) -> None:
        """Write slots `src` of this pool into slots `dst` of a pool of live states: `store_from`, the other way."""
        self.restore(conv, ssm, *sent_to(self.device, src, dst))
