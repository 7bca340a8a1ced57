"""What a finished step changes of its rows: tokens they keep, what of them is published, what the planner learns."""

from collections.abc import Sequence

from ..policy.prefix_cache import PrefixCache
from ..policy.requests import KeptTokens, RunningRequest
from .draft_planner import DraftPlanner, NoDrafts


def advance_rows(
    rows: Sequence[RunningRequest], kept: Sequence[KeptTokens], cache: PrefixCache, planner: DraftPlanner | NoDrafts
) -> None:
    """Advance the rows of a step by what they keep; prompts are published already, what was generated is now.

    Args:
        kept: Of each row, in order; at least one token of a row that decodes.
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
