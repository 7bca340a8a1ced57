"""The tiles of a grouped product, by how many rows an expert has on average and by what the device can load."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernel_launches import INTERPRETED, has_tested_gluon, is_hopper

_FEWEST_ROWS, _MOST_GATHERED_ROWS = 10, 1024
_STAGE_INPUTS = 64
_FEWEST_WEIGHTS = 65
"""Of an expert: a long tile has two times 64. With half of them alone Triton 3.6 compiles none, 3.7.1 does."""
_GATED_OUTPUTS = 8
"""A gated layer's boxes have its gates and its other weights by so many."""


@dataclass(frozen=True, slots=True)
class GemmVariant:
    """Tiles of a grouped product; measured on an H200, see `benchmarks/results/experts.md`.

    Args:
        rows, outputs, inputs: Of a tile.
        has_halves: Whether a tile with at most half of its rows computes half of them only.
        loads_boxes: Whether weights are loaded by Hopper's tensor memory accelerator.
    """

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    has_halves: bool = False
    loads_boxes: bool = False

    @property
    def multiplies_weights(self) -> bool:
        """True if weights are the left operand, of which tensor cores take 64 rows at least."""
        return self.rows < 64


def choose_variant(num_pairs: int, weight: Tensor, *, is_gated: bool) -> GemmVariant:
    """Return the form for a number of pairs; it depends on their number alone, not on which experts they choose.

    Args:
        weight: [experts, outputs, inputs].
    """
    mean_rows = num_pairs / weight.shape[0]
    if weight.dtype == torch.float32:
        return GemmVariant(16 if mean_rows <= 16 else 64, 64, 32, 4, 3)
    if not can_load_boxes(weight):
        return GemmVariant(16, 64, 64, 4, 4) if mean_rows <= 16 else GemmVariant(64, 64 if is_gated else 128, 64, 4, 3)
    if mean_rows <= 16:
        # As much in flight as hides the memory's latency even where few programs run: 144 and 108 KiB of boxes.
        return (
            GemmVariant(16, 64, 64, 4, 8, loads_boxes=True)
            if is_gated
            else GemmVariant(16, 128, 64, 8, 6, loads_boxes=True)
        )
    if mean_rows <= 96:
        return GemmVariant(64, 128 if is_gated else 256, 64, 4, 4, loads_boxes=True)
    return GemmVariant(128, 128 if is_gated else 256, 64, 8, 4, has_halves=True, loads_boxes=True)


def takes_long_tiles(x: Tensor, weight: Tensor, num_pairs: int, *, is_gathered: bool, is_gated: bool) -> bool:
    """Return whether rows are multiplied by `grouped_gemm_hopper`; like `choose_variant`, by their number alone.

    A long tile reads an expert's weights once however unevenly tokens choose; short ones read those of much chosen
    experts again and again. With very many rows an expert, tiles of 128 rows are as well filled, and gather faster.
    """
    mean_rows = num_pairs / weight.shape[0]
    if weight.dtype != torch.bfloat16 or mean_rows <= _FEWEST_ROWS or weight.shape[1] < _FEWEST_WEIGHTS:
        return False
    if is_gathered and (mean_rows > _MOST_GATHERED_ROWS or x.shape[0] * x.stride(0) >= 2**31):
        return False  # where rows begin is kept in 32 bits
    if is_gated and weight.shape[1] % (2 * _GATED_OUTPUTS) != 0:
        return False
    is_aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and x.shape[1] % _STAGE_INPUTS == 0
    return is_aligned and can_load_boxes(weight) and has_tested_gluon()


def can_load_boxes(weight: Tensor) -> bool:
    """Return whether the device's tensor memory accelerator can load these weights."""
    if INTERPRETED or not weight.is_cuda or not is_hopper(weight.device):
        return False
    return weight.shape[2] * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
