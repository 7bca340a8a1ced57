"""The drafter protocol: a drafter proposes the next tokens of requests, and a verify step keeps the accepted ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..policy.requests import RunningRequest


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request that drafts are wanted for.

    Args:
        row: Read only; `row.tokens(0, row.length)` is its text so far. Do not keep it beyond the call.
        num_tokens: The most drafts that are useful, at least 1.
        hidden_state: [hidden] the model's last hidden state, after its final norm, that the newest token was chosen
            from, on the model's device; None for a drafter that is not a `ReadsHiddenStates`.
    """

    row: RunningRequest
    num_tokens: int
    hidden_state: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow a request's text; it may be empty.

    Args:
        tokens: At most as many as requested, each in [0, vocab).
        distributions: [len(tokens), vocab] floating-point probabilities that each token was drawn from, on the
            model's device; None where the tokens were chosen outright (a point mass).
    """

    tokens: tuple[int, ...] = ()
    distributions: Tensor | None = None

    def first(self, count: int) -> "Draft":
        """Return the first tokens, `count` at most."""
        if count >= len(self.tokens):
            return self
        return Draft(self.tokens[:count], None if self.distributions is None else self.distributions[:count])


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. Whatever it proposes, the output has the same distribution as without it.

    That holds while a draft does not depend on the random numbers that verify it. A drafter that draws its tokens
    therefore uses its own random numbers, and returns the exact distributions that it drew from. On several ranks each
    rank runs its drafter, and all must propose the same tokens.

    A drafter may keep what it knows about a request between calls. A request's text only grows from one call to the
    next, by any number of tokens, until it is forgotten.
    """

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request, in order; an empty draft where nothing is worth proposing.

        There is at most one for each running request. An error costs the step its drafts; it must leave the drafter
        usable.
        """

    def forget(self, request_id: int) -> None:
        """Drop what is kept about a request that left; an unknown one is ignored.

        A request that was evicted is forgotten too, and may later start again with the same text.
        """


@runtime_checkable
class HasVocabulary(Protocol):
    """A drafter, such as a draft model, that can propose only for models with its own vocabulary."""

    @property
    def vocab_size(self) -> int:
        """Width of its distributions, padding included."""


@runtime_checkable
class ReadsHiddenStates(Protocol):
    """A drafter, such as a multi-token-prediction head, that drafts from the model's hidden states."""

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states that it reads; the model's."""


@runtime_checkable
class TakesTime(Protocol):
    """A drafter that knows how long its proposals take: a draft model so long that a step may be faster without them.

    One that says 0 may be asked in any step, also where its drafts are not verified but only compared with what the
    model writes. Another's drafts are tried in a step now and then.
    """

    def draft_seconds(self, num_rows: int, num_drafts: int) -> float:
        """Return about how long it takes to propose for some rows, `num_drafts` at most each; the same on all ranks."""


@runtime_checkable
class CompilesKernels(Protocol):
    """A drafter, such as a draft model, whose first proposals would wait for kernels to be compiled."""

    def warmup(self) -> None:
        """Compile them all before the first request; nothing else changes."""


@runtime_checkable
class CapturesGraphs(Protocol):
    """A drafter, such as a draft model, with CUDA graphs; all ranks that share a model call each method together."""

    @property
    def wants_graphs(self) -> bool:
        """True when the settings ask for graphs that were dropped; the engine then calls `capture` before its step."""

    def capture(self) -> None:
        """Capture the graphs again, or do without for good."""

    def check_weights(self) -> None:
        """Drop graphs that read weights where these no longer are; an engine that is flushed or resumes calls it."""

    def drop_graphs(self) -> None:
        """Drop all graphs, since the engine is closed; an engine that steps has them captured again."""
