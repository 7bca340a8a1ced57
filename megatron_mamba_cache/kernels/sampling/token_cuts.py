"""Find the tokens that top-k and top-p keep, without sorting.

Tokens are ranked by logit, then by lower id. The last kept token is called the cut of the row: for top-k it is the k-th
token, for top-p the token at which the cumulative probability reaches p. The search uses pivots. The measure of a pivot
is taken over the tokens at or above it: their number for top-k, their total weight (unnormalized
probability) for top-p.

1. A few rounds over the whole row narrow the range of logits that contains the cut. Each program measures 8 pivots in
   one tile of a row. The last program of the row to finish sums all measures in a fixed order and sets the next pivots.
   Once few tokens are left between two pivots, the row skips the remaining rounds.
2. Each tile lists its tokens between these pivots and sums the weights above them. If both top-k and top-p are set, it
   lists all tokens that top-k may keep.
3. One program per row searches the listed logits by bisection over their bit patterns. If a tile's tokens do not fit
   in its list, which only happens with thousands of almost equal logits, the program searches the whole row, more
   slowly.

Layout: logits row-major, vocabulary contiguous. Reading the logits from L2, once per round and once to list them,
dominates the run time. Rows that are greedy or keep all tokens are skipped. Safe in CUDA graphs: no host sync, and the
grids depend only on the shape of the logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cut_rounds import FIELDS, is_cut, list_kernel, measure_kernel, top_k_drops, top_p_drops
from .cut_search import LEAST_KEY, cut_among
from .row_tiles import TILE, SamplingRows, row_peak

_NUM_ROUNDS = 3
_PIVOTS = 8
_LISTED = 256
_PART = 512
_FEW = 2048  # maximum number of tokens between two pivots at which a row skips the remaining rounds
_CHUNK, _ROW_CHUNK = 1024, 8192  # number of values that one loop iteration searches, in lists and in whole rows
_WARPS = 4
_CUT_WARPS = 8


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Statistics of the logits in each tile, [rows, tiles] float32 each.

    Args:
        peaks: Largest logit.
        leasts: Lowest logit above -inf.
        weights: Total weight of the kept tokens; written by `find_cuts`.
    """

    peaks: Tensor
    leasts: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class TokenCuts:
    """Last kept token of each row; tokens with larger keys, or equal keys and lower ids, are also kept.

    Args:
        keys: [rows] int32 key of the last kept logit, see `ordered_keys`; the lowest int32 if all tokens are kept.
        last_ids: [rows] int32 id of the last kept token.
    """

    keys: Tensor
    last_ids: Tensor


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p"])
def _cut_kernel(
    logits, stride, temperature, top_k, top_p, peaks, searches, listed, listed_ids, num_listed, tile_weights, keys,
    last_ids, num_tiles, vocab_size,
    TILE: tl.constexpr, LISTED: tl.constexpr, COLUMNS: tl.constexpr, ROW_COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    key, last_id = tl.full((), LEAST_KEY, tl.int32), tl.full((), 0, tl.int32)
    if is_cut(temperature, top_k, top_p, row, vocab_size):
        heat, p = tl.load(temperature + row).to(tl.float32), tl.load(top_p + row).to(tl.float64)
        counts, weighs = top_k_drops(top_k, row, vocab_size), top_p_drops(top_p, row)
        peak, tile, search = row_peak(peaks, row, num_tiles, TILES), tl.arange(0, TILES), searches + FIELDS * row
        of_row = row * num_tiles + tile
        widths = tl.load(num_listed + of_row, mask=tile < num_tiles, other=0)
        certain = tl.load(tile_weights + of_row, mask=tile < num_tiles, other=0.0)
        if tl.max(widths, axis=0) <= LISTED:
            first = row.to(tl.int64) * num_tiles * LISTED
            key, index, weights = cut_among(
                listed + first, widths, LISTED, search, peak, heat, counts, weighs, p, COLUMNS, TILES
            )
            last_id = tl.load(listed_ids + first + index, mask=index >= 0, other=-1)
        else:
            widths = tl.minimum(tl.maximum(vocab_size - tile * TILE, 0), TILE)
            whole_row = logits + row.to(tl.int64) * stride
            key, last_id, weights = cut_among(
                whole_row, widths, TILE, search, peak, heat, counts, weighs, p, ROW_COLUMNS, TILES
            )
        tl.store(tile_weights + of_row, certain + weights, mask=tile < num_tiles)
    tl.store(keys + row, key)
    tl.store(last_ids + row, last_id)


def find_cuts(rows: SamplingRows, tiles: RowTiles) -> TokenCuts:
    """Find the last token that top-k, then top-p, keeps in each row, and write the weights of the tiles.

    If a cumulative probability equals top-p up to fp32 rounding, one token more or less may be kept. Greedy rows are
    skipped. CUDA-graph safe: no host sync, six launches.

    Args:
        rows: Logits with a contiguous vocabulary, on a GPU or with Triton's interpreter.
    """
    logits = rows.logits
    (num_rows, vocab_size), num_tiles = logits.shape, tiles.peaks.shape[1]
    tiles_read = triton.next_power_of_2(num_tiles)
    read = {
        "logits": logits,
        "stride": logits.stride(0),
        "temperature": rows.temperature,
        "top_k": rows.top_k,
        "top_p": rows.top_p,
        "peaks": tiles.peaks,
        "searches": tiles.peaks.new_empty(num_rows, FIELDS.value, dtype=torch.float64),
        "num_tiles": num_tiles,
        "vocab_size": vocab_size,
        "TILE": TILE,
        "TILES": tiles_read,
    }
    _narrow_down(read, tiles)
    lists = {
        "listed": tiles.peaks.new_empty(num_rows, num_tiles, _LISTED),
        "listed_ids": tiles.peaks.new_empty(num_rows, num_tiles, _LISTED, dtype=torch.int32),
        "num_listed": tiles.peaks.new_empty(num_rows, num_tiles, dtype=torch.int32),
        "LISTED": _LISTED,
    }
    list_kernel[(num_rows, num_tiles)](
        **read, **lists, tile_weights=tiles.weights, num_warps=_WARPS, enable_fp_fusion=True
    )
    # Separate allocations are aligned, and Triton specializes kernels on pointer alignment.
    cuts = TokenCuts(*(torch.empty(num_rows, dtype=torch.int32, device=logits.device) for _ in range(2)))
    _cut_kernel[(num_rows,)](
        **read,
        **lists,
        tile_weights=tiles.weights,
        keys=cuts.keys,
        last_ids=cuts.last_ids,
        COLUMNS=max(_CHUNK // tiles_read, 1),
        ROW_COLUMNS=max(_ROW_CHUNK // tiles_read, 1),
        num_warps=_CUT_WARPS,
        enable_fp_fusion=True,
    )
    return cuts


def _narrow_down(read: dict[str, Any], tiles: RowTiles) -> None:
    """Run the rounds that narrow the search range of each row, and write the results to `searches`."""
    num_rows, num_tiles = tiles.peaks.shape
    pivots, measures = tiles.peaks.new_empty(num_rows, _PIVOTS), tiles.peaks.new_empty(num_rows, num_tiles, _PIVOTS)
    num_finished = torch.zeros(num_rows, dtype=torch.int32, device=pivots.device)
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
            enable_fp_fusion=True,
        )
