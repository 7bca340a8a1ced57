"""Sample tokens, verify drafts, and copy boundary states after the forward pass."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.sampling.greedy_draws import greedy_tokens
from ..kernels.sampling.sampling import sample_tokens, token_probabilities
from ..kernels.sampling.verification import DraftDistributions, RatioUniforms, accept_by_ratio, accept_matching
from ..ranks.group import Ranks
from .batch import StepBatch
from .logits import Draws, StepLogits
from .memory import CacheMemory
from .step import any_sampled


def verify_step(wanted: StepLogits, logits: Tensor, distributions: Sequence[Tensor | None]) -> Tensor:
    """Sample a token from every row of logits, and accept the drafts that pass verification.

    Args:
        wanted: Sampling settings and random numbers for the rows of `logits`.
        logits: [logits, vocab] logits, after all changes and masks.
        distributions: For each decode request, the distributions that its drafts were sampled from, or None for other
            drafts.

    Returns:
        [requests, 2 + max drafts] int64: each request's number of accepted tokens, then the tokens.
    """
    sampled = _sampled_distributions(wanted, distributions)
    if sampled is None and wanted.draws is Draws.BEST:
        return accept_matching(greedy_tokens(logits), wanted.verify)
    sampling = wanted.sampling(logits)
    tokens = sample_tokens(sampling, wanted.uniforms, any_cut=wanted.draws is Draws.KEPT_TOKENS)
    if sampled is None:
        return accept_matching(tokens, wanted.verify)
    uniforms = RatioUniforms(wanted.accept_uniforms, wanted.residual_uniforms)
    return accept_by_ratio(tokens, token_probabilities(sampling), wanted.verify, sampled, uniforms)


def outcome_on_all_ranks(ranks: Ranks, wanted: StepLogits, compute: Callable[[], Tensor]) -> Tensor:
    """Broadcast the outcome from the last stage's first rank, so that all ranks make equal plans.

    Args:
        compute: Function that runs `verify_step`; called only on ranks that have the logits.
    """
    if ranks.num_ranks == 1:
        return compute()
    if ranks.is_last_stage:
        return ranks.from_source(compute().contiguous())
    shape = wanted.verify.cu_logits.shape[0] - 1, 2 + wanted.verify.max_drafts
    return ranks.from_source(torch.zeros(shape, dtype=torch.int64, device=wanted.verify.cu_logits.device))


def logits_on_all_ranks(ranks: Ranks, output: Tensor, num_logits: int, vocab_size: int) -> Tensor:
    """Return logits, [1, num_logits, vocab], bit-equal on all ranks.

    Args:
        output: This rank's output of the forward pass: logits, or hidden states on all stages but the last.
    """
    if ranks.num_ranks == 1:
        return output
    if ranks.is_last_stage:
        return ranks.from_source(output.contiguous())
    return ranks.from_source(output.new_empty((1, num_logits, vocab_size)))


def _sampled_distributions(wanted: StepLogits, distributions: Sequence[Tensor | None]) -> DraftDistributions | None:
    """Return the draft distributions, each with its index by logits row; None if no draft was sampled from one."""
    if not any_sampled(distributions):
        return None
    index = torch.full(wanted.tokens.shape, -1, dtype=torch.int32)
    found: list[Tensor] = []
    num_found = 0
    for start, sampled in zip(wanted.starts, distributions, strict=False):
        if sampled is not None:
            index[start : start + len(sampled)] = torch.arange(num_found, num_found + len(sampled), dtype=torch.int32)
            num_found += len(sampled)
            found.append(sampled)
    return DraftDistributions(torch.cat(found), index.to(found[0].device))


def copy_reached_boundaries(step: StepBatch, outcome: Tensor, memory: CacheMemory) -> None:
    """For each decode request that reached a boundary, copy its state at the boundary to the reserved slot."""
    if step.align is None:
        return
    batch = replace(step.align, accepted=outcome[: step.align.targets.shape[0], 0])
    pool = memory.state_pool
    pool.drafts.cache_boundaries(pool.cached, step.replay, batch, memory.geometry.block_size)
