"""Sample one token per row of logits on the device, from uniform random numbers that the caller supplies.

The probabilities of a row are the softmax of its logits divided by its temperature, restricted by top-k and then top-p.
Top-k keeps the k largest logits; among equal logits, lower token ids come first. Top-p keeps the smallest set of the
most probable tokens whose total probability reaches p. A token whose probability is less than e ** -32 times the
largest is never sampled. Sampling inverts the cumulative probabilities in the order of token ids, so nothing is sorted.

Three launches compute, in this order: the largest logit of each tile; the weight of each tile's kept tokens; and, with
one program per row, first the tile and then the token at which the cumulative weight exceeds the uniform number. If
needed, `token_cuts` replaces the second launch and applies top-k and top-p. A greedy row takes its largest logit.
Layout: logits row-major, vocabulary contiguous. Reading the logits twice, the second time from L2, dominates
the run time. Safe in CUDA graphs: no host sync, and the grids depend only on the shape of the logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_launches import is_computed_in_fp32, launches_kernel
from .row_tiles import (
    LARGEST,
    LEAST_SHARE,
    TILE,
    SamplingRows,
    least_logit,
    load_logits,
    ordered_keys,
    row_peak,
    weights_of,
)
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
def _weights_in_cut(found, token, peak, temperature, keys, last_ids, row, IS_CUT: tl.constexpr):
    """Return the weights of tokens; 0 for tokens that top-k or top-p excludes."""
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
    logits, stride, temperature, top_k, uniforms, peaks, keys, last_ids, tile_weights, tokens, num_tiles,
    vocab_size,
    TILE: tl.constexpr, TILES: tl.constexpr, IS_CUT: tl.constexpr,
):  # fmt: skip
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
    # Rounding may push the target past the last cumulative weight, so clamp to the last tile that has weight; further
    # below, clamp to the last token that has weight.
    last = tl.max(tl.where(mass > 0, tile, 0), axis=0)
    chosen = tl.minimum(tl.sum((is_tile & (cumulative <= target)).to(tl.int32), axis=0), last)
    # If all logits are NaN, no logit equals the peak; take the first token.
    first_tile = tl.min(tl.where(tile_peaks == peak, tile, TILES), axis=0)
    chosen = tl.where(is_greedy, tl.where(first_tile < TILES, first_tile, 0), chosen)
    before = tl.sum(tl.where(tile < chosen, mass, 0.0), axis=0)
    own = tl.sum(tl.where(tile == chosen, mass, 0.0), axis=0)
    share = tl.where(own > 0, (target - before) / own, 0.0)

    index = tl.arange(0, TILE)
    token = chosen * TILE + index
    found = load_logits(logits, row, stride, token, vocab_size)
    weights = _weights_in_cut(found, token, peak, heat, keys, last_ids, row, IS_CUT).to(tl.float64)
    reached = tl.cumsum(weights, axis=0)
    is_passed = reached <= share * tl.sum(weights, axis=0)
    sampled = tl.minimum(tl.sum(is_passed.to(tl.int32), axis=0), tl.max(tl.where(weights > 0, index, 0), axis=0))
    first_index = tl.min(tl.where(found == peak, index, TILE), axis=0)
    sampled = tl.where(is_greedy, tl.where(first_index < TILE, first_index, 0), sampled)
    tl.store(tokens + row, tl.minimum(chosen * TILE + sampled, vocab_size - 1).to(tl.int64))


def sample_by_kernels(rows: SamplingRows, uniforms: Tensor, *, any_cut: bool) -> Tensor:
    """Sample tokens [rows] int64 as `sample_tokens` does, but always with kernels (GPU or Triton's interpreter).

    CUDA-graph safe: no host sync, three launches, or eight with `any_cut`.
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


def sample_tokens(rows: SamplingRows, uniforms: Tensor, *, any_cut: bool = True) -> Tensor:
    """Sample one token per row; the token does not depend on other rows.

    A greedy row takes its most probable token, and among equal logits the lowest id. If all logits of a row are NaN,
    its token is arbitrary but valid. No host sync; the kernels are CUDA-graph safe.

    Args:
        uniforms: [rows] float64 in [0, 1).
        any_cut: May be False only if all rows have top-k 0 or 1 and no top-p.

    Returns:
        [rows] int64 token ids.

    Reference: `sample_tokens_ref` in float64. The tokens are equal, unless a uniform number or top-p differs from a
    cumulative probability by a relative error of at most 1e-5.
    """
    if launches_kernel(rows.logits) and is_computed_in_fp32(rows.logits) and rows.logits.stride(1) == 1:
        return sample_by_kernels(rows, uniforms, any_cut=any_cut)
    return sample_tokens_ref(rows, uniforms)


def sample_tokens_ref(rows: SamplingRows, uniforms: Tensor) -> Tensor:
    """Torch reference for `sample_tokens`; computes in float64."""
    return sample_weighted(_kept_weights(rows), uniforms)


def token_probabilities(rows: SamplingRows) -> Tensor:
    """Return the probabilities from which `sample_tokens` samples, [rows, vocab] float64; one-hot for greedy rows."""
    weights = _kept_weights(rows)
    return weights / weights.sum(dim=-1, keepdim=True)


def sample_weighted(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Sample one token per row with probabilities proportional to `weights`.

    Args:
        weights: [rows, vocab] float64 by token id; not negative, and positive for at least one token per row.
        uniforms: [rows] float64 in [0, 1).

    Returns:
        [rows] int64 token ids; never a token whose weight is 0.
    """
    cumulative = weights.cumsum(dim=-1)
    target = uniforms.to(torch.float64)[:, None] * cumulative[:, -1:]
    sampled = (cumulative <= target).sum(dim=-1)
    # A parallel scan rounds each index separately, so the target may exceed the cumulative weight of the last kept
    # token; clamp to a token that has weight. If all weights are NaN, take the first token, because an index out of
    # range would crash the process.
    indices = torch.arange(weights.shape[1], device=weights.device)
    return torch.minimum(sampled, torch.where(weights > 0, indices, 0).amax(dim=-1))


def _kept_weights(rows: SamplingRows) -> Tensor:
    """Return sampling weights [rows, vocab] float64 in the order of token ids; 0 for excluded tokens."""
    minus_infinity = float("-inf")
    logits = rows.logits.nan_to_num(nan=minus_infinity, posinf=LARGEST, neginf=minus_infinity)
    ranked, token_ids = torch.sort(logits, dim=-1, descending=True, stable=True)
    greedy = (rows.temperature == 0) | (rows.top_k == 1)
    best = ranked[:, :1].to(torch.float64).clamp_min(-LARGEST)
    distances = (best - ranked) / torch.where(greedy, 1, rows.temperature).to(torch.float64)[:, None]
    weights = torch.exp(-distances).masked_fill(distances > LEAST_SHARE, 0)
    weights = _keep_nucleus(_keep_top_k(weights, rows.top_k), rows.top_p)
    is_first = torch.arange(weights.shape[1], device=weights.device) == 0
    weights = torch.where(greedy[:, None], is_first.to(torch.float64), weights)
    return torch.empty_like(weights).scatter(1, token_ids, weights)


def _keep_top_k(weights: Tensor, top_k: Tensor) -> Tensor:
    """Set the weights [rows, vocab], sorted in descending order, to 0 from rank `top_k` on."""
    vocab = weights.shape[1]
    ranks = torch.arange(vocab, device=weights.device)
    return weights.masked_fill(ranks >= torch.where(top_k > 0, top_k, vocab)[:, None], 0)


def _keep_nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    """Set the weights [rows, vocab], sorted in descending order, to 0 after their sum has reached `top_p`."""
    is_off = (top_p <= 0) | (top_p >= 1)
    cumulative = weights.cumsum(dim=-1)
    limit = torch.where(is_off, 2, top_p.to(torch.float64))[:, None] * cumulative[:, -1:]
    before = cumulative.roll(1, dims=-1)  # [rows, vocab]: weight of all more probable tokens
    before[:, 0] = 0
    return weights.masked_fill(before >= limit, 0)
