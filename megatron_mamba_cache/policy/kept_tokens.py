"""Tokens that a step appends to its requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class KeptTokens(NamedTuple):
    """Tokens that a request keeps, none during prefill, and whether they end the request."""

    tokens: tuple[int, ...] = ()
    ends: bool = False


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens that each request of a step keeps.

    Args:
        tokens: [requests] new tokens of each, in order: at least one for a request that decodes, none in mid-prefill.
        ended: Indices of the requests that end with them.
    """

    tokens: Sequence[tuple[int, ...]]
    ended: Sequence[int] = ()

    @staticmethod
    def of(kept: Sequence[KeptTokens]) -> "StepTokens":
        """Collect the tokens that each request keeps."""
        return StepTokens([new.tokens for new in kept], [index for index, new in enumerate(kept) if new.ends])
