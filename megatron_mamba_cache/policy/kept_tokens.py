"""Tokens that a step appends to its requests, and the routed experts of all tokens of a request that ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class KeptTokens(NamedTuple):
    """Tokens that a request keeps after a step; none in mid-prefill. `ends` is True if they end the request."""

    tokens: tuple[int, ...] = ()
    ends: bool = False


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens that each request keeps after a step.

    Args:
        tokens: [requests] new tokens of each request, in order; at least one after decoding, none in mid-prefill.
        ended: Indices of the requests that end with these tokens.
    """

    tokens: Sequence[tuple[int, ...]]
    ended: Sequence[int] = ()

    @staticmethod
    def of(kept: Sequence[KeptTokens]) -> "StepTokens":
        """Convert the kept tokens of each request, listed in the order of the requests."""
        return StepTokens([new.tokens for new in kept], [index for index, new in enumerate(kept) if new.ends])


class TokenRoutes(Protocol):
    """Routed experts of a request that ended; the copy to the host may still run."""

    def array(self) -> npt.NDArray[np.int16]:
        """Wait for the copy; return the experts, [tokens, MoE layers, experts per token], -1 where unknown."""
