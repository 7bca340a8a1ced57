"""Log-probabilities of prompt tokens in an engine that materializes the logits of each request's last token only.

A step has the hidden states of all its tokens. If prompt tokens must be scored, their logits are computed from the
hidden states in batches of bounded size, and only the log-probabilities are stored with the request. They are returned
with the request's first generated token. A request whose prefill is interrupted is scored again from the start.
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
"""Maximum number of logits computed at once: 128 MiB in float32."""


@dataclass(frozen=True, slots=True)
class ScoredSpan:
    """Consecutive prompt tokens of a request, whose logits score the tokens that follow.

    Args:
        tokens: Packed indices of the tokens in the step.
        followers: Ids of the prompt tokens that follow each of them.
    """

    request: RunningRequest
    tokens: range
    followers: tuple[int, ...]


def scored_spans(requests: Sequence[RunningRequest]) -> list[ScoredSpan]:
    """Return the spans of prompt tokens to score in this step, one for each request that asked for it."""
    found = []
    token_start = 0
    for request in requests:
        if request.scores_prompt:
            first = request.computed + 1
            followers = request.spec.prompt[first : first + request.scheduled]  # the last prompt token has none
            tokens = range(token_start, token_start + len(followers))
            found.append(ScoredSpan(request, tokens, tuple(followers.tolist())))
        token_start += request.scheduled
    return found


def score_prompts(step: Step, ranks: Ranks, logits_of: Callable[[Tensor], Tensor], vocab_size: int) -> None:
    """Score the prompt tokens that follow this step's tokens, and store the results in their requests.

    Collective: all ranks of the model call it in the same steps.

    Args:
        logits_of: Function from hidden states [n, hidden] to logits [n, vocab]; called only on the last stage.
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
    """Return the prompt scores by request index, for requests whose prefill ends in this step."""
    return {
        index: request.scored
        for index, request in enumerate(requests)
        if request.scores_prompt and request.samples_this_step
    }


def named_alternatives(
    scored: Sequence[ScoredToken], top_n: int, text_of: Callable[[int], str]
) -> list[dict[str, float]]:
    """Return each token's `top_n` most likely alternatives, keyed by text; see `alternatives_by_text`."""
    known = cache(text_of)
    return [alternatives_by_text(token.best_ids[:top_n], token.best_log_probs[:top_n], known) for token in scored]


def alternatives_by_text(
    token_ids: Sequence[int], log_probs: Sequence[float], text_of: Callable[[int], str]
) -> dict[str, float]:
    """Return log-probabilities keyed by token text; a token with a repeated text gets a key such as `token_id:5`."""
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
    """Return the scores of all spans' followers, in order, each with its `top_n` most likely alternatives."""
    tokens = [token for span in spans for token in span.tokens]
    followers = [token for span in spans for token in span.followers]
    device = step.batch.token_ids.device
    values = torch.empty(len(tokens), 1 + top_n, device=device)
    ranks_and_ids = torch.empty(len(tokens), 1 + top_n, dtype=torch.int64, device=device)
    if ranks.is_last_stage:
        hidden = step.hidden_states[torch.tensor(tokens, device=device)]
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
