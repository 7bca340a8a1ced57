"""Choose tile sizes for grouped GEMMs, and split each expert's rows into tiles.

Experts are taken in order. The rows of each expert are split into the fewest possible tiles, all of the same length.
Grid: one program per expert; it counts the tiles of the preceding experts to find its offset. Safe in CUDA graphs: no
host sync.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import INTERPRETED, has_tested_gluon, is_hopper, launches_kernel
from ..overlap import await_inputs, overlapping

_FEWEST_ROWS, _MOST_GATHERED_ROWS = 10, 1024
_STAGE_INPUTS = 64
_FEWEST_WEIGHTS = 65
"""Minimum number of rows of weights per expert; Triton 3.6 cannot compile `grouped_gemm_hopper` for 64, 3.7.1 can."""
_GATED_OUTPUTS = 8
"""Number of gate rows that alternate with as many rows of gated weights in the TMA boxes of a gated layer."""


@dataclass(frozen=True, slots=True)
class GemmVariant:
    """Tile sizes and options for a grouped GEMM; tuned on an H200, see `benchmarks/results/experts.md`.

    Args:
        rows, outputs, inputs: Dimensions of a tile.
        has_halves: True if a tile that is at most half full computes only half of its rows.
        loads_boxes: True if weights are loaded with TMA.
    """

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    has_halves: bool = False
    loads_boxes: bool = False


def choose_variant(num_pairs: int, weight: Tensor, *, is_gated: bool) -> GemmVariant:
    """Choose the variant for a number of (token, expert) pairs; the host does not know how many each expert has.

    Args:
        weight: [experts, outputs, inputs].
    """
    mean_rows = num_pairs / weight.shape[0]
    if weight.dtype == torch.float32:
        return GemmVariant(16 if mean_rows <= 16 else 64, 64, 32, 4, 3)
    if not can_load_boxes(weight):
        return GemmVariant(16, 64, 64, 4, 4) if mean_rows <= 16 else GemmVariant(64, 64 if is_gated else 128, 64, 4, 3)
    if mean_rows <= 16:
        # With 144 or 108 KiB of loads in flight per program, even few programs hide the memory latency.
        return (
            GemmVariant(16, 64, 64, 4, 8, loads_boxes=True)
            if is_gated
            else GemmVariant(16, 128, 64, 8, 6, loads_boxes=True)
        )
    if mean_rows <= 96:
        return GemmVariant(64, 128 if is_gated else 256, 64, 4, 4, loads_boxes=True)
    return GemmVariant(128, 128 if is_gated else 256, 64, 8, 4, has_halves=True, loads_boxes=True)


def takes_long_tiles(x: Tensor, weight: Tensor, num_pairs: int, *, is_gathered: bool, is_gated: bool) -> bool:
    """Return True if `grouped_gemm_hopper` supports the inputs and is expected to be the faster kernel.

    Its long tiles read an expert's weights once per 224 rows, even if tokens are distributed unevenly over experts.
    With very many rows per expert, tiles of 128 rows are filled equally well and gather rows faster.
    """
    fits = fits_long_tiles(x, weight.shape, num_pairs / weight.shape[0], is_gathered=is_gathered, is_gated=is_gated)
    return weight.dtype == torch.bfloat16 and fits and can_load_boxes(weight)


def fits_long_tiles(x: Tensor, shape: tuple[int, ...], mean_rows: float, *, is_gathered: bool, is_gated: bool) -> bool:
    """Return True if a kernel with long tiles supports rows `x` and weights of this shape, and is worthwhile."""
    if mean_rows <= _FEWEST_ROWS or shape[1] < _FEWEST_WEIGHTS:
        return False
    if is_gathered and (mean_rows > _MOST_GATHERED_ROWS or x.shape[0] * x.stride(0) >= 2**31):
        return False  # the kernel has 32-bit row offsets
    if is_gated and shape[1] % (2 * _GATED_OUTPUTS) != 0:
        return False
    is_aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and shape[2] % _STAGE_INPUTS == 0
    return is_aligned and has_tested_gluon()


def can_load_boxes(weight: Tensor) -> bool:
    """Return True if TMA can load the weights: on a Hopper GPU, with 16-byte alignment."""
    if not loads_boxes_on(weight):
        return False
    return weight.shape[2] * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0


def loads_boxes_on(tensor: Tensor) -> bool:
    """Return True if the tensor's device has TMA and kernels are not interpreted."""
    return not INTERPRETED and tensor.is_cuda and is_hopper(tensor.device)


MOST_ROWS = 224
"""Maximum number of rows per tile."""
ROW_STEP = 32
"""Granularity of tile lengths; the last tile of an expert may be partly empty."""


@triton.jit
def _tiles_kernel(
    starts, tiles,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, MOST_ROWS: tl.constexpr, ROW_STEP: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
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


SHORT_STEP = 8
"""Granularity of the lengths of short tiles."""


def rows_of_short_tile(num_pairs: int, num_experts: int) -> int:
    """Return the maximum length of tiles with which few experts have more than one; 0 if they have too many rows."""
    mean_rows = num_pairs / num_experts
    return next((rows for rows, most_mean in ((8, 3), (16, 9), (32, 24)) if mean_rows <= most_mean), 0)


def tile_rows(starts: Tensor, num_rows: int, most_rows: int = MOST_ROWS, row_step: int = ROW_STEP) -> Tensor:
    """Split the rows of each expert into tiles.

    Args:
        starts: [experts + 1] int32: each expert's first row, then the number of rows; see `ExpertOrder`.
        num_rows: Upper bound for `starts[-1]`.
        most_rows, row_step: Maximum number of rows per tile, and granularity of the tiles' lengths.

    Returns:
        [1 + maximum number of tiles, 4] int32. Entry [0, 0] is the number of tiles. Entries [1 + i, :3] are tile i's
        expert, its first row, and the row after its last row. All other entries are undefined.

    Reference: `tile_rows_ref`. CUDA-graph safe: no host sync, one launch.
    """
    if not launches_kernel(starts):
        return tile_rows_ref(starts, num_rows, most_rows, row_step)
    num_experts = len(starts) - 1
    tiles = _no_tiles(starts, num_rows, most_rows)
    _tiles_kernel[(num_experts,)](
        starts=starts,
        tiles=tiles,
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        MOST_ROWS=most_rows,
        ROW_STEP=row_step,
        num_warps=1,
        enable_fp_fusion=True,
        **overlapping(starts.device),
    )
    return tiles


def tile_rows_ref(starts: Tensor, num_rows: int, most_rows: int = MOST_ROWS, row_step: int = ROW_STEP) -> Tensor:
    """Torch reference for `tile_rows`; copies the starts to the host."""
    bounds, found = starts.tolist(), []
    for expert, (begin, end) in enumerate(pairwise(bounds)):
        count = -(-(end - begin) // most_rows)
        length = -(-(end - begin) // max(count * row_step, 1)) * row_step
        found += [(expert, first, min(first + length, end)) for first in range(begin, end, max(length, 1))]
    tiles = _no_tiles(starts, num_rows, most_rows)
    tiles[0, 0] = len(found)
    for number, entry in enumerate(found, 1):
        tiles[number, :3] = torch.tensor(entry)
    return tiles


def _no_tiles(starts: Tensor, num_rows: int, most_rows: int) -> Tensor:
    most_tiles = min(num_rows, len(starts) - 1 + num_rows // most_rows)
    return starts.new_empty(1 + most_tiles, 4)
