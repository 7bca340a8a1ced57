"""Drafts that no step verifies: they are compared with what rows write by themselves, which costs no step anything."""

from collections.abc import Iterator, Sequence

from ..policy.requests import RunningRequest


class WatchedDrafts:
    """The drafts that are being compared, one of a request at most."""

    def __init__(self) -> None:
        self._drafts: dict[int, tuple[int, tuple[int, ...]]] = {}  # request -> generated tokens before it, its tokens

    def watch(self, row: RunningRequest, tokens: tuple[int, ...]) -> None:
        """Compare a draft for the text that a row has now, in the place of an earlier one."""
        self._drafts[row.request_id] = len(row.generated), tokens

    def num_tokens(self, row: RunningRequest) -> int:
        """Return how many tokens the draft of a row has that is being compared; 0 if there is none."""
        return len(self._drafts[row.request_id][1]) if row.request_id in self._drafts else 0

    def ended(self, rows: Sequence[RunningRequest]) -> Iterator[tuple[int, int, int]]:
        """Yield the request, the tokens and the right ones of each draft that is wrong by now, or known to its end."""
        for row in rows:
            if row.request_id not in self._drafts:
                continue
            start, tokens = self._drafts[row.request_id]
            written = row.generated[start : start + len(tokens)]
            num_right = _num_equal(written, tokens)
            if num_right < len(written) or num_right == len(tokens):
                del self._drafts[row.request_id]
                yield row.request_id, len(tokens), num_right

    def forget(self, request_id: int) -> None:
        """Drop the draft of a request."""
        self._drafts.pop(request_id, None)

    def clear(self) -> None:
        """Drop all drafts."""
        self._drafts.clear()


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many leading tokens are the same."""
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return number
    return min(len(first), len(second))
