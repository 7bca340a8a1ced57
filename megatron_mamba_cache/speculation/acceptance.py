"""How likely the next draft is right, learned from those that were verified."""

import math

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
