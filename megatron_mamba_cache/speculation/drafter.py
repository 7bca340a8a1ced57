"""What a drafter is: it proposes the next tokens of requests, and a verify step keeps those that hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..policy.requests import RunningRequest


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request that drafts are wanted for.

    Args:
        row: Read only; `row.tokens(0, row.length)` is its text so far. Not to be kept beyond the call.
        num_tokens: The most drafts that are useful, at least 1.
        hidden_state: [hidden] the model's last hidden state, after its final norm, that the newest token was chosen by,
            on the model's device; None for a drafter that is no `ReadsHiddenStates`.
    """

    row: RunningRequest
    num_tokens: int
    hidden_state: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow a request's text; it may be empty.

    Args:
        tokens: At most as many as wished, each in [0, vocab).
        distributions: [len(tokens), vocab] floating-point probabilities that each token was really drawn from, on the
            model's device; None where the tokens were chosen outright (a point mass).
    """

    tokens: tuple[int, ...] = ()
    distributions: Tensor | None = None


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens; whatever it proposes, the text that comes out is distributed as without it.

    That holds while a draft does not depend on the random numbers that verify it. A drafter that draws its tokens
    therefore uses numbers of its own, and returns the very distributions that it drew from. On several ranks each
    rank runs its drafter, and all must propose the same tokens.

    A drafter may keep what it knows of a request between calls. A request's text only grows from one call to the
    next, by any number of tokens, until it is forgotten.
    """

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each wish, in order; an empty draft where nothing is worth proposing.

        The wishes name each request once, and not every running request. An error fails the step; it must leave the
        drafter usable.
        """
        ...

    def forget(self, request_id: int) -> None:
        """Drop what is kept of a request that left; nothing if it is unknown.

        A request that was evicted is forgotten too, and may later start again with the same text.
        """
        ...


@runtime_checkable
class HasVocabulary(Protocol):
    """A drafter that can propose for models of one vocabulary only, a draft model's."""

    @property
    def vocab_size(self) -> int:
        """Width of its distributions; padding counts."""
        ...


@runtime_checkable
class ReadsHiddenStates(Protocol):
    """A drafter, such as a multi-token-prediction head, that drafts from the model's hidden states."""

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that it reads; the model's."""
        ...


@runtime_checkable
class CompilesKernels(Protocol):
    """A drafter, such as a draft model, whose first proposals would wait for kernels to be compiled."""

    def warmup(self) -> None:
        """Compile them all before the first request; nothing else changes."""
        ...
