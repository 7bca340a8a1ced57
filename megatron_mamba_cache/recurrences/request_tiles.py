"""Split the requests of a scan into tiles at absolute token positions.

Each chunk of a request is split into tiles of 64 tokens (16 for float32), at positions that are multiples of the tile
length in the whole sequence. So only the first tile of a request may start, and only its last tile may end, at another
position. A request with a single chunk is split from its first token, because its absolute position is unknown.

Chunk c has the tile numbers c * per_chunk to (c + 1) * per_chunk - 1. A short first chunk uses the last of its numbers,
so the numbers of a request's tiles are consecutive.
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
"""Minimum number of rows in a tensor-core matmul."""
_ALIGNMENT = 16  # alignment in bytes that TMA requires


@dataclass(frozen=True, slots=True)
class TileShape:
    """Sizes of the tiles in a chunk; no tile spans two chunks.

    Args:
        length: Number of tokens in a full tile.
        width: `length` rounded up to a power of two.
        per_chunk: Number of tiles in a full chunk.
    """

    length: int
    width: int
    per_chunk: int


class CutView(NamedTuple):
    """The tensors of a `PrefillBatch` that kernels need to find a tile by its number."""

    cu_seqlens: Tensor
    cu_chunks: Tensor
    chunk_requests: Tensor
    cu_request_chunks: Tensor
    chunk_slots: Tensor


class TiledView(NamedTuple):
    """The tensors of a `PrefillBatch` that scan kernels need."""

    cu_seqlens: Tensor
    cu_chunks: Tensor
    cu_request_chunks: Tensor
    longest_first: Tensor
    initial_slots: Tensor
    final_slots: Tensor


def cut_view(rows: PrefillBatch) -> CutView:
    """Return the kernel arguments for finding a tile by its number."""
    return CutView(*(getattr(rows, name) for name in CutView._fields))


def tiled_view(rows: PrefillBatch) -> TiledView:
    """Return the kernel arguments for a scan."""
    return TiledView(*(getattr(rows, name) for name in TiledView._fields))


def tile_shape(chunk_size: int, dtype: torch.dtype) -> TileShape | None:
    """Return the tile sizes for tokens in `dtype`; None if the chunk size is not a multiple of the tile length.

    float32 tiles are short: their matmuls are unrolled without tensor cores, and long tiles would not fit in registers.
    """
    longest = TILE_LEN if dtype == torch.bfloat16 else LEAST_WIDTH
    if chunk_size % longest == 0:
        return TileShape(longest, longest, chunk_size // longest)
    if chunk_size <= TILE_LEN:
        return TileShape(chunk_size, max(LEAST_WIDTH, triton.next_power_of_2(chunk_size)), 1)
    return None


def is_aligned(packed: Tensor) -> bool:
    """Return True if TMA can copy tiles of packed tokens: their addresses are multiples of 16 bytes."""
    return (packed.stride(0) * packed.element_size()) % _ALIGNMENT == 0 and packed.data_ptr() % _ALIGNMENT == 0


@triton.jit
def find_tile(rows, tile, start, end, in_chunk, LENGTH: tl.constexpr, PER_CHUNK: tl.constexpr):
    """Return a tile's index within its chunk of `in_chunk` tiles, and the tile's packed start position."""
    row = tl.load(rows.chunk_requests + tile // PER_CHUNK)
    first_chunk = tl.load(rows.cu_request_chunks + row)
    number = tile % PER_CHUNK
    begin = start + number * LENGTH
    if tile // PER_CHUNK == first_chunk:
        number += in_chunk - PER_CHUNK
        begin = start + number * LENGTH
        if (
            tl.load(rows.cu_request_chunks + row + 1) > first_chunk + 1
        ):  # the end of this chunk is a split position, but its start may not be
            begin = end - (in_chunk - number) * LENGTH
    return number, begin
