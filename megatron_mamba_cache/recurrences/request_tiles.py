"""Tiles of a scan: requests cut at absolute positions.

A request is cut into chunks, and each chunk into tiles of 64 tokens, 16 for float32, at absolute positions: only the
first tile of a request may begin between two cuts, and only its last may end there. (Inside one chunk no cut gives the
absolute position; it is cut from its own start on.) Chunk c owns the tile numbers from c * per_chunk on; the tiles of a
first chunk take the last of its numbers, so the numbers of a request are consecutive.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batches import PrefillBatch

TILE_LEN = 64
LEAST_WIDTH = 16
"""The fewest rows of a tensor-core matmul."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """Tiles of a chunk; a tile never crosses the end of its chunk.

    Args:
        length: Tokens of a full tile.
        width: Tokens that a tile has room for, a power of two.
        per_chunk: Tiles of a full chunk.
    """

    length: int
    width: int
    per_chunk: int


class CutView(NamedTuple):
    """A kernel's view of `PrefillBatch`, for finding a tile by its number."""

    cu_seqlens: Tensor
    cu_chunks: Tensor
    chunk_requests: Tensor
    cu_request_chunks: Tensor
    chunk_slots: Tensor


class TiledView(NamedTuple):
    """A scan kernel's view of `PrefillBatch`."""

    cu_seqlens: Tensor
    cu_chunks: Tensor
    cu_request_chunks: Tensor
    longest_first: Tensor
    initial_slots: Tensor
    final_slots: Tensor


def cut_view(rows: PrefillBatch) -> CutView:
    """Return the view of a kernel that finds a tile by its number."""
    return CutView(*(getattr(rows, name) for name in CutView._fields))


def tiled_view(rows: PrefillBatch) -> TiledView:
    """Return the view of the scan kernels."""
    return TiledView(*(getattr(rows, name) for name in TiledView._fields))


def tile_shape(chunk_size: int, dtype: torch.dtype) -> TileShape | None:
    """Return how chunks are cut for tokens of a dtype; None if a chunk is not a multiple of a tile.

    float32 matmuls run without tensor cores, unrolled: long tiles would not fit in registers.
    """
    longest = TILE_LEN if dtype == torch.bfloat16 else LEAST_WIDTH
    if chunk_size % longest == 0:
        return TileShape(longest, longest, chunk_size // longest)
    if chunk_size <= TILE_LEN:
        return TileShape(chunk_size, max(LEAST_WIDTH, triton.next_power_of_2(chunk_size)), 1)
    return None


@triton.jit
def find_tile(rows, tile, start, end, in_chunk, LENGTH: tl.constexpr, PER_CHUNK: tl.constexpr):
    """Return which of its chunk's `in_chunk` tiles this is, if any, and the packed position where it is cut."""
    row = tl.load(rows.chunk_requests + tile // PER_CHUNK)
    first_chunk = tl.load(rows.cu_request_chunks + row)
    number = tile % PER_CHUNK
    begin = start + number * LENGTH
    if tile // PER_CHUNK == first_chunk:
        number += in_chunk - PER_CHUNK
        begin = start + number * LENGTH
        if (
            tl.load(rows.cu_request_chunks + row + 1) > first_chunk + 1
        ):  # the chunk's end is a cut, its start need not be
            begin = end - (in_chunk - number) * LENGTH
    return number, begin
