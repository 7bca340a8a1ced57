"""Drafters that know the replies: always correct, never correct, or correct with a given probability."""

import random
from collections.abc import Mapping, Sequence

from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest


class RightDrafter:
    """Drafter that proposes the tokens of the recorded replies.

    Args:
        replies: The tokens that will be generated, by request id.
    """

    def __init__(self, replies: Mapping[int, Sequence[int]]) -> None:
        self._replies = replies

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the requested number of draft tokens per request, or all remaining tokens if there are fewer."""
        return [Draft(tuple(self._known(request))) for request in requests]

    def forget(self, request_id: int) -> None:
        """Do nothing: this drafter keeps no state per request."""

    def _known(self, request: DraftRequest) -> Sequence[int]:
        return self._replies[request.running.request_id][len(request.running.generated) :][: request.num_tokens]


class ChanceDrafter:
    """Drafter that proposes each token of the recorded replies with a given probability, and a wrong token otherwise.

    Attributes:
        replies: The tokens that will be generated, by index of the request in its run.
        chance: Probability that a draft token is correct.
    """

    def __init__(self, vocab_size: int, run_length: int) -> None:
        self.replies: Mapping[int, Sequence[int]] = {}
        self.chance = 0.0
        self._vocab_size, self._run_length = vocab_size, run_length
        self._rng = random.Random(1)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the requested number of draft tokens per request, or all remaining tokens if there are fewer."""
        return [Draft(tuple(map(self._token, self._known(request)))) for request in requests]

    def whole_draft(self, request_id: int) -> list[int]:
        """Return a draft of the whole reply to a request; empty if the reply is not known."""
        return [self._token(right) for right in self.replies.get(request_id % self._run_length, ())]

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        """Return 0: as with prompt lookup, drafting takes no time."""
        return 0.0

    def forget(self, request_id: int) -> None:
        """Do nothing: this drafter keeps no state per request."""

    def _known(self, request: DraftRequest) -> Sequence[int]:
        reply = self.replies.get(request.running.request_id % self._run_length, ())
        return reply[len(request.running.generated) :][: request.num_tokens]

    def _token(self, right: int) -> int:
        return right if self._rng.random() < self.chance else (right + 1) % self._vocab_size


class WrongDrafter(RightDrafter):
    """Drafter that adds one to each token of the recorded replies, so that every draft is rejected."""

    def __init__(self, replies: Mapping[int, Sequence[int]], vocab_size: int) -> None:
        super().__init__(replies)
        self._vocab_size = vocab_size

    def _known(self, request: DraftRequest) -> Sequence[int]:
        return [(token + 1) % self._vocab_size for token in super()._known(request)]
