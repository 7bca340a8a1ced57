"""Checks of the rows that ops take: dtypes, shapes, devices; no host sync."""

import torch
from torch import Tensor

from .decode_rows import DecodeRows
from .prefill_rows import PrefillRows


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
