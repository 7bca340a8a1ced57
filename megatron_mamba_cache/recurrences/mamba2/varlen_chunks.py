"""Chunk metadata for external varlen kernels, which split packed requests at packed positions."""

from typing import NamedTuple

import torch
from torch import Tensor

_MAX_INT32 = 2**31 - 1


class VarlenChunks(NamedTuple):
    """Chunk metadata for packed requests, as a tuple of int32 tensors in this order.

    Args:
        cu_chunk_seqlens: [chunks + 1]; packed start of each chunk, and the end of the last one.
        last_chunk_indices: [requests]; index of each request's last chunk; -1 for an empty request.
        seq_idx_chunks: [chunks]; index of the request to which each chunk belongs.
    """

    cu_chunk_seqlens: Tensor
    last_chunk_indices: Tensor
    seq_idx_chunks: Tensor


def compute_varlen_chunk_metadata(query_start_loc: Tensor, chunk_size: int) -> VarlenChunks:
    """Split packed requests at their starts and at packed positions that are multiples of `chunk_size`.

    Synchronizes with the device, because the number of chunks depends on the request lengths.

    Args:
        query_start_loc: [requests + 1] integers, starting at 0 and not decreasing: packed starts and the end.

    Raises:
        ValueError: If `query_start_loc` is invalid or exceeds int32, or if `chunk_size` is less than 1.
    """
    _check_arguments(query_start_loc, chunk_size)
    starts = query_start_loc.to(torch.int64)
    multiples = torch.arange(0, int(starts[-1]), chunk_size, device=starts.device)
    cuts = torch.unique(torch.cat([starts, multiples]))  # [chunks + 1], sorted
    row_ends = starts[1:].contiguous()
    rows = torch.searchsorted(row_ends, cuts[:-1].contiguous(), right=True)  # [chunks]; skips empty requests
    last = torch.searchsorted(cuts, row_ends) - 1  # [requests]
    last = torch.where(row_ends > starts[:-1], last, -1)
    return VarlenChunks(cuts.to(torch.int32), last.to(torch.int32), rows.to(torch.int32))


def _check_arguments(query_start_loc: Tensor, chunk_size: int) -> None:
    dtype = query_start_loc.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise ValueError(f"query_start_loc must hold integers, found {dtype}")
    if query_start_loc.dim() != 1 or query_start_loc.numel() == 0:
        raise ValueError(f"query_start_loc must have shape [requests + 1], found {list(query_start_loc.shape)}")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be an integer of at least 1, found {chunk_size!r}")
    if int(query_start_loc[0]) != 0:
        raise ValueError(f"query_start_loc must start at 0, found {int(query_start_loc[0])}")
    if bool((query_start_loc[1:] < query_start_loc[:-1]).any()):
        raise ValueError("query_start_loc must not decrease; pass cumulative request lengths")
    if int(query_start_loc[-1]) > _MAX_INT32:
        raise ValueError(f"the end of query_start_loc must be at most {_MAX_INT32}, found {int(query_start_loc[-1])}")
