"""Requests with grammars, and checks of their replies."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import jsonschema_rs

from tests.grammars.piece_tokenizer import END, PieceTokenizer
from tests.mcore.engine_runs import EngineRun, add_fields, cache_config, greedy, tiny_hybrid
from tests.mcore.noisy_drafter import NoisyDrafter

NUM_TOKENS = 300
TOKENIZER = PieceTokenizer()


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """A request with a grammar, or without one."""

    request_id: int
    prompt: tuple[int, ...]
    grammar: str
    seed: int
    temperature: float
    logits: Mapping[str, Any] | None = None

    def sampling(self, num_tokens: int = NUM_TOKENS) -> Any:
        """Return its parameters."""
        params = greedy(num_tokens, top_k=0, temperature=self.temperature, termination_id=END)
        if self.grammar:
            add_fields(params, grammar=self.grammar)
        if self.logits:
            add_fields(params, logits=self.logits)
        return params


def grammar_requests(grammars: Sequence[str], seed: int, first_id: int = 0) -> list[GrammarRequest]:
    """Return a request for each grammar; their prompts share prefixes."""
    random = Random(seed)
    shared = [random.randrange(256) for _ in range(70)]
    return [
        GrammarRequest(
            first_id + index,
            (
                *shared[: random.choice([5, 40, 64, 70])],
                *(random.randrange(256) for _ in range(random.randrange(1, 9))),
            ),
            grammar,
            random.randrange(2**40),
            random.choice([0.0, 0.7, 1.0]),
        )
        for index, grammar in enumerate(grammars)
    ]


def replies_to(
    requests: Sequence[GrammarRequest],
    known: Mapping[int, Sequence[int]] | None = None,
    *,
    num_tokens: int = NUM_TOKENS,
    **settings: Any,
) -> dict[int, list[int]]:
    """Return the tokens of all replies, with drafts from `known` texts that have some errors."""
    subject = tiny_hybrid(vocab_size=TOKENIZER.vocab_size)
    drafter = None
    if known is not None:
        texts = {request.request_id: [*request.prompt, *known[request.request_id]] for request in requests}
        drafter = NoisyDrafter(texts, accuracy=0.8, vocab_size=TOKENIZER.vocab_size, varies=True)
        settings = {"num_speculative_tokens": 4, **settings}
    config = cache_config(subject.sizes, **settings)
    run = EngineRun.start(subject, config, tokenizer=TOKENIZER, drafter=drafter)
    for request in requests:
        run.add(request.request_id, request.prompt, request.sampling(num_tokens), seed=request.seed)
    run.finish()
    run.assert_nothing_held()
    assert run.context.runner._changes.masks._requests == {}
    return {request.request_id: run.tokens(request.request_id) for request in requests}


def is_valid(schema: Any, tokens: Sequence[int]) -> bool:
    """Return True if a reply that ended by itself is a document of the schema."""
    assert tokens[-1] == END
    text = b"".join(TOKENIZER.bytes_of(token) or b"?" for token in tokens[:-1]).decode()
    return bool(jsonschema_rs.is_valid(schema, json.loads(text)))
