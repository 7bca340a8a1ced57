"""Packed decode rows of a step: each row's base token, its drafts and its draft window."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Describe packed decode rows and their draft windows; all tensors on the ops' device.

    A row starts from the state that its last step accepted and keeps the state after each of its tokens, so that any
    number of drafts may be rejected. Column 0's slot also holds the row's conv window: of n tokens fed, the last
    d_conv - 2 + n inputs, oldest first. Slots of different rows are distinct. Tokens past the last row are padding.

    Args:
        cu_tokens: [rows + 1] int32; row r feeds the packed tokens cu_tokens[r] to cu_tokens[r + 1], the end excluded.
        columns: [rows, columns] int32; column j's slot receives the state after the row's token j. PAD_SLOT past a
            row's last column; a row whose column 0 is PAD_SLOT gives zeros and touches nothing.
        accepted: [rows] int32, at least 1; tokens that the last step kept. The state is in column accepted - 1, and the
            conv window begins at input accepted - 1.
        max_len: Host bound of the tokens of a row, at most the number of columns.
    """

    cu_tokens: Tensor
    columns: Tensor
    accepted: Tensor
    max_len: int
