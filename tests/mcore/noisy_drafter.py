"""A drafter that knows the text, and is wrong as often as a test wants."""

import random
from collections.abc import Mapping, Sequence

from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest


class NoisyDrafter:
    """Proposes what is known to follow, each token replaced by a wrong one with probability 1 - accuracy.

    Args:
        texts: Request id -> prompt and reply.
        varies: Propose a random part of what is wished for, from nothing on.
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

    def propose(self, wishes: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each wish."""
        return [Draft(tuple(self._noisy(wish))) for wish in wishes]

    def forget(self, request_id: int) -> None:
        """Note that the request left."""
        self.forgotten.append(request_id)

    def _noisy(self, wish: DraftRequest) -> list[int]:
        count = self._random.randrange(wish.num_tokens + 1) if self._varies else wish.num_tokens
        known = list(self._texts[wish.row.request_id][wish.row.length :][:count])
        known += [0] * (count - len(known))
        wrong = [(token + self._random.randrange(1, self._vocab_size)) % self._vocab_size for token in known]
        return [
            right if self._random.random() < self._accuracy else other
            for right, other in zip(known, wrong, strict=True)
        ]
