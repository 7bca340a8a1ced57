"""Parts and tiles of fixed-order GEMMs.

The parts, and so the order of the sums, follow from the weight's shape only. Tiles depend on the number of tokens too,
but change no bit of a result.
"""

from dataclasses import dataclass

import torch

from ..kernel_launches import INTERPRETED

DEPTH = 64
"""Inputs of a step."""
_LEAST_PROGRAMS = 96
"""Programs that read a weight as fast as more of them would, on a GPU with 132 multiprocessors."""
_LEAST_STEPS = 8
"""Of a part."""
_MOST_PARTS = 4
_UNIT = 64
"""Outputs of the smallest tile: rows of the left operand of a tensor core's product."""
_STAGE_BYTES = 96 * 1024
"""Of a program with few tokens: a multiprocessor runs two of them."""
MOST_SPLIT_TOKENS = 256
"""Tokens up to which each part of a tile has its own program."""


@dataclass(frozen=True, slots=True)
class FixedOrderTiles:
    """Tile sizes of a kernel.

    Args:
        tokens, outputs: Of a tile; powers of 2.
        is_split: True if each part of a tile has its own program.
    """

    tokens: int
    outputs: int
    num_warps: int
    num_stages: int
    is_split: bool


def num_parts(outputs: int, inputs: int) -> int:
    """Return into how many parts a weight's inputs are divided; each is summed alone, then parts are added in order.

    The bits of all results depend on it. Weights with few outputs have several parts, so that enough programs read them
    if there are few tokens.
    """
    units, steps = -(-outputs // _UNIT), -(-inputs // DEPTH)
    wanted = -(-_LEAST_PROGRAMS // units)
    return max(min(wanted, steps // _LEAST_STEPS, _MOST_PARTS), 1)


def num_counters(weight: torch.Tensor) -> int:
    """Return how many counters the products with a weight [outputs, inputs] need: one for each split tile."""
    return 2 * -(-weight.shape[0] // 128)


def choose_tiles(weight: torch.Tensor, num_tokens: int) -> FixedOrderTiles:
    """Return the fastest tiles for a weight [outputs, inputs] and a number of tokens."""
    if INTERPRETED:
        return FixedOrderTiles(16, 64, 4, 1, is_split=num_tokens <= 16)
    if num_tokens <= 64:
        tokens = next(count for count in (16, 32, 64) if num_tokens <= count)
        outputs = 128 if tokens == 64 else 64
        return FixedOrderTiles(tokens, outputs, 4, _STAGE_BYTES // (2 * DEPTH * (tokens + outputs)), is_split=True)
    if num_tokens <= MOST_SPLIT_TOKENS:
        return FixedOrderTiles(128, 128, 8, 3, is_split=True)
    if num_parts(*weight.shape) > 1:
        return FixedOrderTiles(128, 128, 8, 6, is_split=False)  # registers hold two sums of an output
    return FixedOrderTiles(256, 128, 8, 4, is_split=False)
