"""Tile sizes of products of few tokens with quantized weights, and the choice between their two kernels.

Tiles depend on the weight's shape and on the range of the number of tokens: up to 16, up to 32 or up to 64. So a
token's bits do not depend on others of its range. Figures of an H200, which has 132 multiprocessors.
"""

from dataclasses import dataclass

from ..kernel_launches import INTERPRETED, has_tested_gluon, is_hopper
from .quantized_matrix import QuantizedMatrix
from .split_token_pipeline import DEPTH, UNIT

MOST_WORDS = 64
"""Words of each row of a tile."""
_LEAST_SPLIT_BYTES = {True: 2**24, False: 2**26}
"""Bytes of codes with (True) and without scales of blocks from which on split tokens are faster."""
_MULTIPROCESSORS = 132
_LEAST_WIDE_ROWS = 2**14
"""Outputs from which on `split_token_hopper` has wide tiles for many tokens."""
_STAGE_BYTES = 192 * 1024
_MOST_STAGES = 8
_MOST_PARTS = 8


@dataclass(frozen=True, slots=True)
class FewTokenTiles:
    """Tile sizes of the Triton kernel.

    Args:
        tokens, outputs: Of a tile.
        words: Of each row of a tile.
        parts: Programs that share the inputs of a tile.
        loads_boxes: True if TMA loads the codes.
        lines_ahead: Lines of 128 bytes of each row that are prefetched while the previous kernel still runs; a power
            of 2, or 0. Not with `loads_boxes`.
    """

    tokens: int
    outputs: int
    words: int
    parts: int
    num_warps: int = 4
    num_stages: int = 4
    loads_boxes: bool = False
    lines_ahead: int = 4


@dataclass(frozen=True, slots=True)
class SplitTokenTiles:
    """Tile sizes of `split_token_hopper`; one program leaves room for those of the next kernels.

    Args:
        programs: Each computes as many whole tiles as all of them can; at least one tile remains.
        sharers: Programs between which the steps of the remaining tiles are divided.
        tokens: 16, 32 or 64; at least the number of tokens.
        outputs: Of a tile; 128 or 256.
        stages: Of the pipeline.
    """

    programs: int
    sharers: int
    tokens: int
    outputs: int
    stages: int


def split_token_tiles(tokens: int, outputs: int, programs: int, sharers: int) -> SplitTokenTiles:
    """Return tiles with as many stages as fit in shared memory."""
    stage_bytes = DEPTH.value * (outputs + 2 * tokens)
    return SplitTokenTiles(programs, sharers, tokens, outputs, min(_STAGE_BYTES // stage_bytes, _MOST_STAGES))


Tiles = FewTokenTiles | SplitTokenTiles


def choose_tiles(weight: QuantizedMatrix, num_tokens: int) -> Tiles:
    """Return the tiles for a number of tokens; the same up to 16, up to 32 and up to 64 of them."""
    is_large = weight.words.nbytes >= _LEAST_SPLIT_BYTES[weight.scales is not None]
    if (is_large or num_tokens > 16) and _can_launch_on_hopper(weight):
        return choose_hopper_tiles(weight, num_tokens)
    rows, columns = weight.shape
    tokens, outputs, words = _range_of(num_tokens), 128, words_of_tile(weight)
    num_tiles, num_steps = -(-rows // outputs), -(-columns * weight.code_bits // (16 * words))
    # A tile of many tokens fills a multiprocessor: few tiles need one program for each.
    is_small = tokens > 16 and num_tiles < _MULTIPROCESSORS
    parts = _parts(num_tiles, num_steps, _MULTIPROCESSORS - 4 if is_small else 4 * _MULTIPROCESSORS)
    return FewTokenTiles(tokens, outputs, words, parts, num_warps=8, num_stages=4 if is_small else 3)


def words_of_tile(weight: QuantizedMatrix) -> int:
    """Return how many words of each row a tile has: of one block, if FP8 has blocks."""
    has_blocks = weight.code_bits == 8 and weight.scales is not None
    return min(MOST_WORDS, weight.block_columns // 2) if has_blocks else MOST_WORDS


def choose_hopper_tiles(weight: QuantizedMatrix, num_tokens: int) -> SplitTokenTiles:
    """Return the tiles of the kernel for Hopper GPUs.

    Wide tiles load tokens less often, but leave more sums to add if there are few of them.
    """
    rows, columns = weight.shape
    tokens = _range_of(num_tokens)
    outputs = 256 if tokens > 32 and rows >= _LEAST_WIDE_ROWS else 128
    return split_token_tiles(tokens, outputs, *_division(-(-rows // outputs), -(-columns // DEPTH.value)))


def _division(num_tiles: int, steps: int) -> tuple[int, int]:
    """Return the number of programs and how many of them share tiles.

    For equal parts of one tile each, a few multiprocessors may stay idle. No program shares fewer steps than the others
    must: the fewer parts a tile has, the better.
    """
    if num_tiles < _MULTIPROCESSORS:
        in_equal_parts = _MULTIPROCESSORS // num_tiles * num_tiles
        programs = in_equal_parts if in_equal_parts >= 0.9 * _MULTIPROCESSORS else _MULTIPROCESSORS
        programs = min(programs, num_tiles * steps)
        return programs, programs
    shared = ((num_tiles - 1) % _MULTIPROCESSORS + 1) * steps
    most_steps = -(-shared // _MULTIPROCESSORS)
    return _MULTIPROCESSORS, -(-shared // most_steps)


def fits_boxes(weight: QuantizedMatrix) -> bool:
    """Return True for FP8 weights with one scale for each unit of outputs in each step, or with factors only."""
    is_divided = weight.block_rows % UNIT.value == 0 and weight.block_columns % DEPTH.value == 0
    is_aligned = weight.words.is_contiguous() and weight.words.data_ptr() % 16 == 0  # for TMA
    return weight.code_bits == 8 and is_aligned and (is_divided or weight.scales is None)


def _can_launch_on_hopper(weight: QuantizedMatrix) -> bool:
    device = weight.words.device
    if INTERPRETED or device.type != "cuda":
        return False
    rows, columns = weight.shape
    compiles = rows > 1 and columns > DEPTH.value  # Triton 3.6 fails on a single step, or a stride of 1
    return compiles and is_hopper(device) and has_tested_gluon() and fits_boxes(weight)


def _range_of(num_tokens: int) -> int:
    """Return the most tokens of the range that has a number of tokens."""
    return 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64


def _parts(num_tiles: int, num_steps: int, least_programs: int) -> int:
    """Return into how many parts the inputs are split: enough for the programs, each of four steps or more."""
    parts = 1
    while 2 * parts <= _MOST_PARTS and num_tiles * parts < least_programs and num_steps >= 8 * parts:
        parts *= 2
    return parts
