"""Functions that run on a rank: requests with grammars, penalties and biases on a sharded model."""

from dataclasses import replace
from random import Random

from megatron_mamba_cache.grammars import forms, matching
from tests.distributed.rank_models import Layout, parallel
from tests.grammars.piece_tokenizer import END
from tests.grammars.random_schemas import random_schema
from tests.mcore import engine_runs
from tests.mcore.engine_runs import EngineRun, cache_config
from tests.mcore.grammar_runs import TOKENIZER, grammar_requests, is_valid, replies_to

NUM_REQUESTS = 12
LOGITS = {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": [[65, 1.5], [66, -3.0]], "min_p": 0.02}


def replies(layout: Layout) -> dict[int, list[int]]:
    """Return the tokens of all replies, asserting that drafts do not change them."""
    schemas = [random_schema(Random(seed)) for seed in range(NUM_REQUESTS)]
    grammars = [forms.json_grammar(schema).text if seed % 3 else "" for seed, schema in enumerate(schemas)]
    requests = [
        replace(request, logits=None if request.request_id % 2 else LOGITS)
        for request in grammar_requests(grammars, seed=5)
    ]
    with parallel(layout):
        plain = replies_to(requests, num_tokens=120)
        drafted = replies_to(requests, plain, num_tokens=120)
    assert drafted == plain
    for number, schema in enumerate(schemas):
        if number % 3 and plain[number][-1] == END:
            assert is_valid(schema, plain[number]), (schema, plain[number])
    return plain


def replies_despite_a_failure(layout: Layout, num_drafts: int) -> tuple[dict[int, list[int]], str]:
    """Return the tokens of requests next to one whose grammar becomes too complex, and that one's error."""
    matching._MOST_ITEMS = 500
    schema = {"type": "object", "properties": {f"p{number}": {} for number in range(200)}}
    grammars = ["", forms.json_grammar(schema).text, "", forms.json_grammar({"type": "boolean"}).text]
    requests = [replace(request, temperature=0.0) for request in grammar_requests(grammars, 4)]
    with parallel(layout):
        subject = engine_runs.hybrid(engine_runs.tiny_sizes(vocab_size=TOKENIZER.vocab_size))
        config = cache_config(subject.sizes, num_speculative_tokens=num_drafts)
        run = EngineRun.start(subject, replace(config, rank_digest_steps=1), tokenizer=TOKENIZER)
        for request in requests:
            run.add(request.request_id, request.prompt, request.sampling(20), seed=request.seed)
        run.finish()
        run.assert_nothing_held()
        tokens = {number: run.tokens(number) for number in (0, 2, 3)}
        return tokens, str(run.finished[1].events[0].payload)
