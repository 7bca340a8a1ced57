"""Advance the rows of a step that lands: add the tokens they keep, publish them, and inform the planner."""

from collections.abc import Sequence

from torch import Tensor

from ..policy.prefix_cache import PrefixCache
from ..policy.requests import RunningRequest
from .draft_planner import DraftPlanner, NoDrafts


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


def advance_one_token_rows(
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


def advance_rows(
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
