"""Protocols for drafters, which propose the next tokens of requests; a step then verifies the proposals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..policy.requests import RunningRequest


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A running request and the number of tokens that the drafter may propose for it.

    Args:
        running: The running request, read-only; `running.tokens(0, running.length)` is its text so far. The drafter
            must not keep a reference after the call.
        num_tokens: Maximum number of draft tokens, at least 1.
        hidden_state: [hidden] on the model's device: the hidden state after the final norm from which the newest token
            was sampled. None unless the drafter implements `ReadsHiddenStates`.
    """

    running: RunningRequest
    num_tokens: int
    hidden_state: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow a request's text; may be empty.

    Args:
        tokens: At most `num_tokens` token ids in [0, vocab).
        distributions: [len(tokens), vocab] floating-point probabilities from which the tokens were sampled, on the
            model's device; None if the tokens were chosen deterministically (a point mass).
    """

    tokens: tuple[int, ...] = ()
    distributions: Tensor | None = None

    def first(self, count: int) -> "Draft":
        """Return a draft of the first `count` tokens, or of all if there are fewer."""
        if count >= len(self.tokens):
            return self
        return Draft(self.tokens[:count], None if self.distributions is None else self.distributions[:count])


@runtime_checkable
class Drafter(Protocol):
    """Interface of drafters, which propose draft tokens. Proposals never change the distribution of the output.

    Proposals must not depend on the random numbers used for verification: a drafter that samples uses its own random
    numbers, and returns the exact distributions from which it sampled. Each rank runs its own drafter, and all ranks
    must propose the same tokens. Until `forget` is called for a request, its text only grows between calls.
    """

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request, in order; a draft is empty if there is no good proposal.

        Each request occurs at most once. If the call raises, the step runs without drafts; later calls must still work.
        """

    def forget(self, request_id: int) -> None:
        """Drop the data of a request that has left the engine but may return; do nothing for an unknown request."""


@runtime_checkable
class HasVocabulary(Protocol):
    """A drafter, such as a draft model, whose vocabulary size must equal the model's."""

    @property
    def vocab_size(self) -> int:
        """Size of the drafter's vocabulary, including padding."""


@runtime_checkable
class ReadsHiddenStates(Protocol):
    """A drafter, such as Medusa heads, that reads the hidden state from which a request's newest token was sampled."""

    @property
    def hidden_size(self) -> int:
        """Size of the model's hidden states."""


@runtime_checkable
class UsesModelMemory(Protocol):
    """A drafter, such as a multi-token-prediction head, whose keys and values are in the KV blocks of the model.

    Drafts of a request must fit in its blocks, because a draft is written there before it is proposed.
    """

    @property
    def mtp_chain(self) -> Any:
        """The `MTPChain`, which in each step writes keys and values into further layers of the blocks.

        None on a pipeline stage without the layers.
        """


@runtime_checkable
class DraftsTogether(Protocol):
    """A drafter whose expert-parallel ranks may exchange tokens while they draft, so that all must draft together."""

    @property
    def exchanges_tokens(self) -> bool:
        """True if the ranks exchange tokens; otherwise the other methods do nothing."""

    def agree(self, num_requests: int, num_drafts: int) -> None:
        """Set the shape in which all ranks draft next, once: in `propose` or in `take_part`. `num_drafts` may be 0."""

    def take_part(self) -> None:
        """Draft for padding, unless `propose` has returned since `agree`."""


class DraftsAlone:
    """Null object for drafters whose ranks exchange no tokens."""

    exchanges_tokens = False

    def agree(self, num_requests: int, num_drafts: int) -> None:
        """Do nothing."""

    def take_part(self) -> None:
        """Do nothing."""


@runtime_checkable
class FollowsSteps(Protocol):
    """A drafter that can draft on the device from the outcome of a captured step, before the host reads it."""

    def can_follow(self, graph: Any) -> bool:
        """Return whether the drafts after steps of this graph have been captured."""

    def follow(self, graph: Any, requests: Sequence[RunningRequest]) -> None:
        """Launch the drafts after the running step of these requests, and complete the next step with `follow_step`.

        The next step has as many drafts as the running step, and has been sent to the device.
        """


@runtime_checkable
class TakesTime(Protocol):
    """A drafter that estimates how long its proposals take, so that it is called only if drafting saves time.

    A drafter whose estimate is 0 may be called after any step to make shadow drafts. Other drafters are called in
    occasional trial steps.
    """

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        """Return the estimated seconds to propose up to `num_drafts` tokens per request; must be equal on all ranks."""


@runtime_checkable
class CompilesKernels(Protocol):
    """A drafter, such as a draft model, with kernels that must be compiled before the first proposal."""

    def warmup(self) -> None:
        """Compile all kernels, without other effects; called before the first request."""


@runtime_checkable
class HasShortList(Protocol):
    """A drafter that drafts only some tokens of the vocabulary."""

    def num_unlisted(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens the drafter may not draft."""


@runtime_checkable
class CapturesGraphs(Protocol):
    """A drafter, such as a draft model, with CUDA graphs. Each method is called on all ranks of a model together."""

    @property
    def wants_graphs(self) -> bool:
        """True if graphs are configured but not captured; the engine then calls `capture` before its next step."""

    def capture(self) -> None:
        """Capture the graphs, or disable them permanently if that is not possible."""

    def check_weights(self) -> None:
        """Drop the graphs if the weights have new addresses; called when the engine is flushed or resumed."""

    def drop_graphs(self) -> None:
        """Drop all graphs when the engine is closed. They are captured again if it runs another step."""
