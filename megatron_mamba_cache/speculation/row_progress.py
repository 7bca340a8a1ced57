"""Advance the rows of a finished step: add the tokens they keep, publish them, and inform the planner."""

from collections.abc import Sequence

from torch import Tensor

from ..metrics import CacheCounters
from ..policy.prefix_cache import PrefixCache
from ..policy.requests import KeptTokens, RunningRequest
from .draft_planner import DraftPlanner, NoDrafts


def note_hidden_states(
    rows: Sequence[RunningRequest],
    kept: Sequence[KeptTokens],
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
        if new.tokens:
            planner.note_hidden_state(row, hidden_states[start + len(new.tokens) - 1])


def advance_plain_rows(
    rows: Sequence[RunningRequest], tokens: Sequence[int], counters: CacheCounters, planner: DraftPlanner | NoDrafts
) -> None:
    """Advance rows that decoded one token each without drafts, reach no boundary and continue; see `advance_rows`."""
    for row, token in zip(rows, tokens, strict=True):
        row.generated.append(token)
        row.computed += 1
        row.scheduled = 0
    if planner.max_drafts:
        for row in rows:
            planner.note(row, 0, 0)
    counters.decode_rows += len(rows)
    counters.decode_tokens_computed += len(rows)


def advance_rows(
    rows: Sequence[RunningRequest], kept: Sequence[KeptTokens], cache: PrefixCache, planner: DraftPlanner | NoDrafts
) -> None:
    """Advance the rows of a step by what they keep, and publish generated tokens; prompts are published already.

    Args:
        kept: Each row's, in order; at least one token for a row that decodes.
    """
    for row, new in zip(rows, kept, strict=True):
        row.generated.extend(new.tokens)
        if row.is_prefilling:
            cache.advance(row, row.scheduled)
            continue
        num_kept = len(new.tokens)
        cache.publish(row, num_kept)
        planner.note(row, len(row.drafts), num_kept - 1)
        cache.advance(row, num_kept)
