"""Grammars allow exactly the replies that they describe; unsupported ones are refused with a reason."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_mamba_cache.errors import GrammarError
from megatron_mamba_cache.grammars import forms
from megatron_mamba_cache.grammars.compiler import Grammars
from megatron_mamba_cache.grammars.narrowed_schemas import narrow
from megatron_mamba_cache.models.tokenizers.byte_tokenizer import ByteTokenizer
from tests.grammars.piece_tokenizer import THINK_END, PieceTokenizer

TOKENIZER = PieceTokenizer()


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    found = Grammars(TOKENIZER.vocab_size)
    found.read(TOKENIZER)
    return found


def accepts(grammars: Grammars, grammar: forms.Grammar, tokens: list[int]) -> bool:
    matcher = grammars.matcher(grammar.text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"a": 1}', True),
        ('{"a":1}', True),
        ('{\n  "a": 1\n}', True),
        ("{\n" + " " * 16 + '"a":1}', True),
        ("{\n" + " " * 17 + '"a":1}', False),
        ('{  "a":1}', False),
        ('{\n\n"a":1}', False),
    ],
)
def test_white_space_between_json_tokens_is_bounded(text: str, is_allowed: bool, grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert accepts(grammars, forms.json_grammar(schema), TOKENIZER.tokenize(text)) is is_allowed


@pytest.mark.parametrize("pattern", ["a/b", r"a\/b", "[/]{2}", r"\d+\.\d", "x\ny"])
def test_slashes_in_a_regular_expression_are_matched_literally(pattern: str, grammars: Grammars) -> None:
    assert grammars.error_of(forms.regex_grammar(pattern).text) is None
    example = {"a/b": "a/b", r"a\/b": "a/b", "[/]{2}": "//", r"\d+\.\d": "12.3", "x\ny": "x\ny"}[pattern]
    assert re.fullmatch(pattern, example)
    assert accepts(grammars, forms.regex_grammar(pattern), TOKENIZER.tokenize(example))


@pytest.mark.parametrize("choices", [["a"], ['"', "\\", "\n", "é", "日本", ""], ["</think>"]])
def test_choice_grammar_accepts_any_text_as_a_choice(choices: list[str], grammars: Grammars) -> None:
    for choice in choices:
        assert accepts(grammars, forms.choice_grammar(choices), TOKENIZER.tokenize(choice)), choice
    assert not accepts(grammars, forms.choice_grammar(choices), TOKENIZER.tokenize("other"))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "binary"},
        {"type": ["string", "null"], "format": "password"},
        {"anyOf": [{"type": "string", "format": "path"}]},
        {"$defs": {"A": {"type": "string", "format": "color"}}, "$ref": "#/$defs/A"},
    ],
)
def test_undefined_string_formats_in_a_schema_are_ignored(schema: dict[str, Any], grammars: Grammars) -> None:
    assert accepts(grammars, forms.json_grammar(schema), TOKENIZER.tokenize('"any text"'))


@pytest.mark.parametrize("names", [True, {}, {"type": "string"}])
def test_property_names_keyword_that_allows_every_name_is_ignored(names: Any, grammars: Grammars) -> None:
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    assert accepts(grammars, forms.json_grammar(schema), TOKENIZER.tokenize('{"any name": 1}'))
    assert not accepts(grammars, forms.json_grammar(schema), TOKENIZER.tokenize('{"any name": "x"}'))


def test_schema_properties_may_be_named_like_schema_keywords(grammars: Grammars) -> None:
    inner = {"type": "object", "properties": {"format": {"const": "binary"}}, "required": ["format"]}
    schema = {"type": "object", "properties": {"propertyNames": inner}, "required": ["propertyNames"]}
    schema |= {"additionalProperties": False}
    assert accepts(grammars, forms.json_grammar(schema), TOKENIZER.tokenize('{"propertyNames": {"format": "binary"}}'))
    assert not accepts(grammars, forms.json_grammar(schema), TOKENIZER.tokenize("{}"))
    values = {"enum": [{"format": "binary"}]}
    assert accepts(grammars, forms.json_grammar(values), TOKENIZER.tokenize('{"format": "binary"}'))


OPEN = {"type": "object", "properties": {"a": {"const": 1}}}
OVERLAPPING = {"type": "object", "patternProperties": {"x": {"const": 1}}, "additionalProperties": {"const": 2}}
CONTROLS = {"type": "string", "pattern": r"^([\x00-\x0f]|[\x10-\x1f])$"}
NARROWED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (OPEN, ['{"a": 1, "b": 2}', '{"b": "\\n\\""}'], [r'{"\u0061": 2}', '{"a": 2}']),
    (OVERLAPPING, ['{"ax": 1, "b": 2}'], [r'{"a\u0078": 2}', '{"ax": 2}']),
    ({"type": "object", "additionalProperties": {"type": "string"}}, [r'{"a": "\u001b"}'], []),
    ({"type": "string", "pattern": '^[^"]$'}, ['"a"', r'"\\"', r'"\n"'], [r'"\""']),
    ({"type": "string", "pattern": r'^[^"\\]{2}$'}, ['"ab"'], [r'"\"a"', r'"a\\"', r'"\"\""']),
    ({"type": "string", "pattern": r"^[^\p{L}\\]$"}, ['"1"', r'"\t"'], [r'"\\"', '"a"']),
    ({"type": "string", "pattern": r"^\[[^\]]$"}, ['"[a"', r'"[\""'], ['"[]"']),
    (CONTROLS, [r'"\n"', r'"\u0002"'], [r'"\""', r'"\\"', '"a"']),
    ({"type": "integer", "maximum": 123456789012345678}, ["123456789012345664", "7"], ["123456789012345680"]),
    ({"type": "integer", "exclusiveMaximum": 2**60}, [str(2**60 - 128)], [str(2**60)]),
    ({"type": "integer", "minimum": 9007199254740993}, ["9007199254740994"], ["9007199254740992"]),
    ({"type": "integer", "exclusiveMinimum": -(2**60), "minimum": 3}, ["3"], ["2", "-1"]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["-5", "5"], [str(2**63), str(-(2**63) - 1)]),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["5"], [str(2**64), "-1"]),
    ({"type": "number", "maximum": 2**60 + 1}, ["1.5", "1152921504606846000"], [str(2**60 + 2)]),
    ({"type": "number", "minimum": 123456789012345678}, ["123456789012345700"], ["123456789012345677"]),
    ({"type": ["integer", "null"], "maximum": 2**63 - 1}, ["null", "5"], [str(2**63)]),
    ({"const": 2**60}, [str(2**60)], [str(2**60 + 1)]),
    ({"type": "object", "minProperties": 1}, ['{"a": 1}'], ["{}"]),
    ({"type": "object", "required": ["a"], "minProperties": 2}, ['{"a": 1, "b": 1}'], ['{"a": 1}']),
]


@pytest.mark.parametrize("case", range(len(NARROWED)))
def test_json_grammar_accepts_only_texts_that_satisfy_the_schema(case: int, grammars: Grammars) -> None:
    schema, allowed, others = NARROWED[case]
    found = {text: accepts(grammars, forms.json_grammar(schema), TOKENIZER.tokenize(text)) for text in allowed + others}
    assert found == {**dict.fromkeys(allowed, True), **dict.fromkeys(others, False)}


@given(bound=st.integers(-(2**66), 2**66), word=st.sampled_from(["minimum", "maximum"]), exclusive=st.booleans())
def test_schema_bounds_beyond_float64_precision_are_only_tightened(bound: int, word: str, exclusive: bool) -> None:
    name = f"exclusive{word.capitalize()}" if exclusive else word
    schema: dict[str, Any] = {"type": "integer", name: bound}
    narrow(schema)
    if abs(bound) <= 2**53:
        assert schema == {"type": "integer", name: bound}
        return
    held = schema[word]
    assert set(schema) == {"type", word} and float(held) == held and isinstance(held, int)
    gap = bound - held if word == "maximum" else held - bound
    assert gap >= int(exclusive) and (gap <= abs(bound) >> 49 or abs(held) == 2**63 - 1024), (bound, held)


def test_grammar_literal_refers_to_special_tokens_by_id(grammars: Grammars) -> None:
    rule = forms.literal("a</think><b>", TOKENIZER.id_of)
    assert rule == f'"a" <[{THINK_END}]> "<b>"'
    assert accepts(grammars, forms.Grammar(rule), [ord("a"), THINK_END, *TOKENIZER.tokenize("<b>")])
    assert not accepts(grammars, forms.Grammar(rule), TOKENIZER.tokenize("a</think><b>"))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED = {
    "type": ({"type": "text"}, '"text" is not a type of JSON Schema'),
    "not": ({"not": {"type": "string"}}, "not cannot be enforced; leave it out"),
    "nothing": (False, "no JSON value matches the schema"),
    "unique": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "overlap": ({"oneOf": [{"type": "string"}, {"const": "a"}]}, "oneOf"),
    "look ahead": ({"type": "string", "pattern": "(?=a)b"}, "has lookahead or lookbehind"),
    "elsewhere": ({"$ref": "http://127.0.0.1/schema"}, "127.0.0.1"),
    "reference": ({"$ref": "#/$defs/none"}, "none"),
    "depth": (nested(300), "recursion limit exceeded"),
    "objects": ({"anyOf": [{"const": number} for number in range(10_000)]}, "10003 objects; at most 2000"),
    "size": ({"const": "x" * 2**20}, "characters; at most 262144 are allowed"),
    "circle": ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "references never end"),
    "large constant": ({"enum": ["a", [9007199254740993]]}, "enum holds 9007199254740993, beyond 2**53"),
    "endless bound": ({"type": "integer", "maximum": 10**400}, "more than 308 digits"),
    "free names": (
        {"type": "object", "minProperties": 2},
        "minProperties is 2, but only 0 properties are required by name",
    ),
    "bounds": ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum (3) is greater than maximum (2)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_json_schema_is_refused_with_the_reason(name: str, grammars: Grammars) -> None:
    schema, reason = REFUSED[name]
    error = grammars.error_of(forms.json_grammar(schema).text)
    assert error is not None and reason in error and len(error) < 600 and "\n" not in error, error


TAKEN = {
    "many alternatives": {"enum": [f"value {number}" for number in range(10_000)]},
    "exponential": {"type": "string", "pattern": "^(a|a)*(a|aa)*((b|a){1,200})+c{500}$"},
    "states": {"type": "string", "pattern": "^.*a.{18}$"},
    "long": {"type": "string", "maxLength": 10**6},
    "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**5, "maxItems": 10**6},
    "deep": nested(50),
    "discriminated": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": kind}}, "required": ["k"]} for kind in ("a", "b", "c")
        ],
        "discriminator": {"propertyName": "k"},
    },
    "annotations": {"type": "string", "title": "T", "default": "q", "examples": ["a"], "deprecated": True},
    "settings": {"type": "integer", "x-guidance": {"lenient": True, "whitespace_pattern": ".*"}},
}


@pytest.mark.parametrize("name", TAKEN)
def test_large_json_schema_compiles_quickly(name: str, grammars: Grammars) -> None:
    assert grammars.error_of(forms.json_grammar(TAKEN[name]).text) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the grammar is not JSON"),
        ("[" * 5000, "nested too deeply"),
        ("{}", "grammars"),
        ("7", ""),
        ('{"grammars": []}', ""),
    ],
)
def test_invalid_grammar_is_refused(text: str, reason: str, grammars: Grammars) -> None:
    error = grammars.error_of(text)
    assert error is not None and reason in error


def test_compiled_grammars_are_cached_up_to_a_total_size() -> None:
    grammars = Grammars(TOKENIZER.vocab_size)
    grammars.read(TOKENIZER)
    first = forms.json_grammar({"type": "integer"}).text
    grammars.matcher(first)
    long = "x" * 200_000
    for number in range(50):
        grammars.matcher(first)
        grammars.matcher(forms.choice_grammar([long, str(number)]).text)
    assert first in grammars._compiled
    assert len(grammars._compiled) < 45 and grammars._num_characters == sum(map(len, grammars._compiled))
    assert grammars._num_characters <= 8 * 2**20
    for number in range(600):
        grammars.matcher(forms.choice_grammar([f"a{number}"]).text)
    assert len(grammars._compiled) == 512 and grammars._num_characters == sum(map(len, grammars._compiled))


def test_matchers_of_the_same_grammar_are_independent(grammars: Grammars) -> None:
    text = forms.choice_grammar(["ab"]).text
    first, second = grammars.matcher(text), grammars.matcher(text)
    assert first.consume_token(ord("a"))
    assert second.consume_token(ord("a")) and second.consume_token(ord("b")) and not first.is_accepting()


def test_vocabulary_without_an_end_token_is_refused() -> None:
    grammars = Grammars(256)
    with pytest.raises(GrammarError, match="need a tokenizer, and this engine has none"):
        grammars.matcher(forms.choice_grammar(["a"]).text)
    grammars.read(ByteTokenizer())
    with pytest.raises(GrammarError, match="need a tokenizer with an end token, which this model's tokenizer lacks"):
        grammars.matcher(forms.choice_grammar(["a"]).text)


def test_grammar_is_serialized_as_json() -> None:
    grammar = forms.sequence(forms.choice_grammar(["é"]), forms.json_grammar({"type": "null"}))
    assert [list(part) for part in json.loads(grammar.text)["grammars"]] == [["lark_grammar"], ["name", "json_schema"]]
