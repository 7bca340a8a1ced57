"""A drafter that copies what followed an earlier occurrence of the text's end, in the prompt or in the output."""

from collections.abc import Sequence

from ..policy.requests import RunningRequest
from .drafter import Draft, DraftRequest
from .suffix_index import SuffixIndex

_NUM_CHECKED = 8


class PromptLookupDrafter:
    """Draft the tokens that followed the longest earlier occurrence of a request's last tokens.

    It needs no model, and pays where the output repeats its prompt or itself: edits, quotes, code, lists.

    Args:
        min_match: The fewest last tokens that must have occurred before.
        max_match: The most that are compared; longer matches count as this long. Among equals the most recent wins.
        max_candidates: Earlier occurrences that are compared, the most recent ones.

    Raises:
        ValueError: Unless 1 <= min_match <= max_match and 1 <= max_candidates.
    """

    def __init__(self, min_match: int = 2, max_match: int = 32, max_candidates: int = 16) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"need 1 <= min_match <= max_match, found min_match {min_match}, max_match {max_match}")
        if max_candidates < 1:
            raise ValueError(f"max_candidates must be at least 1, found {max_candidates}")
        self._min_match = min_match
        self._max_match = max_match
        self._max_candidates = max_candidates
        self._indices: dict[int, SuffixIndex] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return a copied draft for each request, in order, empty where the text's end is new; see `Drafter`."""
        return [Draft(self._current_index(request.row).continuation(request.num_tokens)) for request in requests]

    def draft_seconds(self, num_rows: int, num_drafts: int) -> float:
        """See `TakesTime`: none, next to a step."""
        return 0.0

    def forget(self, request_id: int) -> None:
        """Free the index of a request; an unknown one is ignored."""
        self._indices.pop(request_id, None)

    def _current_index(self, row: RunningRequest) -> SuffixIndex:
        """Return the up-to-date index of a request's text; a different text gets a new index."""
        index = self._indices.get(row.request_id)
        if index is None or not _continues(index, row):
            index = SuffixIndex(self._min_match, self._max_match, self._max_candidates)
            self._indices[row.request_id] = index
        if len(index) < row.length:
            index.extend(row.tokens(len(index), row.length))
        return index


def _continues(index: SuffixIndex, row: RunningRequest) -> bool:
    """Return whether a request's text begins with the index's, judged by its last tokens; a shorter text does not."""
    last = index.last_tokens(_NUM_CHECKED)
    return list(row.tokens(len(index) - len(last), len(index))) == last
