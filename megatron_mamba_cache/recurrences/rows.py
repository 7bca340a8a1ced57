"""Packed rows of a step as ops on states read them: where tokens begin and end, and which slots hold the states."""

from dataclasses import dataclass

import torch
from torch import Tensor

PAD_SLOT = -1
"""Slot number that stands for no slot: it reads as the zero state and receives nothing."""


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Describe packed rows, their chunks and their state slots; all tensors on the ops' device.

    An initial slot may be shared by several rows, and may equal its own row's final slot. Final and chunk slots
    are pairwise distinct and never another row's initial slot. Tokens past the last row are padding.

    Args:
        cu_rows: [rows + 1] int32; row r holds the packed tokens cu_rows[r] to cu_rows[r + 1], the end excluded.
        initial_slots: [rows] int32; slot of the state before the row's first token, PAD_SLOT for the zero state.
        final_slots: [rows] int32; slot that receives the state after the row's last token, PAD_SLOT for none.
            An empty row's final slot receives its initial state.
        cu_chunks: [chunks + 1] int32; packed starts of the chunks, in order. A chunk never spans rows; an
            empty one is padding: it changes and stores nothing.
        chunk_rows: [chunks] int32; the row that a chunk belongs to.
        chunk_slots: [chunks] int32; slot that receives the state at the chunk's end, PAD_SLOT for none.
        cu_row_chunks: [rows + 1] int32; row r's chunks are cu_row_chunks[r] to cu_row_chunks[r + 1], the end excluded.
        longest_first: [rows] int32; the rows in the order in which to start their work, longest first.
    """

    cu_rows: Tensor
    initial_slots: Tensor
    final_slots: Tensor
    cu_chunks: Tensor
    chunk_rows: Tensor
    chunk_slots: Tensor
    cu_row_chunks: Tensor
    longest_first: Tensor


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


@dataclass(frozen=True, slots=True)
class ReplayRows:
    """Describe packed decode rows whose states are replayed from a buffer each; all tensors on the ops' device.

    A row's slot holds its checkpoint, the state after `folded` tokens; its buffer holds what the tokens after them add.
    Slots of different rows are distinct, and so are buffers. Tokens past the last row are padding.

    Args:
        cu_tokens: [rows + 1] int32; row r feeds the packed tokens cu_tokens[r] to cu_tokens[r + 1], the end excluded.
        slots: [rows] int32; slot of the row's checkpoint. A row of PAD_SLOT gives zeros and touches nothing.
        buffers: [rows] int32; the row's buffer.
        folded: [rows] int32; tokens that are in the checkpoint before the step.
        computed: [rows] int32; tokens before the step, at least `folded`: the position of the row's first token.
        max_tokens: Host bound of the tokens of a row.
    """

    cu_tokens: Tensor
    slots: Tensor
    buffers: Tensor
    folded: Tensor
    computed: Tensor
    max_tokens: int


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


def whole_rows(num_rows: int, row_len: int, grain: int, device: torch.device) -> PrefillRows:
    """Return equal rows that start from the zero state and keep no state: a plain full-sequence batch."""
    chunk_starts = torch.arange(0, row_len, grain, dtype=torch.int32, device=device)
    row_starts = torch.arange(0, (num_rows + 1) * row_len, row_len, dtype=torch.int32, device=device)
    starts = (row_starts[:-1, None] + chunk_starts).flatten()
    none = torch.full_like(row_starts[:-1], PAD_SLOT)
    return PrefillRows(
        cu_rows=row_starts,
        initial_slots=none,
        final_slots=none,
        cu_chunks=torch.cat((starts, row_starts[-1:])),
        chunk_rows=torch.arange(num_rows, dtype=torch.int32, device=device).repeat_interleave(len(chunk_starts)),
        chunk_slots=torch.full_like(starts, PAD_SLOT),
        cu_row_chunks=torch.arange(num_rows + 1, dtype=torch.int32, device=device) * len(chunk_starts),
        longest_first=torch.arange(num_rows, dtype=torch.int32, device=device),
    )


def check_decode_rows(rows: DecodeRows, device: torch.device) -> None:
    """Raise a ValueError unless the tensors of `rows` fit together and are on `device`."""
    num_rows = rows.accepted.shape[0]
    check_vectors({"cu_tokens": (rows.cu_tokens, num_rows + 1), "accepted": (rows.accepted, num_rows)}, device)
    columns = rows.columns
    if columns.dim() != 2 or columns.shape[0] != num_rows or not 1 <= rows.max_len <= columns.shape[1]:
        raise ValueError(
            f"need columns for {num_rows} rows and max_len from 1 to their number, "
            f"found {tuple(columns.shape)} and {rows.max_len}"
        )
    if columns.dtype != torch.int32 or columns.device != device or not columns[:1].is_contiguous():
        raise ValueError(
            f"need columns of int32 on {device}, contiguous within a row, "
            f"found {columns.dtype} on {columns.device} with strides {columns.stride()}"
        )


def check_prefill_rows(rows: PrefillRows, device: torch.device) -> None:
    """Raise a ValueError unless the tensors of `rows` fit together and are on `device`."""
    num_rows, num_chunks = rows.final_slots.shape[0], rows.chunk_rows.shape[0]
    vectors = {
        "cu_rows": (rows.cu_rows, num_rows + 1),
        "initial_slots": (rows.initial_slots, num_rows),
        "final_slots": (rows.final_slots, num_rows),
        "cu_chunks": (rows.cu_chunks, num_chunks + 1),
        "chunk_rows": (rows.chunk_rows, num_chunks),
        "chunk_slots": (rows.chunk_slots, num_chunks),
        "cu_row_chunks": (rows.cu_row_chunks, num_rows + 1),
        "longest_first": (rows.longest_first, num_rows),
    }
    check_vectors(vectors, device)


def check_vectors(vectors: dict[str, tuple[Tensor, int]], device: torch.device) -> None:
    """Raise a ValueError unless each tensor is a contiguous int32 vector of the length beside it, on `device`."""
    for name, (values, length) in vectors.items():
        if values.dtype != torch.int32 or values.device != device:
            raise ValueError(f"need {name} of int32 on {device}, found {values.dtype} on {values.device}")
        if tuple(values.shape) != (length,) or not values.is_contiguous():
            raise ValueError(
                f"need contiguous {name} of shape ({length},), "
                f"found {tuple(values.shape)} with strides {values.stride()}"
            )


class PackedTokens:
    """The packed positions of decode rows' tokens.

    `inside` [rows, max_len] bool says which of the padded form's tokens are real; those of padded rows are not.
    """

    def __init__(self, rows: DecodeRows) -> None:
        starts, ends = rows.cu_tokens[:-1].to(torch.int64), rows.cu_tokens[1:].to(torch.int64)
        self._positions = starts[:, None] + torch.arange(rows.max_len, device=starts.device)
        self.inside = (self._positions < ends[:, None]) & (rows.columns[:, :1] != PAD_SLOT)

    def gather(self, packed: Tensor) -> Tensor:
        """Return [tokens, ...] as [rows, max_len, ...]; any other token where a row has none."""
        positions = self._positions.clamp_max(packed.shape[0] - 1).flatten()
        return packed.index_select(0, positions).unflatten(0, self.inside.shape)

    def scatter(self, padded: Tensor, like: Tensor) -> Tensor:
        """Return [rows, max_len, ...] as packed tokens of the shape and dtype of `like`, zeros where there is none."""
        num_tokens = like.shape[0]
        packed = like.new_zeros(num_tokens + 1, *like.shape[1:])  # the last takes what is not a token
        targets = torch.where(self.inside, self._positions, num_tokens).flatten()
        packed.index_copy_(0, targets, padded.flatten(0, 1).to(like.dtype))
        return packed[:num_tokens]
