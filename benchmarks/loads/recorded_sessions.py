"""Recorded loads as conversations: prompt tokens are generated from hashes, and replies come from the served model."""

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

import numpy as np
from loads.conversation_load import Conversation, Tokens, Turn

from megatron_mamba_cache.planning.plan import block_texts
from megatron_mamba_cache.planning.recorded_load import ContentId, RecordedLoad, RecordedRequest


@dataclass(slots=True)
class _Chain:
    """A sequence of requests in which each prompt continues the text of the preceding request."""

    requests: list[RecordedRequest] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of tokens of the last prompt and its reply."""
        return self.requests[-1].prompt_len + self.requests[-1].reply_len


def recorded_conversations(load: RecordedLoad, vocab_size: int) -> list[Conversation]:
    """Return a load as conversations, in order of arrival; equal content has equal tokens.

    If a prompt continues the prompt and reply of an earlier request, it becomes the next turn of that conversation. The
    think time is the recorded time between the arrivals of the two requests. The new tokens are the part of the prompt
    after the reply. Any other request starts a new conversation, with its whole prompt as the first turn.
    """
    size, numbers = load.tokens_per_id, count()
    ends: dict[int, _Chain] = {}  # by hash of the last complete run of the last prompt
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
    """Return the tokens of the prompt from `start` on.

    An incomplete last run has no hash, so its tokens differ from those of all other requests.
    """
    first, num_complete = start // size, request.prompt_len // size
    runs = [_run(request.content[index], size, vocab_size) for index in range(first, num_complete)]
    runs.append(np.random.default_rng([1, number]).integers(vocab_size, size=request.prompt_len % size))
    return tuple(np.concatenate(runs)[start - first * size :].tolist())


@lru_cache(maxsize=1 << 16)
def _run(content: ContentId, size: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng([0, *content]).integers(vocab_size, size=size)
