"""A drafter that knows the text, and is wrong at a chosen rate."""

import random
from collections.abc import Mapping, Sequence

from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest


class NoisyDrafter:
    """Proposes the known next tokens, each replaced by a wrong one with probability 1 - accuracy.

    Args:
        texts: Request id -> prompt and reply.
        varies: Propose a random number of the requested tokens, or none.
    """

    def __init__(
        self,
        texts: Mapping[int, Sequence[int]],
        *,
        accuracy: float,
        vocab_size: int,
        seed: int = 0,
        varies: bool = False,
    ) -> None:
        self._texts = texts
        self._accuracy = accuracy
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._varies = varies
        self.forgotten: list[int] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request."""
        return [Draft(tuple(self._noisy(request))) for request in requests]

    def forget(self, request_id: int) -> None:
        """Note that the request left."""
        self.forgotten.append(request_id)

    def _noisy(self, request: DraftRequest) -> list[int]:
        count = self._random.randrange(request.num_tokens + 1) if self._varies else request.num_tokens
        known = list(self._texts.get(request.running.request_id, ())[request.running.length :][:count])
        known += [0] * (count - len(known))
        wrong = [(token + self._random.randrange(1, self._vocab_size)) % self._vocab_size for token in known]
        return [
            right if self._random.random() < self._accuracy else other
            for right, other in zip(known, wrong, strict=True)
        ]


def noisy_texts(
    texts: Mapping[int, Sequence[int]], *, accuracy: float, vocab_size: int, seed: int = 0
) -> dict[int, list[int]]:
    """Return texts in which each token is replaced by a wrong one with probability 1 - accuracy."""
    draw = random.Random(seed)
    return {
        request_id: [
            token if draw.random() < accuracy else (token + draw.randrange(1, vocab_size)) % vocab_size
            for token in text
        ]
        for request_id, text in texts.items()
    }
