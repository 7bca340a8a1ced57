"""Drafters that know the replies: one is always right, one always wrong, one right by chance."""

import random
from collections.abc import Mapping, Sequence

from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest


class RightDrafter:
    """Proposes the tokens of the recorded reply.

    Args:
        replies: Request id -> the tokens that will be generated.
    """

    def __init__(self, replies: Mapping[int, Sequence[int]]) -> None:
        self._replies = replies

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the requested number of tokens, or all that are left."""
        return [Draft(tuple(self._known(request))) for request in requests]

    def forget(self, request_id: int) -> None:
        """Do nothing."""

    def _known(self, request: DraftRequest) -> Sequence[int]:
        return self._replies[request.running.request_id][len(request.running.generated) :][: request.num_tokens]


class ChanceDrafter:
    """Proposes each token of the recorded replies with some probability, and otherwise another one.

    Attributes:
        replies: The tokens that will be generated, by the request's number in its run.
        chance: Of each token being right.
    """

    def __init__(self, vocab_size: int, run_length: int) -> None:
        self.replies: Mapping[int, Sequence[int]] = {}
        self.chance = 0.0
        self._vocab_size, self._run_length = vocab_size, run_length
        self._rng = random.Random(1)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the requested number of tokens, or all that are left."""
        return [Draft(tuple(map(self._token, self._known(request)))) for request in requests]

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        """Return 0, like prompt lookup."""
        return 0.0

    def forget(self, request_id: int) -> None:
        """Do nothing."""

    def _known(self, request: DraftRequest) -> Sequence[int]:
        reply = self.replies.get(request.running.request_id % self._run_length, ())
        return reply[len(request.running.generated) :][: request.num_tokens]

    def _token(self, right: int) -> int:
        return right if self._rng.random() < self.chance else (right + 1) % self._vocab_size


class WrongDrafter(RightDrafter):
    """Proposes each token plus one, which is always wrong."""

    def __init__(self, replies: Mapping[int, Sequence[int]], vocab_size: int) -> None:
        super().__init__(replies)
        self._vocab_size = vocab_size

    def _known(self, request: DraftRequest) -> Sequence[int]:
        return [(token + 1) % self._vocab_size for token in super()._known(request)]
