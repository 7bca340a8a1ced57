"""Packed rows of a step: where they begin and end, and which slots hold and receive their states."""

from dataclasses import dataclass

import torch
from torch import Tensor

PAD_SLOT = -1
"""Slot number that stands for no slot: it reads as the zero state and receives nothing."""


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Describe packed rows, their SSM chunks and their state slots; all tensors on the ops' device.

    An initial slot may be shared by several rows, and may equal its own row's final slot. Final and chunk slots
    are pairwise distinct and never another row's initial slot. Tokens past the last row are padding.

    Args:
        cu_rows: [rows + 1] int32; row r holds the packed tokens cu_rows[r] to cu_rows[r + 1], the end excluded.
        initial_slots: [rows] int32; slot of the state before the row's first token, PAD_SLOT for the zero state.
        final_slots: [rows] int32; slot that receives the state after the row's last token, PAD_SLOT for none.
            An empty row's final slot receives its initial state.
        cu_chunks: [chunks + 1] int32; packed starts of the SSM chunks, in order. A chunk never spans rows; an
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


def whole_rows(num_rows: int, row_len: int, ssm_chunk_size: int, device: torch.device) -> PrefillRows:
    """Return equal rows that start from the zero state and keep no state: a plain full-sequence batch."""
    chunk_starts = torch.arange(0, row_len, ssm_chunk_size, dtype=torch.int32, device=device)
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
