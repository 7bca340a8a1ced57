"""Recorded loads as conversations: tokens are generated from hashes, and replies are the served model's own."""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

import numpy as np
from loads.conversation_load import Conversation, Tokens, Turn

from megatron_mamba_cache.planning.plan import block_texts
from megatron_mamba_cache.planning.recorded_load import ContentId, RecordedLoad, RecordedRequest


@dataclass(slots=True)
class _Chain:
    """Requests, each of which continues the previous one's text."""

    requests: list[RecordedRequest] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of the last prompt and its reply."""
        return self.requests[-1].prompt_len + self.requests[-1].reply_len


def recorded_conversations(load: RecordedLoad, vocab_size: int) -> list[Conversation]:
    """Return a load as conversations, in order of arrival; equal content has equal tokens.

    A request whose prompt continues another's prompt and reply is the next turn of its conversation. It arrives as
    long after that reply as it was recorded after that request; its new tokens are what its prompt has after the
    reply. Every other request begins a conversation, whose first turn is its whole prompt.
    """
    size, numbers = load.tokens_per_id, count()
    ends: dict[int, _Chain] = {}  # by the key of the last complete run of a conversation's last prompt
    chains: list[_Chain] = []
    for request, text in zip(load.requests, block_texts(load, size), strict=True):
        keys = text.keys[: request.prompt_len // size]
        continued = next((key for key in reversed(keys) if key in ends and ends[key].length < request.prompt_len), None)
        if continued is None:
            chain, known, think_s = _Chain(), 0, 0.0
            chains.append(chain)
        else:
            chain = ends.pop(continued)
            known, think_s = chain.length, request.arrival_s - chain.requests[-1].arrival_s
        tokens = _tokens(request, known, size, vocab_size, next(numbers))
        chain.requests.append(request)
        chain.turns.append(Turn(think_s, tokens, max(1, request.reply_len)))
        if keys:
            ends[keys[-1]] = chain
    return [Conversation(chain.requests[0].arrival_s, (), tuple(chain.turns)) for chain in chains]


def _tokens(request: RecordedRequest, start: int, size: int, vocab_size: int, number: int) -> Tokens:
    """Return the prompt's tokens from `start` on; a last run without a hash equals no other request's."""
    first, num_complete = start // size, request.prompt_len // size
    runs = [_run(request.content[index], size, vocab_size) for index in range(first, num_complete)]
    runs.append(np.random.default_rng([1, number]).integers(vocab_size, size=request.prompt_len % size))
    return tuple(np.concatenate(runs)[start - first * size :].tolist())


@lru_cache(maxsize=1 << 16)
def _run(content: ContentId, size: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng([0, *content]).integers(vocab_size, size=size)
