"""On a rank: requests with grammars, penalties and biases, by a model that ranks share."""

from dataclasses import replace
from random import Random

from megatron_mamba_cache.grammars import forms
from tests.distributed.rank_models import Layout, parallel
from tests.grammars.random_schemas import random_schema
from tests.mcore.test_grammars import END, is_valid, replies_to, wishes_for

NUM_REQUESTS = 12
LOGITS = {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": [[65, 1.5], [66, -3.0]], "min_p": 0.02}


def replies(layout: Layout) -> dict[int, list[int]]:
    """Return the tokens of all replies, which are the same here with drafts and without."""
    schemas = [random_schema(Random(seed)) for seed in range(NUM_REQUESTS)]
    grammars = [forms.json_grammar(schema).text if seed % 3 else "" for seed, schema in enumerate(schemas)]
    wishes = [replace(wish, logits=None if wish.request_id % 2 else LOGITS) for wish in wishes_for(grammars, seed=5)]
    with parallel(layout):
        plain = replies_to(wishes, num_tokens=120)
        drafted = replies_to(wishes, plain, num_tokens=120)
    assert drafted == plain
    for number, schema in enumerate(schemas):
        if number % 3 and plain[number][-1] == END:
            assert is_valid(schema, plain[number]), (schema, plain[number])
    return plain
