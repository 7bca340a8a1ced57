"""Final step of the top-k and top-p search: find the last kept value of a row by bisection over fp32 bit patterns.

`token_cuts` describes the algorithm. The values are the listed logits of each tile, or the whole row. The index of a
value is (tile * pitch + column), and values are ordered by token id.
"""

import triton
import triton.language as tl

from .cut_rounds import ABOVE, LOWER, TARGET, UPPER
from .row_tiles import LARGEST, logit_of_key, ordered_keys, weights_of

LEAST_KEY = tl.constexpr(-(2**31))
_LARGEST = tl.constexpr(LARGEST)


@triton.jit
def _comparable(found, lower, upper):
    """Convert logits as `load_logits` does, and replace those outside [lower, upper) by -inf."""
    found = tl.where(found == 0, 0.0, tl.minimum(found.to(tl.float32), _LARGEST))
    return tl.where((found >= lower) & (found < upper), found, float("-inf"))


@triton.jit
def _load_columns(values, widths, pitch, start, lower, upper, COLUMNS: tl.constexpr, TILES: tl.constexpr):
    """Load COLUMNS values of each tile, beginning at column `start`; [TILES, COLUMNS]."""
    column = start + tl.arange(0, COLUMNS)
    index = tl.arange(0, TILES)[:, None] * pitch + column
    return _comparable(tl.load(values + index, mask=column < widths[:, None], other=float("-inf")), lower, upper)


@triton.jit
def _is_kept(keys, start, pitch, cut_key, cut_index, COLUMNS: tl.constexpr, TILES: tl.constexpr):
    """Return the mask [TILES, COLUMNS] of values kept by a cut: larger keys, and equal keys up to `cut_index`."""
    index = tl.arange(0, TILES)[:, None] * pitch + start + tl.arange(0, COLUMNS)
    return (keys > cut_key) | ((keys == cut_key) & (index <= cut_index))


@triton.jit
def _measure_keys(
    values, widths, pitch, lower, upper, key, step, cut_key, cut_index, peak, temperature, is_count,
    COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return the number or weight of kept values with keys >= `key`, `key` + step and `key` + 2 * step."""
    first = tl.zeros((TILES, COLUMNS), tl.float32)
    second, third = first, first
    for start in range(0, tl.max(widths, axis=0), COLUMNS):
        found = _load_columns(values, widths, pitch, start, lower, upper, COLUMNS, TILES)
        keys = ordered_keys(found).to(tl.int64)
        measure = tl.where(is_count, 1.0, weights_of(found, peak, temperature))
        measure = tl.where(_is_kept(keys, start, pitch, cut_key, cut_index, COLUMNS, TILES), measure, 0.0)
        first += tl.where(keys >= key, measure, 0.0)
        second += tl.where(keys >= key + step, measure, 0.0)
        third += tl.where(keys >= key + 2 * step, measure, 0.0)
    return _total(first), _total(second), _total(third)


@triton.jit
def _total(measures):
    return tl.sum(tl.sum(measures, axis=1), axis=0).to(tl.float64)


@triton.jit
def _index_of_tie(
    values, widths, pitch, lower, upper, key, number, cut_key, cut_index, COLUMNS: tl.constexpr, TILES: tl.constexpr
):
    """Return the index of the `number`-th kept value whose key equals `key`; the last one if there are fewer."""
    tile, ties = tl.arange(0, TILES), tl.zeros((TILES,), tl.int32)
    for start in range(0, tl.max(widths, axis=0), COLUMNS):
        keys = ordered_keys(_load_columns(values, widths, pitch, start, lower, upper, COLUMNS, TILES)).to(tl.int64)
        is_tie = (keys == key) & _is_kept(keys, start, pitch, cut_key, cut_index, COLUMNS, TILES)
        ties += tl.sum(is_tie.to(tl.int32), axis=1)
    reached = tl.cumsum(ties, axis=0)
    number = tl.minimum(number, tl.sum(ties, axis=0))
    owner = tl.minimum(tl.sum((reached < number).to(tl.int32), axis=0), TILES - 1)
    number -= tl.sum(tl.where(tile == owner - 1, reached, 0), axis=0)
    width = tl.sum(tl.where(tile == owner, widths, 0), axis=0)
    last, num_before = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        index = owner * pitch + column
        found = tl.load(values + index, mask=column < width, other=float("-inf"))
        keys = ordered_keys(_comparable(found, lower, upper)).to(tl.int64)
        is_tie = (keys == key) & ((keys > cut_key) | ((keys == cut_key) & (index <= cut_index)))
        rank = num_before + tl.cumsum(is_tie.to(tl.int32), axis=0)
        last = tl.maximum(last, tl.max(tl.where(is_tie & (rank <= number), index, -1), axis=0))
        num_before += tl.sum(is_tie.to(tl.int32), axis=0)
    return last


@triton.jit
def cut_among(
    values, widths, pitch, search, peak, temperature, counts, weighs, top_p, COLUMNS: tl.constexpr, TILES: tl.constexpr
):
    """Return the key and index of the last kept value in a row, and the kept weight of each tile, [TILES].

    Args:
        values, widths: Pointer to the tiles, which are `pitch` values apart; [TILES] number of values in each tile.
    """
    upper, lower = tl.load(search + UPPER).to(tl.float32), tl.load(search + LOWER).to(tl.float32)
    above, target = tl.load(search + ABOVE), tl.load(search + TARGET)
    if counts & weighs:
        upper, above = float("inf"), tl.full((), 0.0, tl.float64)
    cut_key, cut_index = tl.full((), LEAST_KEY, tl.int64), tl.full((), 0, tl.int32)
    for stage in range(2):
        is_count = stage == 0
        if (is_count & counts) | ((stage == 1) & weighs):
            if counts & (stage == 1):  # top-p applies to the weight that top-k keeps
                whole, _, _ = _measure_keys(
                    values, widths, pitch, lower, upper, cut_key, 0, cut_key, cut_index, peak, temperature, False,
                    COLUMNS, TILES,
                )  # fmt: skip
                target = top_p * whole
            low = ordered_keys(lower).to(tl.int64)
            high = ordered_keys(tl.minimum(upper, peak)).to(tl.int64) + 1
            while high - low > 1:
                step = tl.maximum((high - low) // 4, 1)
                first, second, third = _measure_keys(
                    values, widths, pitch, lower, upper, low + step, step, cut_key, cut_index, peak, temperature,
                    is_count, COLUMNS, TILES,
                )  # fmt: skip
                first, second, third = first + above >= target, second + above >= target, third + above >= target
                low += step * (first.to(tl.int64) + second.to(tl.int64) + third.to(tl.int64))
                high = tl.where(third, high, low + step)
            better, _, _ = _measure_keys(
                values, widths, pitch, lower, upper, low + 1, 0, cut_key, cut_index, peak, temperature, is_count,
                COLUMNS, TILES,
            )  # fmt: skip
            each = tl.where(is_count, 1.0, weights_of(logit_of_key(low.to(tl.int32)), peak, temperature))
            wanted = tl.ceil((target - above - better) / tl.maximum(each, 1e-30).to(tl.float64))
            number = tl.minimum(tl.maximum(wanted, 1.0), 2147483647.0).to(tl.int32)
            cut_index = _index_of_tie(
                values, widths, pitch, lower, upper, low, number, cut_key, cut_index, COLUMNS, TILES
            )
            cut_key = low
    weights = tl.zeros((TILES,), tl.float32)
    for start in range(0, tl.max(widths, axis=0), COLUMNS):
        found = _load_columns(values, widths, pitch, start, lower, upper, COLUMNS, TILES)
        is_kept = _is_kept(ordered_keys(found).to(tl.int64), start, pitch, cut_key, cut_index, COLUMNS, TILES)
        weights += tl.sum(tl.where(is_kept, weights_of(found, peak, temperature), 0.0), axis=1)
    return cut_key.to(tl.int32), cut_index, weights
