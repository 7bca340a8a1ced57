"""Schedule the decode rows of a step with the drafts that fit, and advance them when the step lands."""

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
    rows: Sequence[RunningRequest],
    cache: PrefixCache,
    planner: DraftPlanner | NoDrafts,
    budget: int,
    holds_on_all_ranks: Callable[[bool], bool] = bool,
    allowed: Callable[[RunningRequest, Sequence[int]], Sequence[int]] = lambda _row, drafts: drafts,
) -> list[Tensor | None]:
    """Schedule every decoding row with its drafts; if drafting fails, the step continues without drafts.

    Args:
        budget: Tokens that the step may compute beyond one for each row; older rows' drafts go first.
        holds_on_all_ranks: Returns whether a condition holds on all ranks that share the model; every rank calls it.
            A rank whose drafter fails alone would otherwise plan a different step. By default there is one rank.
        allowed: Returns the leading drafts that a row's grammar allows.

    Returns:
        For each row the distributions, [drafts, vocab], that its drafts were drawn from, None if they were not drawn;
        empty where no drafts are planned.
    """
    if not planner.max_drafts:
        for row in rows:
            cache.schedule_decode(row)
        return []
    # The step yields one token more than it has drafts; none may exceed the request's limit.
    rooms = [max(0, min(planner.max_drafts, row.spec.max_len - row.length - 1)) for row in rows]
    rooms = [cache.draft_states.most_drafts(row.computed, room) for row, room in zip(rows, rooms, strict=True)]
    counts = planner.counts(rows, rooms, budget)
    limits = [DraftLimit(row, count) for row, count in zip(rows, counts, strict=True)]
    distributions: list[Tensor | None] = []
    for row, draft in zip(rows, _plan(limits, planner, cache.counters, holds_on_all_ranks), strict=True):
        cache.schedule_decode(row, allowed(row, draft.tokens))
        drawn_from = draft.distributions if row.drafts else None
        distributions.append(None if drawn_from is None else drawn_from[: len(row.drafts)])
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
    if count.bit_count() == 1:  # the first, second, fourth, ... time
        reason = "on another rank of the model" if failure is None else repr(failure)
        _LOG.warning("drafting failed %d times; steps continue without drafts: %s", count, reason)
    for entry in limits:
        planner.forget(entry.row.request_id)
    return none


def note_hidden_states(
    rows: Sequence[RunningRequest],
    kept: Sequence[tuple[int, ...]],
    starts: Sequence[int],
    hidden_states: Tensor,
    planner: DraftPlanner | NoDrafts,
) -> None:
    """Tell the planner the hidden state that each row's newest token was chosen from.

    Args:
        starts: [rows] Each row's first logits row.
        hidden_states: [logits, hidden].
    """
    for row, new, start in zip(rows, kept, starts, strict=False):
        if new:
            planner.note_hidden_state(row, hidden_states[start + len(new) - 1])


def advance_one_token_requests(
    rows: Sequence[RunningRequest],
    kept: Sequence[tuple[int, ...]],
    cache: PrefixCache,
    planner: DraftPlanner | NoDrafts,
) -> None:
    """Advance rows that decoded one token each without drafts, and publish the blocks that they complete.

    They may hold more already, for the step after: see `PrefixCache.reserve_ahead`.
    """
    block_size = cache.block_size
    for row, new in zip(rows, kept, strict=True):
        if (row.computed + 1) % block_size:
            row.land_token(new)
        else:
            row.append(new)
            cache.publish(row, 1)
            row.advance(1)
    planner.note_step(rows)
    cache.counters.decode_rows += len(rows)
    cache.counters.decode_tokens_computed += len(rows)


def advance_requests(
    rows: Sequence[RunningRequest],
    kept: Sequence[tuple[int, ...]],
    cache: PrefixCache,
    planner: DraftPlanner | NoDrafts,
) -> None:
    """Advance the rows of a step by what they keep, and publish generated tokens; prompts are published already.

    Args:
        kept: Each row's tokens, in order; at least one for a row that decodes.
    """
    for row, new in zip(rows, kept, strict=True):
        row.append(new)
        if row.is_prefilling:
            cache.advance(row, row.scheduled)
            continue
        num_kept = len(new)
        cache.publish(row, num_kept)
        planner.note(row, len(row.drafts), num_kept - 1)
        cache.advance(row, num_kept)
    planner.note_step(rows)
