"""Schedule decode requests with their drafts, and advance requests when the step has finished."""

import logging
from collections import Counter
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
    """Schedule all decode requests with their drafts, or without drafts if the drafter fails.

    Args:
        budget: Maximum number of draft tokens in the step; older requests have priority.
        holds_on_all_ranks: Collective that returns True if a condition is True on all ranks. If the drafter fails on
            one rank, all ranks then schedule without drafts. The default is for one rank.
        allowed: Function that returns the leading draft tokens that a request's grammar allows.

    Returns:
        For each request, the distributions [drafts, vocab] from which its drafts were sampled, or None if they were not
        sampled. The list is empty if the engine has no drafter.
    """
    if not planner.max_drafts:
        for request in requests:
            cache.schedule_decode(request)
        return []
    # A step generates up to one token more than it has drafts, and must not exceed the request's length limit.
    max_counts = [max(0, min(planner.max_drafts, request.spec.max_len - request.length - 1)) for request in requests]
    max_counts = [
        cache.draft_states.most_drafts(request.computed, max_count)
        for request, max_count in zip(requests, max_counts, strict=True)
    ]
    counts = planner.counts(requests, max_counts, budget)
    if planner.uses_blocks:
        counts = [
            cache.room_for_drafts(request, count) if count else 0
            for request, count in zip(requests, counts, strict=True)
        ]
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
    except Exception as error:  # a drafter is user code, and its errors must not fail a request
        drafts, failure = none, error
    if holds_on_all_ranks(failure is None):
        return drafts
    counters.drafting_failures += 1
    count = counters.drafting_failures
    if count.bit_count() == 1:  # log failures 1, 2, 4, 8, ...
        reason = "on another rank of the model" if failure is None else repr(failure)
        _LOG.warning("the drafter failed %d times; these steps ran without drafts: %s", count, reason)
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
    """Pass the hidden state from which each request's newest token was sampled to the planner.

    Args:
        starts: [requests] index of the first row of logits for each request.
        hidden_states: [logits, hidden], one row for each row of logits.
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
    """Append each request's new token after a step without drafts or prompts, and publish completed blocks.

    Requests may hold blocks that are reserved for an overlapped step.
    """
    block_size = cache.block_size
    for request, new in zip(requests, kept, strict=True):
        if (request.computed + 1) % block_size:
            request.land(new)
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
    """Append the tokens that a step produced, and publish the completed blocks of decode requests.

    The completed blocks of prefill requests must have been published before.

    Args:
        kept: [requests][tokens] new tokens that each request keeps; at least one for a decode request.
    """
    num_drafted, num_kept = [len(request.drafts) for request in requests], [*map(len, kept)]
    for request, new, number in zip(requests, kept, num_kept, strict=True):
        request.append(new)
        if request.is_prefilling:
            cache.advance(request, request.scheduled)
            continue
        cache.publish(request, number)
        cache.advance(request, number)
    _note_drafts(requests, num_drafted, num_kept, cache, planner)


def advance_followed_requests(
    requests: Sequence[RunningRequest],
    kept: Sequence[tuple[int, ...]],
    cache: PrefixCache,
    planner: DraftPlanner | NoDrafts,
) -> None:
    """Like `advance_requests`, after a decode step whose next step is running with as many drafts."""
    counters, block_size = cache.counters, cache.block_size
    num_drafted, num_kept = [len(request.drafts) for request in requests], [*map(len, kept)]
    cache.draft_states.accept_followed([request.cursor for request in requests], num_kept)
    for request, new in zip(requests, kept, strict=True):
        request.land(new)
        if request.reserved or request.computed // block_size > request.num_published_blocks:
            cache.publish_followed(request)
    for (drafted, number), num_rows in Counter(zip(num_drafted, num_kept, strict=True)).items():
        counters.count_drafts(drafted, number - 1, num_rows)
        counters.decode_tokens_computed += (1 + drafted) * num_rows
    _note_drafts(requests, num_drafted, num_kept, cache, planner)


def _note_drafts(
    requests: Sequence[RunningRequest],
    num_drafted: Sequence[int],
    num_kept: Sequence[int],
    cache: PrefixCache,
    planner: DraftPlanner | NoDrafts,
) -> None:
    if planner.max_drafts:
        accepted = [number - 1 for number in num_kept]
        cache.counters.unlisted_tokens += planner.note(requests, num_drafted, accepted)
    planner.note_step(requests)
