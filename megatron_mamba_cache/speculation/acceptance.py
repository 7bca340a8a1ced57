"""How likely the next draft is right, learned from those that were verified or compared with what requests write."""

import math
from collections.abc import Iterator, Sequence

from ..policy.requests import RunningRequest

OPTIMISM = 0.5
"""Standard errors that an estimate is taken to be better than it is."""
REQUEST_WINDOW = 32
"""Drafts of a request that its estimate reaches back."""
DRAFTER_WINDOW = 128
"""Drafts of all requests that the estimate for a new one reaches back."""


class Acceptance:
    """The chance that a draft is right if those before it in its step are; older drafts count less and less.

    Drafts behind a wrong one were not tried: a step that accepts two of four tried three.

    Args:
        window: Drafts that the estimate reaches back, more than 1.
        weight: Drafts that what was expected before the first one counts for.
    """

    __slots__ = ("_keep", "_right", "_tried", "_weight")

    def __init__(self, window: int, weight: float) -> None:
        self._keep = 1 - 1 / window
        self._weight = weight
        self._right = self._tried = 0.0

    def is_known(self, num_tried: int, num_wrong: int) -> bool:
        """Return whether the estimate rests on so many drafts, or on so many that were wrong."""
        return self._tried >= num_tried or self._tried - self._right >= num_wrong

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a step.

        Args:
            num_drafted: Drafts that were verified; 0 teaches nothing.
            num_accepted: How many of them were accepted; the base token does not count.

        Raises:
            ValueError: If more were accepted than drafted, or a number is negative.
        """
        if not 0 <= num_accepted <= num_drafted:
            raise ValueError(f"need 0 <= num_accepted <= num_drafted, found {num_accepted} of {num_drafted}")
        num_tried = min(num_accepted + 1, num_drafted)
        kept = self._keep**num_tried
        self._right = kept * self._right + num_accepted
        self._tried = kept * self._tried + num_tried

    def chance(self, expected: float) -> float:
        """Return the estimate, between 0 and 1.

        Args:
            expected: The chance before the first draft.
        """
        return (self._right + self._weight * expected) / (self._tried + self._weight)

    def hoped(self, expected: float) -> float:
        """Return the estimate and part of its error: what is hardly known is worth a try, and bad luck ends nothing."""
        chance = self.chance(expected)
        error = math.sqrt(max(chance * (1 - chance), 0.0) / (self._tried + self._weight + 1))
        return min(chance + OPTIMISM * error, 1.0)


class ShadowDrafts:
    """Drafts that no step verifies, one of a request at most: comparing them with what requests write costs no step."""

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
