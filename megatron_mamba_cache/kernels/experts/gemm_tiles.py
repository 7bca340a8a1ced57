"""The tiles of rows of a grouped product: each expert's rows in as few tiles as hold them, of equal lengths.

Layout: tiles in the order of experts. Grid: a program an expert, which counts the tiles before its own. Graph safe: no
host sync.
"""

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import launches_kernel
from ..overlap import await_inputs, overlapping

MOST_ROWS = 224
"""Rows of a tile at most."""
ROW_STEP = 32
"""Tiles are multiples of it; an expert's last rows may leave one unused."""


@triton.jit
def _tiles_kernel(
    starts,
    tiles,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    ROW_STEP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    await_inputs(OVERLAPS)
    own, expert = tl.program_id(0), tl.arange(0, EXPERTS)
    exists = expert < NUM_EXPERTS
    begin = tl.load(starts + expert, mask=exists, other=0)
    end = tl.load(starts + expert + 1, mask=exists, other=0)
    count = (end - begin + MOST_ROWS - 1) // MOST_ROWS
    if own == 0:
        tl.store(tiles, tl.sum(count, axis=0))
    is_own = expert == own
    first = tl.sum(tl.where(is_own, begin, 0), axis=0)
    last = tl.sum(tl.where(is_own, end, 0), axis=0)
    own_count = tl.sum(tl.where(is_own, count, 0), axis=0)
    steps = tl.maximum(own_count * ROW_STEP, 1)
    length = (last - first + steps - 1) // steps * ROW_STEP
    number = 1 + tl.sum(tl.where(expert < own, count, 0), axis=0)
    for tile in range(own_count):
        entry = tiles + (number + tile) * 4
        tl.store(entry, own)
        tl.store(entry + 1, first + tile * length)
        tl.store(entry + 2, tl.minimum(first + (tile + 1) * length, last))


def tile_rows(starts: Tensor, num_rows: int) -> Tensor:
    """Return the tiles of rows in the order of experts.

    Args:
        starts: [experts + 1] int32: where each expert's rows begin; see `ExpertOrder`.
        num_rows: At least the last of `starts`.

    Returns:
        [1 + most tiles, 4] int32: first the number of tiles; then for each its expert, its first row, and the row
        after its last. Other entries mean nothing.

    Reference: `tile_rows_ref`. CUDA-graph safe: no host sync, one launch.
    """
    if not launches_kernel(starts):
        return tile_rows_ref(starts, num_rows)
    num_experts = len(starts) - 1
    tiles = _no_tiles(starts, num_rows)
    _tiles_kernel[(num_experts,)](
        starts=starts,
        tiles=tiles,
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        MOST_ROWS=MOST_ROWS,
        ROW_STEP=ROW_STEP,
        num_warps=1,
        enable_fp_fusion=True,
        **overlapping(starts.device),
    )
    return tiles


def tile_rows_ref(starts: Tensor, num_rows: int) -> Tensor:
    """Return the tiles of rows in the order of experts; see `tile_rows`. Reads the starts on the host."""
    bounds, found = starts.tolist(), []
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        count = -(-(end - begin) // MOST_ROWS)
        length = -(-(end - begin) // max(count * ROW_STEP, 1)) * ROW_STEP
        found += [(expert, first, min(first + length, end)) for first in range(begin, end, max(length, 1))]
    tiles = _no_tiles(starts, num_rows)
    tiles[0, 0] = len(found)
    for number, entry in enumerate(found, 1):
        tiles[number, :3] = torch.tensor(entry)
    return tiles


def _no_tiles(starts: Tensor, num_rows: int) -> Tensor:
    most_tiles = min(num_rows, len(starts) - 1 + num_rows // MOST_ROWS)
    return starts.new_empty(1 + most_tiles, 4)
