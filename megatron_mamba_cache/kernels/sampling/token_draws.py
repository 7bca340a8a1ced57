"""Draw a token of each row by inverting the cumulative weights of its kept tokens, in the order of token ids.

Three launches: the largest logit of each tile; the weight of each tile's kept tokens; and, one program a row, the tile
and the token in it where the cumulative weight exceeds the row's share. Between the first two, top-k and top-p may cut
rows, see `token_cuts`. A greedy row takes its first largest logit.

Layout: logits row-major over the vocabulary. Bound by reading the logits twice, the second time from L2. Graph safe: no
host sync, grids fixed by the shape of the logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .row_tiles import TILE, least_logit, load_logits, ordered_keys, row_peak, weights_of
from .sampling_rows import SamplingRows
from .token_cuts import RowTiles, TokenCuts, find_cuts

_WARPS = 4
_PICK_WARPS = 8


@triton.jit
def _peaks_kernel(logits, stride, peaks, leasts, num_tiles, vocab_size, TILE: tl.constexpr):
    row, tile = tl.program_id(0), tl.program_id(1)
    found = load_logits(logits, row, stride, tile * TILE + tl.arange(0, TILE), vocab_size)
    tl.store(peaks + row * num_tiles + tile, tl.max(found, axis=0))
    finite = tl.where(found == float("-inf"), float("inf"), found)
    tl.store(leasts + row * num_tiles + tile, tl.min(finite, axis=0))


@triton.jit
def _kept_weights(found, token, peak, temperature, keys, last_ids, row, IS_CUT: tl.constexpr):
    """Return the weights of a row's tokens, 0 for those that are not kept."""
    weights = tl.where(found >= least_logit(peak, temperature), weights_of(found, peak, temperature), 0.0)
    if IS_CUT:
        key, found_keys = tl.load(keys + row), ordered_keys(found)
        is_kept = (found_keys > key) | ((found_keys == key) & (token <= tl.load(last_ids + row)))
        weights = tl.where(is_kept, weights, 0.0)
    return weights


@triton.jit(do_not_specialize_on_alignment=["temperature"])
def _weigh_kernel(
    logits, stride, temperature, peaks, tile_weights, num_tiles, vocab_size, TILE: tl.constexpr, TILES: tl.constexpr
):
    row, tile = tl.program_id(0), tl.program_id(1)
    found = load_logits(logits, row, stride, tile * TILE + tl.arange(0, TILE), vocab_size)
    heat, peak = tl.load(temperature + row).to(tl.float32), row_peak(peaks, row, num_tiles, TILES)
    weights = tl.where(found >= least_logit(peak, heat), weights_of(found, peak, heat), 0.0)
    tl.store(tile_weights + row * num_tiles + tile, tl.sum(weights, axis=0))


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "uniforms"])
def _pick_kernel(
    logits,
    stride,
    temperature,
    top_k,
    uniforms,
    peaks,
    keys,
    last_ids,
    tile_weights,
    tokens,
    num_tiles,
    vocab_size,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    IS_CUT: tl.constexpr,
):
    row = tl.program_id(0)
    heat, tile = tl.load(temperature + row).to(tl.float32), tl.arange(0, TILES)
    is_greedy = (heat == 0) | (tl.load(top_k + row) == 1)
    is_tile = tile < num_tiles
    peak = row_peak(peaks, row, num_tiles, TILES)
    tile_peaks = tl.load(peaks + row * num_tiles + tile, mask=is_tile, other=float("-inf"))
    mass = tl.load(tile_weights + row * num_tiles + tile, mask=is_tile, other=0.0).to(tl.float64)
    mass = tl.where(is_greedy, 0.0, mass)
    cumulative = tl.cumsum(mass, axis=0)
    target = tl.load(uniforms + row).to(tl.float64) * tl.sum(mass, axis=0)
    # The sum may exceed the last cumulative weight by rounding: take a tile, and below a token, with weight.
    last = tl.max(tl.where(mass > 0, tile, 0), axis=0)
    chosen = tl.minimum(tl.sum((is_tile & (cumulative <= target)).to(tl.int32), axis=0), last)
    # A row without a number has no largest one, and takes its first token.
    first_tile = tl.min(tl.where(tile_peaks == peak, tile, TILES), axis=0)
    chosen = tl.where(is_greedy, tl.where(first_tile < TILES, first_tile, 0), chosen)
    before = tl.sum(tl.where(tile < chosen, mass, 0.0), axis=0)
    own = tl.sum(tl.where(tile == chosen, mass, 0.0), axis=0)
    share = tl.where(own > 0, (target - before) / own, 0.0)

    place = tl.arange(0, TILE)
    token = chosen * TILE + place
    found = load_logits(logits, row, stride, token, vocab_size)
    weights = _kept_weights(found, token, peak, heat, keys, last_ids, row, IS_CUT).to(tl.float64)
    reached = tl.cumsum(weights, axis=0)
    is_passed = reached <= share * tl.sum(weights, axis=0)
    drawn = tl.minimum(tl.sum(is_passed.to(tl.int32), axis=0), tl.max(tl.where(weights > 0, place, 0), axis=0))
    first_place = tl.min(tl.where(found == peak, place, TILE), axis=0)
    drawn = tl.where(is_greedy, tl.where(first_place < TILE, first_place, 0), drawn)
    tl.store(tokens + row, tl.minimum(chosen * TILE + drawn, vocab_size - 1).to(tl.int64))


def draw_tokens(rows: SamplingRows, uniforms: Tensor, *, any_cut: bool) -> Tensor:
    """Return [rows] int64 tokens that uniform numbers, [rows] float64 in [0, 1), draw.

    A row's token does not depend on the other rows. A row without a number takes some token. CUDA-graph safe: no host
    sync, three launches, and five if rows may be cut.

    Args:
        rows: On a GPU, or with Triton interpreted.
        any_cut: False if no row has top-k above 1 or top-p.
    """
    logits = rows.logits
    (num_rows, vocab_size), num_tiles = logits.shape, triton.cdiv(logits.shape[1], TILE)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return tokens
    tiles = RowTiles(*(logits.new_empty(num_rows, num_tiles, dtype=torch.float32) for _ in range(3)))
    read = {
        "logits": logits,
        "stride": logits.stride(0),
        "num_tiles": num_tiles,
        "vocab_size": vocab_size,
        "TILE": TILE,
    }
    weighed = {
        **read,
        "temperature": rows.temperature,
        "peaks": tiles.peaks,
        "tile_weights": tiles.weights,
        "TILES": triton.next_power_of_2(num_tiles),
    }
    _peaks_kernel[(num_rows, num_tiles)](
        **read, peaks=tiles.peaks, leasts=tiles.leasts, num_warps=_WARPS, enable_fp_fusion=True
    )
    if any_cut:
        cuts = find_cuts(rows, tiles)
    else:
        cuts = TokenCuts(tokens, tokens)
        _weigh_kernel[(num_rows, num_tiles)](**weighed, num_warps=_WARPS, enable_fp_fusion=True)
    _pick_kernel[(num_rows,)](
        **weighed,
        top_k=rows.top_k,
        uniforms=uniforms,
        keys=cuts.keys,
        last_ids=cuts.last_ids,
        tokens=tokens,
        IS_CUT=any_cut,
        num_warps=_PICK_WARPS,
        enable_fp_fusion=True,
    )
    return tokens
