"""Sample tokens of a batch on the device, from random numbers that the caller supplies."""

import torch
from torch import Tensor


def sample_tokens(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token a row by inverting the cumulative probabilities, most probable first, in float64.

    Ties rank the lower token id first; top-k keeps by rank, then top-p keeps the smallest leading set whose
    probability reaches it. A row's token depends on that row alone. No host sync.

    Args:
        logits: [rows, vocab].
        temperature: [rows]; 0 takes the most probable token.
        top_k: [rows] integers; 0 is off, 1 takes the most probable token.
        top_p: [rows]; 0 or 1 is off.
        uniforms: [rows] float64 in [0, 1).

    Returns:
        [rows] int64 token ids.
    """
    weights, token_ids = _rank_weights(logits, temperature, top_k, top_p)
    return token_ids.gather(1, _invert_cumulative(weights, uniforms)[:, None])[:, 0]


def token_probabilities(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return the probabilities [rows, vocab] float64, in token order, that `sample_tokens` draws from.

    The arguments are those of `sample_tokens`; a row that takes the most probable token is one-hot. No host sync.
    """
    weights, token_ids = _rank_weights(logits, temperature, top_k, top_p)
    return torch.empty_like(weights).scatter(1, token_ids, weights / weights.sum(dim=-1, keepdim=True))


def sample_weighted(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token a row in proportion to `weights`.

    Args:
        weights: [rows, vocab] float64, in token order, none negative and not all zero in a row.
        uniforms: [rows] float64 in [0, 1).

    Returns:
        [rows] int64 token ids; a token without weight is never drawn.
    """
    ranked, token_ids = torch.sort(weights, dim=-1, descending=True, stable=True)
    return token_ids.gather(1, _invert_cumulative(ranked, uniforms)[:, None])[:, 0]


def greedy_tokens(logits: Tensor) -> Tensor:
    """Return the most probable token of each row of `logits` [rows, vocab] as [rows] int64, ties to the lower id."""
    return logits.argmax(dim=-1)


def _rank_weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights [rows, vocab] float64 to draw with, most probable token first, and the tokens' ids."""
    ranked, token_ids = torch.sort(logits.to(torch.float64), dim=-1, descending=True, stable=True)
    greedy = (temperature == 0) | (top_k == 1)
    scaled = (ranked - ranked[:, :1]) / torch.where(greedy, 1, temperature).to(torch.float64)[:, None]
    weights = _keep_nucleus(_keep_top_k(scaled, top_k), top_p)
    is_first = torch.arange(weights.shape[1], device=weights.device) == 0
    return torch.where(greedy[:, None], is_first.to(torch.float64), weights), token_ids


def _keep_top_k(scaled: Tensor, top_k: Tensor) -> Tensor:
    """Return the probabilities [rows, vocab] of ranked logits, zero from rank `top_k` on."""
    vocab = scaled.shape[1]
    ranks = torch.arange(vocab, device=scaled.device)
    dropped = ranks >= torch.where(top_k > 0, top_k, vocab)[:, None]
    return torch.softmax(scaled.masked_fill(dropped, float("-inf")), dim=-1)


def _keep_nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Zero the ranked probabilities [rows, vocab] past the first set that reaches `top_p`; not renormalised."""
    is_off = (top_p <= 0) | (top_p >= 1)
    limit = torch.where(is_off, 2, top_p.to(torch.float64))[:, None]
    before = probabilities.cumsum(dim=-1).roll(1, dims=-1)  # [rows, vocab]: mass of all better ranks
    before[:, 0] = 0
    return probabilities.masked_fill(before >= limit, 0)


def _invert_cumulative(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the rank [rows] where the cumulative weights first exceed the uniform share of their sum."""
    cumulative = weights.cumsum(dim=-1)
    target = uniforms.to(torch.float64)[:, None] * cumulative[:, -1:]
    rank = (cumulative <= target).sum(dim=-1)
    # A parallel scan rounds each rank separately, so the sum may exceed the cumulative weight of the last kept token:
    # clamp to a token with nonzero weight. A row of NaN has none and takes the first, as greedy rows take some token:
    # an index out of range would end the process, and every other row with it.
    return torch.minimum(rank, (weights > 0).sum(dim=-1) - 1).clamp_min(0)
