"""Sample tokens of a batch on the device, from random numbers that the caller supplies.

A row's probabilities are those of its logits over its temperature, of what top-k and top-p keep: top-k keeps by rank,
ties the lower token id first, then top-p keeps the smallest leading set whose probability reaches it. Tokens less than
e ** -32 as probable as the most probable one have none. A token is drawn by inverting the cumulative probabilities in
the order of token ids, so that no vocabulary has to be sorted.
"""

import torch
from torch import Tensor

from ..kernel_launches import is_computed_in_fp32, launches_kernel
from .row_tiles import LARGEST, LEAST_SHARE
from .sampling_rows import SamplingRows
from .token_draws import draw_tokens


def sample_tokens(rows: SamplingRows, uniforms: Tensor, *, any_cut: bool = True) -> Tensor:
    """Draw one token a row.

    A row's token depends on that row alone. A greedy row takes its most probable token, ties the lower id. A row of NaN
    takes some token. No host sync, and with the kernels CUDA-graph safe.

    Args:
        uniforms: [rows] float64 in [0, 1).
        any_cut: False if no row has top-k above 1 or top-p.

    Returns:
        [rows] int64 token ids.

    Reference: `sample_tokens_ref`, which computes in float64; tokens are the same but for a uniform number or a top-p
    that meets a cumulative probability up to a relative 1e-5.
    """
    if launches_kernel(rows.logits) and is_computed_in_fp32(rows.logits) and rows.logits.stride(1) == 1:
        return draw_tokens(rows, uniforms, any_cut=any_cut)
    return sample_tokens_ref(rows, uniforms)


def sample_tokens_ref(rows: SamplingRows, uniforms: Tensor) -> Tensor:
    """Do what `sample_tokens` does, in float64."""
    return sample_weighted(_kept_weights(rows), uniforms)


def token_probabilities(rows: SamplingRows) -> Tensor:
    """Return the probabilities [rows, vocab] float64 that `sample_tokens` draws from; one-hot for a greedy row."""
    weights = _kept_weights(rows)
    return weights / weights.sum(dim=-1, keepdim=True)


def sample_weighted(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token a row in proportion to `weights`.

    Args:
        weights: [rows, vocab] float64, in token order, none negative and not all zero in a row.
        uniforms: [rows] float64 in [0, 1).

    Returns:
        [rows] int64 token ids; a token without weight is never drawn.
    """
    cumulative = weights.cumsum(dim=-1)
    target = uniforms.to(torch.float64)[:, None] * cumulative[:, -1:]
    drawn = (cumulative <= target).sum(dim=-1)
    # A parallel scan rounds each place separately, so the sum may exceed the cumulative weight of the last kept token:
    # clamp to a token with weight. A row of NaN has none and takes the first: an index out of range would end the
    # process, and every other row with it.
    places = torch.arange(weights.shape[1], device=weights.device)
    return torch.minimum(drawn, torch.where(weights > 0, places, 0).amax(dim=-1))


def _kept_weights(rows: SamplingRows) -> Tensor:
    """Return weights [rows, vocab] float64 to draw with, in token order; zero for tokens that are not kept."""
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
    """Zero the ranked weights [rows, vocab] from rank `top_k` on."""
    vocab = weights.shape[1]
    ranks = torch.arange(vocab, device=weights.device)
    return weights.masked_fill(ranks >= torch.where(top_k > 0, top_k, vocab)[:, None], 0)


def _keep_nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    """Zero the ranked weights [rows, vocab] past the first set whose share of them reaches `top_p`."""
    is_off = (top_p <= 0) | (top_p >= 1)
    cumulative = weights.cumsum(dim=-1)
    limit = torch.where(is_off, 2, top_p.to(torch.float64))[:, None] * cumulative[:, -1:]
    before = cumulative.roll(1, dims=-1)  # [rows, vocab]: weight of all better ranks
    before[:, 0] = 0
    return weights.masked_fill(before >= limit, 0)
