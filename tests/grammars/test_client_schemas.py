"""Each client-like schema is either enforced in every reply, or refused before the reply with a one-line error."""

import json
from random import Random
from typing import Any

import jsonschema_rs
import pytest

from megatron_mamba_cache.grammars import forms
from megatron_mamba_cache.grammars.compiler import Grammars
from tests.grammars.client_schemas import LIBRARY_WORDS, MAKERS, REASONS
from tests.grammars.piece_tokenizer import PieceTokenizer
from tests.grammars.random_replies import random_reply

TOKENIZER = PieceTokenizer()


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    found = Grammars(TOKENIZER.vocab_size)
    found.read(TOKENIZER)
    return found


def check_held(schema: dict[str, Any], grammars: Grammars, seed: int) -> bool:
    """Check that 3 replies satisfy a schema, or that its error names a keyword; return True if it is enforced."""
    grammar = forms.json_grammar(schema).text
    error = grammars.error_of(grammar)
    if error is not None:
        assert any(reason in error for reason in REASONS) and not any(word in error for word in LIBRARY_WORDS), error
        return False
    validator = jsonschema_rs.validator_for(schema, validate_formats='"time"' not in json.dumps(schema))
    for number in range(3):
        random = Random(f"{seed} {number}")
        reply = random_reply(grammars.matcher(grammar), random, TOKENIZER, random.choice([0, 30, 120]))
        validator.validate(json.loads(reply))
    return True


def of(*required: str, is_open: bool = True, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return schema if is_open else {**schema, "additionalProperties": False}


ONE, TWO, TEXT = {"const": 1}, {"const": 2}, {"type": "string"}
ENDLESS = {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}
DEAD_ENDS: dict[str, dict[str, Any]] = {
    "pattern of a named property": {**of(xa=ONE, is_open=False), "patternProperties": {"^xa$": {"type": "integer"}}},
    "pattern of named ones elsewhere": {
        "allOf": [of("b", xa=ONE, b=TWO), {"patternProperties": {"^(xa|b)$": {}}, "additionalProperties": False}]
    },
    "pattern of a required property": {**of("n", is_open=False), "patternProperties": {"^n$": ONE}},
    "patterns of all names": {"type": "object", "patternProperties": {"": {"enum": []}}, "additionalProperties": ONE},
    "control characters": of("a", a={"enum": ["\x01", "b"]}),
    "endless alternative": {"anyOf": [ONE, {"$ref": "#/$defs/a"}], "$defs": ENDLESS},
    "endless property": {**of(a={"$ref": "#/$defs/a"}, is_open=False), "$defs": ENDLESS},
    "endless items": {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": ENDLESS},
}
LIFTED: dict[str, dict[str, Any]] = {
    "names of an enum": {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": TEXT},
    "names of a definition": {
        **{"type": "object", "propertyNames": {"$ref": "#/$defs/N"}, "additionalProperties": ONE, "required": ["a"]},
        "$defs": {"N": {"type": "string", "enum": ["a", "b"]}},
    },
    "names of a pattern": {**of("ab", ab=ONE, C=TWO), "propertyNames": {"pattern": "^[a-z]+$"}},
    "names of a length": {"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": ONE},
    "unique values": {"type": "array", "items": {"enum": ["a", "b", 1, 1.5]}, "uniqueItems": True, "minItems": 3},
    "some unique values": {"type": "array", "items": {"enum": [*range(9)]}, "uniqueItems": True, "maxItems": 3},
    "unique or null": {"type": ["array", "null"], "items": {"type": "boolean"}, "uniqueItems": True},
    "one of two properties": {**of(a=ONE, b=TWO, is_open=False), "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "one in the other": {"oneOf": [of("a", a=ONE), of("a", "b", a=ONE, b=TWO)]},
    "tags with defaults": {"oneOf": [of(k={"const": "a"}), of(k={"const": "b"}), of(k={"enum": ["c", "d"]})]},
    "tags of a recursion": {
        "$ref": "#/$defs/E",
        "$defs": {
            "E": {"oneOf": [{"$ref": "#/$defs/N"}, {"$ref": "#/$defs/A"}]},
            "N": of(k={"const": "n"}),
            "A": of("l", k={"const": "a"}, l={"$ref": "#/$defs/E"}),
        },
    },
    "ranges": {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4}]},
    "look ahead": {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{8,12}$"},
    "never": of("b", a={"not": {}}, b=ONE),
    "list of items": {"$schema": "http://json-schema.org/draft-07/schema#", "items": [ONE, TWO], "minItems": 2},
    "list of items, then texts": {
        **{"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "minItems": 2},
        **{"items": [ONE, {"type": "object"}], "additionalItems": TEXT},
    },
    "white space": of("a", "b", a={**TEXT, "pattern": r"^[\s-]{2}$"}, b={**TEXT, "pattern": r"^\S[^\S-]$"}),
    "signs of classes": {"type": "string", "pattern": r"^[[:&&,~~]{3}$"},
    "float32": {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
    "float64 above": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1.7976931348623157e308},
    "integers of floats": {"type": "integer", "minimum": -1e19, "maximum": 1e19},
    "one property at least": {**of(a=ONE, b=TWO, is_open=False), "minProperties": 1},
}


@pytest.mark.parametrize("name", [*DEAD_ENDS, *LIFTED])
def test_random_replies_end_and_satisfy_their_schema(name: str, grammars: Grammars) -> None:
    schema = {**DEAD_ENDS, **LIFTED}[name]
    validator = jsonschema_rs.validator_for(schema)
    grammar = forms.json_grammar(schema).text
    assert grammars.error_of(grammar) is None
    for seed in range(12):
        random = Random(seed)
        validator.validate(json.loads(random_reply(grammars.matcher(grammar), random, TOKENIZER, seed * 3)))


BAD = {"minItems": 3, "maxItems": 2}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unique texts": (of(a={"type": "array", "items": TEXT, "uniqueItems": True}), "properties.a: uniqueItems"),
    "many orders": (
        {"type": "array", "items": {"enum": [*range(9)]}, "uniqueItems": True},
        "uniqueItems with 9 values",
    ),
    "overlap": (of(a={"oneOf": [TEXT, {"const": "a"}]}), "properties.a: oneOf cannot be enforced"),
    "numbers overlap": (
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "alternatives 1 and 0 may allow the same value",
    ),
    "look-ahead": (of(a={"type": "string", "pattern": "^(?!x).*$"}), "properties.a: the pattern '^(?!x).*$' has"),
    "class of POSIX": ({"type": "string", "pattern": "^[[:alpha:]]$"}, "the pattern has '[:alpha:]', which"),
    "class of Java": (of(a={**TEXT, "pattern": "^[a-z&&[^b]]$"}), "properties.a: the pattern has '&&', which"),
    "an end inside": ({"type": "string", "pattern": "a$b"}, "the pattern /a$b/ has `^`, `$` or a word boundary"),
    "index": ({"anyOf": [ONE, {"$ref": f"#/anyOf/{'1' * 5000}"}]}, "$ref names"),
    "word ends": ({"type": "string", "pattern": r"\bfoo\b"}, "has lookahead or lookbehind"),
    "if": ({"anyOf": [{"if": TEXT, "then": False}]}, "anyOf.0: if cannot be enforced"),
    "bounds inside": (
        of("a", a={"type": "array", "minItems": 1, "items": of("b", b={"type": "array", **BAD})}),
        "properties.a.items.properties.b: no value is allowed: minItems (3)",
    ),
    "conflict": ({"allOf": [of("a", a={"type": "integer"}), of(a=TEXT)]}, "no value is allowed for a"),
    "nothing in common": ({"allOf": [{"enum": ["a"]}, {"enum": ["b"]}]}, "no "),
    "control character": (of("a", a={"const": "\x01"}), "properties.a: const has control characters"),
    "endless": (of("a", a={"$ref": "#"}), "references never end"),
    "never": (of("a", a={"not": {}}), "properties.a: no JSON value matches the schema"),
    "never within all": (of("a", a={"allOf": [TEXT, {"not": {}}]}), "properties.a.allOf.1: no JSON value"),
    "missing": (of(a={"$ref": "#/$defs/x"}), "$ref names #/$defs/x, which is not in the schema"),
    "wrong": (of(a={"type": "integer", "minimum": "3"}), "properties.a: minimum must be a number"),
    "far bound": (of(a={"type": "number", "minimum": 1e19}), "properties.a: minimum or maximum is beyond 2**63"),
    "farthest bound": ({"type": "integer", "exclusiveMinimum": int(1.7976931348623157e308)}, "no float64 satisfies"),
    "draft": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired cannot be enforced"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_schema_errors_name_the_location_and_no_llguidance_setting(name: str, grammars: Grammars) -> None:
    schema, words = REFUSED[name]
    error = grammars.error_of(forms.json_grammar(schema).text)
    assert error is not None and words in error and not any(word in error for word in LIBRARY_WORDS), error


@pytest.mark.parametrize("kind", MAKERS)
def test_client_like_schemas_are_enforced_or_refused_before_the_reply(kind: str, grammars: Grammars) -> None:
    check_many(kind, 5, grammars)


@pytest.mark.long
@pytest.mark.parametrize("kind", MAKERS)
def test_300_client_like_schemas_are_enforced_or_refused_early(kind: str, grammars: Grammars) -> None:
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
    assert num_held >= 0.5 * len(seeds)
