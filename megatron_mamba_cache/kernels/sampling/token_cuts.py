"""Which tokens of a row top-k and top-p keep, found without a sort.

A row's kept tokens are those above some logit, and the first of those that equal it: its cut. Top-k asks for the k-th
token, top-p for the one at which the probability of the better ones reaches p. Both are found by measuring the tokens
at or above a pivot: top-k counts them, top-p adds up their weights.

1. A few rounds, each over the whole row, narrow the logits between which the cut is. Each program measures 8 pivots in
   a tile of a row; the row's last program adds up what all have found, in a fixed order, and sets the next pivots. A
   row skips the rounds that are left once few tokens are between its last two pivots.
2. Each tile lists its tokens between them, and weighs those above. With both settings it lists all that top-k may keep.
3. One program a row searches the bit patterns of the listed logits. Where some tile has more than its list holds, which
   takes thousands of logits that are almost equal, it searches those of the whole row, more slowly.

Layout: logits row-major over the vocabulary. Bound by reading the logits, from L2, once a round and once to list them.
Rows that are greedy or keep all tokens are not cut. Graph safe: no host sync, grids fixed by the shape of the logits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cut_rounds import (
    ABOVE,
    FIELDS,
    LOWER,
    TARGET,
    UPPER,
    is_cut,
    list_kernel,
    measure_kernel,
    top_k_drops,
    top_p_drops,
)
from .row_tiles import LARGEST, TILE, logit_of_key, ordered_keys, row_peak, weights_of
from .sampling_rows import SamplingRows

_NUM_ROUNDS = 3
_PIVOTS = 8
_LISTED = 256
_PART = 512
_FEW = 2048  # tokens between pivots that need no further round
_CHUNK, _ROW_CHUNK = 1024, 8192  # values that are searched at a time, of lists and of whole rows
_WARPS = 4
_CUT_WARPS = 8
_LEAST_KEY = tl.constexpr(-(2**31))
_LARGEST = tl.constexpr(LARGEST)


@dataclass(frozen=True, slots=True)
class RowTiles:
    """What is known of each tile of each row: [rows, tiles] float32 each.

    Args:
        peaks: The largest logit.
        leasts: The least logit that is not -inf.
        weights: The weight of the kept tokens; filled in by `find_cuts`.
    """

    peaks: Tensor
    leasts: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class TokenCuts:
    """Where rows are cut: a token is kept if its logit's key is larger, or equal and its id at most the last one's.

    Args:
        keys: [rows] int32, see `ordered_keys`; the least int32 in a row that keeps all tokens.
        last_ids: [rows] int32.
    """

    keys: Tensor
    last_ids: Tensor


@triton.jit
def _comparable(found, lower, upper):
    """Return logits as `load_logits` does, and -inf for those that are not from `lower` to `upper`."""
    found = tl.where(found == 0, 0.0, tl.minimum(found.to(tl.float32), _LARGEST))
    return tl.where((found >= lower) & (found < upper), found, float("-inf"))


@triton.jit
def _load_columns(values, widths, pitch, start, lower, upper, COLUMNS: tl.constexpr, TILES: tl.constexpr):
    """Load [TILES, COLUMNS] of the first values of each tile."""
    column = start + tl.arange(0, COLUMNS)
    place = tl.arange(0, TILES)[:, None] * pitch + column
    return _comparable(tl.load(values + place, mask=column < widths[:, None], other=float("-inf")), lower, upper)


@triton.jit
def _is_kept(keys, start, pitch, cut_key, cut_place, COLUMNS: tl.constexpr, TILES: tl.constexpr):
    """Return which of [TILES, COLUMNS] values a cut keeps."""
    place = tl.arange(0, TILES)[:, None] * pitch + start + tl.arange(0, COLUMNS)
    return (keys > cut_key) | ((keys == cut_key) & (place <= cut_place))


@triton.jit
def _measure_keys(
    values, widths, pitch, lower, upper, key, step, cut_key, cut_place, peak, temperature, is_count,
    COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return the measures of what a cut keeps at or above a key and the next two, `step` apart."""
    first = tl.zeros((TILES, COLUMNS), tl.float32)
    second, third = first, first
    for start in range(0, tl.max(widths, axis=0), COLUMNS):
        found = _load_columns(values, widths, pitch, start, lower, upper, COLUMNS, TILES)
        keys = ordered_keys(found).to(tl.int64)
        measure = tl.where(is_count, 1.0, weights_of(found, peak, temperature))
        measure = tl.where(_is_kept(keys, start, pitch, cut_key, cut_place, COLUMNS, TILES), measure, 0.0)
        first += tl.where(keys >= key, measure, 0.0)
        second += tl.where(keys >= key + step, measure, 0.0)
        third += tl.where(keys >= key + 2 * step, measure, 0.0)
    return _total(first), _total(second), _total(third)


@triton.jit
def _total(measures):
    return tl.sum(tl.sum(measures, axis=1), axis=0).to(tl.float64)


@triton.jit
def _place_of_tie(
    values, widths, pitch, lower, upper, key, number, cut_key, cut_place, COLUMNS: tl.constexpr, TILES: tl.constexpr
):
    """Return the place of the `number`-th value with a key that a cut keeps; of the last if there are fewer."""
    tile, ties = tl.arange(0, TILES), tl.zeros((TILES,), tl.int32)
    for start in range(0, tl.max(widths, axis=0), COLUMNS):
        keys = ordered_keys(_load_columns(values, widths, pitch, start, lower, upper, COLUMNS, TILES)).to(tl.int64)
        is_tie = (keys == key) & _is_kept(keys, start, pitch, cut_key, cut_place, COLUMNS, TILES)
        ties += tl.sum(is_tie.to(tl.int32), axis=1)
    reached = tl.cumsum(ties, axis=0)
    number = tl.minimum(number, tl.sum(ties, axis=0))
    owner = tl.minimum(tl.sum((reached < number).to(tl.int32), axis=0), TILES - 1)
    number -= tl.sum(tl.where(tile == owner - 1, reached, 0), axis=0)
    width = tl.sum(tl.where(tile == owner, widths, 0), axis=0)
    last, num_before = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        place = owner * pitch + column
        found = tl.load(values + place, mask=column < width, other=float("-inf"))
        keys = ordered_keys(_comparable(found, lower, upper)).to(tl.int64)
        is_tie = (keys == key) & ((keys > cut_key) | ((keys == cut_key) & (place <= cut_place)))
        rank = num_before + tl.cumsum(is_tie.to(tl.int32), axis=0)
        last = tl.maximum(last, tl.max(tl.where(is_tie & (rank <= number), place, -1), axis=0))
        num_before += tl.sum(is_tie.to(tl.int32), axis=0)
    return last


@triton.jit
def _cut_among(
    values, widths, pitch, search, peak, temperature, counts, weighs, top_p, COLUMNS: tl.constexpr, TILES: tl.constexpr
):
    """Return the key and the place of the last value that a row keeps, and the weight that each tile keeps, [TILES].

    Args:
        values: [TILES] values each, `pitch` apart, of which the first `widths` count; none missing from the search.
    """
    upper, lower = tl.load(search + UPPER).to(tl.float32), tl.load(search + LOWER).to(tl.float32)
    above, target = tl.load(search + ABOVE), tl.load(search + TARGET)
    if counts & weighs:
        upper, above = float("inf"), tl.full((), 0.0, tl.float64)
    cut_key, cut_place = tl.full((), _LEAST_KEY, tl.int64), tl.full((), 0, tl.int32)
    for stage in range(2):
        is_count = stage == 0
        if (is_count & counts) | ((stage == 1) & weighs):
            if counts & (stage == 1):  # of what top-k keeps
                whole, _, _ = _measure_keys(
                    values, widths, pitch, lower, upper, cut_key, 0, cut_key, cut_place, peak, temperature, False,
                    COLUMNS, TILES,
                )  # fmt: skip
                target = top_p * whole
            low = ordered_keys(lower).to(tl.int64)
            high = ordered_keys(tl.minimum(upper, peak)).to(tl.int64) + 1
            while high - low > 1:
                step = tl.maximum((high - low) // 4, 1)
                first, second, third = _measure_keys(
                    values, widths, pitch, lower, upper, low + step, step, cut_key, cut_place, peak, temperature,
                    is_count, COLUMNS, TILES,
                )  # fmt: skip
                first, second, third = first + above >= target, second + above >= target, third + above >= target
                low += step * (first.to(tl.int64) + second.to(tl.int64) + third.to(tl.int64))
                high = tl.where(third, high, low + step)
            better, _, _ = _measure_keys(
                values, widths, pitch, lower, upper, low + 1, 0, cut_key, cut_place, peak, temperature, is_count,
                COLUMNS, TILES,
            )  # fmt: skip
            each = tl.where(is_count, 1.0, weights_of(logit_of_key(low.to(tl.int32)), peak, temperature))
            wanted = tl.ceil((target - above - better) / tl.maximum(each, 1e-30).to(tl.float64))
            number = tl.minimum(tl.maximum(wanted, 1.0), 2147483647.0).to(tl.int32)
            cut_place = _place_of_tie(
                values, widths, pitch, lower, upper, low, number, cut_key, cut_place, COLUMNS, TILES
            )
            cut_key = low
    weights = tl.zeros((TILES,), tl.float32)
    for start in range(0, tl.max(widths, axis=0), COLUMNS):
        found = _load_columns(values, widths, pitch, start, lower, upper, COLUMNS, TILES)
        is_kept = _is_kept(ordered_keys(found).to(tl.int64), start, pitch, cut_key, cut_place, COLUMNS, TILES)
        weights += tl.sum(tl.where(is_kept, weights_of(found, peak, temperature), 0.0), axis=1)
    return cut_key.to(tl.int32), cut_place, weights


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p"])
def _cut_kernel(
    logits,
    stride,
    temperature,
    top_k,
    top_p,
    peaks,
    searches,
    listed,
    listed_ids,
    num_listed,
    tile_weights,
    keys,
    last_ids,
    num_tiles,
    vocab_size,
    TILE: tl.constexpr,
    LISTED: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0)
    key, last_id = tl.full((), _LEAST_KEY, tl.int32), tl.full((), 0, tl.int32)
    if is_cut(temperature, top_k, top_p, row, vocab_size):
        heat, p = tl.load(temperature + row).to(tl.float32), tl.load(top_p + row).to(tl.float64)
        counts, weighs = top_k_drops(top_k, row, vocab_size), top_p_drops(top_p, row)
        peak, tile, search = row_peak(peaks, row, num_tiles, TILES), tl.arange(0, TILES), searches + FIELDS * row
        of_row = row * num_tiles + tile
        widths = tl.load(num_listed + of_row, mask=tile < num_tiles, other=0)
        certain = tl.load(tile_weights + of_row, mask=tile < num_tiles, other=0.0)
        if tl.max(widths, axis=0) <= LISTED:
            first = row.to(tl.int64) * num_tiles * LISTED
            key, place, weights = _cut_among(
                listed + first, widths, LISTED, search, peak, heat, counts, weighs, p, COLUMNS, TILES
            )
            last_id = tl.load(listed_ids + first + place, mask=place >= 0, other=-1)
        else:
            widths = tl.minimum(tl.maximum(vocab_size - tile * TILE, 0), TILE)
            whole_row = logits + row.to(tl.int64) * stride
            key, last_id, weights = _cut_among(
                whole_row, widths, TILE, search, peak, heat, counts, weighs, p, ROW_COLUMNS, TILES
            )
        tl.store(tile_weights + of_row, certain + weights, mask=tile < num_tiles)
    tl.store(keys + row, key)
    tl.store(last_ids + row, last_id)


def find_cuts(rows: SamplingRows, tiles: RowTiles) -> TokenCuts:
    """Return what top-k keeps of each row by rank, and of that, top-p as the smallest leading set that reaches it.

    Ties rank the lower token id first. Where the probability of a leading set is top-p up to the rounding of fp32,
    either it or the next may be kept. A greedy row is not cut. CUDA-graph safe: no host sync, six launches.

    Args:
        rows: On a GPU, or with Triton interpreted; tokens of a row contiguous.
    """
    logits = rows.logits
    (num_rows, vocab_size), num_tiles = logits.shape, tiles.peaks.shape[1]
    tiles_read = triton.next_power_of_2(num_tiles)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    searches, num_finished = (
        scratch(num_rows, FIELDS.value, dtype=torch.float64),
        torch.zeros(num_rows, dtype=torch.int32, device=logits.device),
    )
    listed, listed_ids = (scratch(num_rows, num_tiles, _LISTED, dtype=dtype) for dtype in (torch.float32, torch.int32))
    num_listed = scratch(num_rows, num_tiles, dtype=torch.int32)
    cuts = TokenCuts(scratch(num_rows, dtype=torch.int32), scratch(num_rows, dtype=torch.int32))
    pivots, measures = scratch(num_rows, _PIVOTS), scratch(num_rows, num_tiles, _PIVOTS)
    read = {
        "logits": logits,
        "stride": logits.stride(0),
        "temperature": rows.temperature,
        "top_k": rows.top_k,
        "top_p": rows.top_p,
        "peaks": tiles.peaks,
        "searches": searches,
        "num_tiles": num_tiles,
        "vocab_size": vocab_size,
        "TILE": TILE,
        "TILES": tiles_read,
    }
    lists = {"listed": listed, "listed_ids": listed_ids, "num_listed": num_listed, "LISTED": _LISTED}
    for number in range(_NUM_ROUNDS):
        measure_kernel[(num_rows, num_tiles)](
            **read,
            leasts=tiles.leasts,
            pivots=pivots,
            measures=measures,
            num_finished=num_finished,
            round=number,
            FEW=_FEW,
            PART=_PART,
            PIVOTS=_PIVOTS,
            num_warps=_WARPS,
        )
    list_kernel[(num_rows, num_tiles)](**read, **lists, tile_weights=tiles.weights, num_warps=_WARPS)
    _cut_kernel[(num_rows,)](
        **read,
        **lists,
        tile_weights=tiles.weights,
        keys=cuts.keys,
        last_ids=cuts.last_ids,
        COLUMNS=max(_CHUNK // tiles_read, 1),
        ROW_COLUMNS=max(_ROW_CHUNK // tiles_read, 1),
        num_warps=_CUT_WARPS,
    )
    return cuts
