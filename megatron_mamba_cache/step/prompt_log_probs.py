"""Log-probabilities of prompt tokens in an engine that materializes the logits of each request's last token only.

A step has the hidden states of all its tokens. The logits of those that score a prompt are computed from them, a
bounded number at a time, and a few numbers of each are kept with its request. A request gets its scores with its first
token, so a prompt that is interrupted is scored again as a whole.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..policy.request_settings import ScoredToken
from ..policy.requests import RunningRequest
from ..ranks.group import Ranks
from .step import Step

_MOST_LOGITS = 2**25
"""Logits that are computed at once: 128 MiB in float32."""


@dataclass(frozen=True, slots=True)
class ScoredSpan:
    """Consecutive tokens of a request, each of which scores the token after it.

    Args:
        tokens: Packed indices of the step.
        followers: The prompt tokens that follow.
    """

    request: RunningRequest
    tokens: range
    followers: tuple[int, ...]


def scored_spans(requests: Sequence[RunningRequest]) -> list[ScoredSpan]:
    """Return the prompt tokens that each request of a step scores; empty if it scores none."""
    found = []
    token_start = 0
    for request in requests:
        if request.scores_prompt:
            first = request.computed + 1
            followers = request.spec.prompt[first : first + request.scheduled]  # the last token has none
            tokens = range(token_start, token_start + len(followers))
            found.append(ScoredSpan(request, tokens, tuple(followers.tolist())))
        token_start += request.scheduled
    return found


def score_prompts(step: Step, ranks: Ranks, logits_of: Callable[[Tensor], Tensor], vocab_size: int) -> None:
    """Add the log-probs of the prompt tokens that follow this step's tokens to each request that wants them.

    Collective: the ranks of a model call it in the same steps.

    Args:
        logits_of: Returns the logits [n, vocab] of hidden states [n, hidden]; called on the last stage only.
    """
    spans = [span for span in scored_spans(step.requests) if span.followers]
    if not spans:
        return
    top_n = max(span.request.spec.log_probs.most_of_prompt for span in spans)
    found = _scores(step, ranks, spans, top_n, logits_of, _MOST_LOGITS // vocab_size)
    for span in spans:
        width = span.request.spec.log_probs.most_of_prompt
        span.request.score([next(found).cut(width) for _ in span.followers])


def whole_scores(requests: Sequence[RunningRequest]) -> dict[int, list[ScoredToken]]:
    """Return, by request index, the scores of the prompts that this step completes."""
    return {
        index: request.scored
        for index, request in enumerate(requests)
        if request.scores_prompt and request.samples_this_step
    }


def named_alternatives(
    scored: Sequence[ScoredToken], top_n: int, text_of: Callable[[int], str]
) -> list[dict[str, float]]:
    """Return the `top_n` best alternatives of each token by text; see `alternatives_by_text`."""
    known = cache(text_of)
    return [alternatives_by_text(token.best_ids[:top_n], token.best_log_probs[:top_n], known) for token in scored]


def alternatives_by_text(
    token_ids: Sequence[int], log_probs: Sequence[float], text_of: Callable[[int], str]
) -> dict[str, float]:
    """Return the log-probs of tokens by text, in their order; one whose text is taken is named by id: `token_id:5`."""
    found: dict[str, float] = {}
    for token_id, value in zip(token_ids, log_probs, strict=True):
        text = text_of(token_id)
        found[f"token_id:{token_id}" if text in found else text] = value
    return found


def _scores(
    step: Step,
    ranks: Ranks,
    spans: Sequence[ScoredSpan],
    top_n: int,
    logits_of: Callable[[Tensor], Tensor],
    most_at_once: int,
) -> Iterator[ScoredToken]:
    """Return the scores of all followers, in order, each with the `top_n` best alternatives."""
    tokens = [token for span in spans for token in span.tokens]
    followers = [token for span in spans for token in span.followers]
    device = step.batch.token_ids.device
    values = torch.empty(len(tokens), 1 + top_n, device=device)
    ranks_and_ids = torch.empty(len(tokens), 1 + top_n, dtype=torch.int64, device=device)
    if ranks.is_last_stage:
        hidden = step.scored_hidden_states[torch.tensor(tokens, device=device)]
        targets = torch.tensor(followers, device=device)[:, None]
        size = max(most_at_once, 1)
        for start in range(0, len(tokens), size):
            part = slice(start, start + size)
            log_probs = F.log_softmax(logits_of(hidden[part]).float(), dim=-1)
            best = torch.topk(log_probs, top_n)
            chosen = values[part, :1] = log_probs.gather(1, targets[part])
            values[part, 1:], ranks_and_ids[part, 1:] = best.values, best.indices
            ranks_and_ids[part, 0] = 1 + (log_probs > chosen).sum(dim=-1)
    if ranks.num_ranks > 1:
        ranks.from_source(values)
        ranks.from_source(ranks_and_ids)
    lines = zip(values.tolist(), ranks_and_ids.tolist(), strict=True)
    return (ScoredToken(log_prob, rank, tuple(best), tuple(ids)) for (log_prob, *best), (rank, *ids) in lines)
