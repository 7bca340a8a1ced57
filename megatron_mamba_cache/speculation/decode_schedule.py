"""Schedule decoding requests with their drafts, and advance them when the step has finished."""

import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from ..metrics import CacheCounters
from ..policy.prefix_cache import PrefixCache
from ..policy.requests import RunningRequest
from .draft_planner import DraftLimit, DraftPlanner, NoDrafts
from .drafter import Draft

_LOG = logging.getLogger(__name__)


def schedule_decode(
    requests: Sequence[RunningRequest],
    cache: PrefixCache,
    planner: DraftPlanner | NoDrafts,
    budget: int,
    holds_on_all_ranks: Callable[[bool], bool] = bool,
    allowed: Callable[[RunningRequest, Sequence[int]], Sequence[int]] = lambda _request, drafts: drafts,
) -> list[Tensor | None]:
    """Schedule all decoding requests with their drafts, or without drafts if drafting fails.

    Args:
        budget: Maximum number of draft tokens in the step; older requests have priority.
        holds_on_all_ranks: Collective that returns True if a condition holds on all ranks, so that all ranks plan the
            same step even if the drafter fails on one of them. The default is for one rank.
        allowed: Returns the leading draft tokens that a request's grammar allows.

    Returns:
        For each request, the distributions [drafts, vocab] from which its drafts were sampled, or None if they were not
        sampled. The list is empty if the engine has no drafter.
    """
    if not planner.max_drafts:
        for request in requests:
            cache.schedule_decode(request)
        return []
    # A step yields up to one token more than its drafts, and must not exceed the length limit of the request.
    rooms = [max(0, min(planner.max_drafts, request.spec.max_len - request.length - 1)) for request in requests]
    rooms = [
        cache.draft_states.most_drafts(request.computed, room) for request, room in zip(requests, rooms, strict=True)
    ]
    counts = planner.counts(requests, rooms, budget)
    limits = [DraftLimit(request, count) for request, count in zip(requests, counts, strict=True)]
    distributions: list[Tensor | None] = []
    for request, draft in zip(requests, _plan(limits, planner, cache.counters, holds_on_all_ranks), strict=True):
        cache.schedule_decode(request, allowed(request, draft.tokens))
        sampled_from = draft.distributions if request.drafts else None
        distributions.append(None if sampled_from is None else sampled_from[: len(request.drafts)])
    return distributions


def _plan(
    limits: Sequence[DraftLimit],
    planner: DraftPlanner | NoDrafts,
    counters: CacheCounters,
    holds_on_all_ranks: Callable[[bool], bool],
) -> list[Draft]:
    none, failure = [Draft()] * len(limits), None
    if not any(entry.limit for entry in limits):
        return none
    try:
        drafts = planner.plan(limits)
    except Exception as error:  # a drafter is user code, and its failure must not fail a request
        drafts, failure = none, error
    if holds_on_all_ranks(failure is None):
        return drafts
    counters.drafting_failures += 1
    count = counters.drafting_failures
    if count.bit_count() == 1:  # log failures 1, 2, 4, 8, ...
        reason = "on another rank of the model" if failure is None else repr(failure)
        _LOG.warning("drafting failed %d times; steps continue without drafts: %s", count, reason)
    for entry in limits:
        planner.forget(entry.request.request_id)
    return none


def note_hidden_states(
    requests: Sequence[RunningRequest],
    kept: Sequence[tuple[int, ...]],
    starts: Sequence[int],
    hidden_states: Tensor,
    planner: DraftPlanner | NoDrafts,
) -> None:
    """Pass the planner the hidden state from which each request's newest token was sampled.

    Args:
        starts: [requests] index of the first row of logits for each request.
        hidden_states: [logits, hidden].
    """
    for request, new, start in zip(requests, kept, starts, strict=False):
        if new:
            planner.note_hidden_state(request, hidden_states[start + len(new) - 1])


def advance_one_token_requests(
    requests: Sequence[RunningRequest],
    kept: Sequence[tuple[int, ...]],
    cache: PrefixCache,
    planner: DraftPlanner | NoDrafts,
) -> None:
    """Advance requests that decoded one token without drafts, and publish completed blocks.

    The requests may already hold blocks for the next step.
    """
    block_size = cache.block_size
    for request, new in zip(requests, kept, strict=True):
        if (request.computed + 1) % block_size:
            request.land_token(new)
        else:
            request.append(new)
            cache.publish(request, 1)
            request.advance(1)
    planner.note_step(requests)
    cache.counters.decode_rows += len(requests)
    cache.counters.decode_tokens_computed += len(requests)


def advance_requests(
    requests: Sequence[RunningRequest],
    kept: Sequence[tuple[int, ...]],
    cache: PrefixCache,
    planner: DraftPlanner | NoDrafts,
) -> None:
    """Append the tokens that a step produced, and publish blocks of generated text (prompts already are).

    Args:
        kept: New tokens of each request, in order; at least one for a decoding request.
    """
    for request, new in zip(requests, kept, strict=True):
        request.append(new)
        if request.is_prefilling:
            cache.advance(request, request.scheduled)
            continue
        num_kept = len(new)
        cache.publish(request, num_kept)
        planner.note(request, len(request.drafts), num_kept - 1)
        cache.advance(request, num_kept)
    planner.note_step(requests)
