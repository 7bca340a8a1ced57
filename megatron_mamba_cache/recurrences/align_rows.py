"""Rows of a verify step as the align copy sees them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AlignRows:
    """What the align copy of a step reads; all tensors on the pools' device.

    A row copies at most one state. Targets are pairwise distinct and never another row's source. Where a row
    copies, state_columns + shift is one of its columns.

    Args:
        computed: [rows] int32; tokens before the step.
        scheduled: [rows] int32; tokens fed in the step, drafts included.
        drafts: [rows] int32.
        accepted: [rows] int32 or int64, of any stride; tokens kept, the base token included; 0 counts as 1.
        columns: [rows, columns] int32; slots of the row's draft window, PAD_SLOT in a padded row.
        state_columns: [rows] int32; column that holds the state after the base token.
        targets: [rows] int32; slot that receives the state at the one boundary the step can reach, PAD_SLOT for none.
    """

    computed: Tensor
    scheduled: Tensor
    drafts: Tensor
    accepted: Tensor
    columns: Tensor
    state_columns: Tensor
    targets: Tensor
