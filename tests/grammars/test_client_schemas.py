"""Schemas of the kinds that clients send: each is held in every reply, or refused in one line before the reply begins."""

import json
from random import Random
from typing import Any

import jsonschema_rs
import pytest

from megatron_mamba_cache.grammars import forms
from megatron_mamba_cache.grammars.compiler import Grammars
from tests.grammars.client_schemas import mcp_schema, zod_3_schema, zod_4_schema
from tests.grammars.piece_tokenizer import PieceTokenizer
from tests.grammars.pydantic_schemas import random_model
from tests.grammars.random_replies import random_reply

TOKENIZER = PieceTokenizer()
MAKERS = {
    "mcp": (mcp_schema, 100),
    "zod 3": (zod_3_schema, 50),
    "zod 4": (zod_4_schema, 50),
    "pydantic": (lambda random: random_model(random).model_json_schema(), 100),
}
REASONS = ("uniqueItems", "looks ahead or behind", "oneOf", "no JSON value", "no value is allowed")
LARGEST = 1e308
LIBRARY_WORDS = ("x-guidance", "coerce", "llguidance", "Unimplemented", "Unsatisfiable", "\n")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    found = Grammars(TOKENIZER.vocab_size)
    found.read(TOKENIZER)
    return found


def value_of(text: str) -> Any:
    """Return a JSON text's value; numbers beyond float64 become its largest ones, which no bound of these excludes."""
    return json.loads(text, parse_float=lambda digits: max(-LARGEST, min(LARGEST, float(digits))))


def check_held(schema: dict[str, Any], grammars: Grammars, seed: int) -> bool:
    """Check that a schema is held in 3 replies, or refused by name; return whether it is held."""
    grammar = forms.json_grammar(schema).text
    fault = grammars.fault_of(grammar)
    if fault is not None:
        assert any(reason in fault for reason in REASONS) and not any(word in fault for word in LIBRARY_WORDS), fault
        return False
    validator = jsonschema_rs.validator_for(schema, validate_formats='"time"' not in json.dumps(schema))
    for number in range(3):
        random = Random(f"{seed} {number}")
        reply = random_reply(grammars.matcher(grammar), random, TOKENIZER, random.choice([0, 30, 120]))
        validator.validate(value_of(reply))
    return True


@pytest.mark.parametrize("kind", MAKERS)
def test_schemas_of_clients_are_held_or_refused_before_the_reply(kind: str, grammars: Grammars) -> None:
    check_many(kind, 5, grammars)


@pytest.mark.long
@pytest.mark.parametrize("kind", MAKERS)
def test_300_schemas_of_clients_are_held_or_refused_before_the_reply(kind: str, grammars: Grammars) -> None:
    check_many(kind, 1, grammars)


def check_many(kind: str, one_of: int, grammars: Grammars) -> None:
    maker, count = MAKERS[kind]
    seeds = range(0, count, one_of)
    num_held = 0
    for seed in seeds:
        schema = maker(Random(f"{kind} {seed}"))
        try:
            num_held += check_held(schema, grammars, seed)
        except Exception as error:
            error.add_note(f"{kind} {seed}: {json.dumps(schema, ensure_ascii=False)}")
            raise
    print(f"{kind}: {num_held} of {len(seeds)} held")
    assert num_held > 0.6 * len(seeds)
