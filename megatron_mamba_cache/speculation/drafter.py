"""The drafter protocol: a drafter proposes the next tokens of requests, and a verify step keeps the accepted ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..policy.requests import RunningRequest


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request to draft for.

    Args:
        running: Read only; `running.tokens(0, running.length)` is its text so far. Do not keep it after the call.
        num_tokens: The most drafts that are useful, at least 1.
        hidden_state: [hidden] on the model's device: its last hidden state after the final norm, which the newest token
            was sampled from. None unless the drafter is a `ReadsHiddenStates`.
    """

    running: RunningRequest
    num_tokens: int
    hidden_state: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow a request's text; may be empty.

    Args:
        tokens: At most as many as requested, each in [0, vocab).
        distributions: [len(tokens), vocab] floating-point probabilities that each token was sampled from, on the
            model's device; None for deterministic drafts (a point mass).
    """

    tokens: tuple[int, ...] = ()
    distributions: Tensor | None = None

    def first(self, count: int) -> "Draft":
        """Return the first `count` tokens, or all."""
        if count >= len(self.tokens):
            return self
        return Draft(self.tokens[:count], None if self.distributions is None else self.distributions[:count])


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens; never changes the distribution of the output.

    A draft must not depend on the random numbers that verify it: a drafter that samples uses its own, and returns the
    exact distributions that it sampled from. Each rank runs its own drafter, and all must propose the same tokens.
    Between two calls a request's text only grows, by any number of tokens, until the request is forgotten.
    """

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request, in order; empty if there is no good proposal.

        A request occurs at most once. If it raises, the step runs without drafts; the drafter must stay usable.
        """

    def forget(self, request_id: int) -> None:
        """Drop the state of a request that left, and may return; ignore an unknown one."""


@runtime_checkable
class HasVocabulary(Protocol):
    """A drafter, such as a draft model, that needs the model to have the same vocabulary."""

    @property
    def vocab_size(self) -> int:
        """Width of its distributions, padding included."""


@runtime_checkable
class ReadsHiddenStates(Protocol):
    """A drafter, such as a multi-token-prediction head, that reads the model's hidden states."""

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states; the model's."""


@runtime_checkable
class TakesTime(Protocol):
    """A drafter that estimates the time of its proposals, so that slow ones are used only if they pay.

    An estimate of 0 allows calls in any step, also for shadow drafts. Other drafters are tried from time to time.
    """

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        """Estimate the seconds to propose up to `num_drafts` tokens for each request; the same on all ranks."""


@runtime_checkable
class CompilesKernels(Protocol):
    """A drafter, such as a draft model, with kernels to compile before the first proposal."""

    def warmup(self) -> None:
        """Compile all kernels before the first request, without other effects."""


@runtime_checkable
class CapturesGraphs(Protocol):
    """A drafter, such as a draft model, with CUDA graphs; the ranks of a model make each call together."""

    @property
    def wants_graphs(self) -> bool:
        """True when graphs are configured but dropped; the engine then calls `capture` before its step."""

    def capture(self) -> None:
        """Capture the graphs again, or give up for good."""

    def check_weights(self) -> None:
        """Drop graphs if the weights have moved; called when the engine is flushed or resumed."""

    def drop_graphs(self) -> None:
        """Drop all graphs because the engine is closed; they are captured again if it steps."""
