"""Calls to tools with client-written schemas satisfy the schema, or the tool is refused."""

import json
import sys
from random import Random
from typing import Any

import jsonschema_rs
import pytest

from megatron_mamba_cache.errors import GrammarError
from megatron_mamba_cache.grammars.compiler import Grammars
from megatron_mamba_cache.server.parsers.call_grammars import calls_grammar
from megatron_mamba_cache.server.parsers.families import ReplySyntax
from megatron_mamba_cache.server.parsers.parts import assembled
from megatron_mamba_cache.server.parsers.xml_call_grammars import CallableTool
from tests.grammars.client_schemas import LIBRARY_WORDS, MAKERS, REASONS
from tests.grammars.piece_tokenizer import PieceTokenizer
from tests.grammars.random_replies import random_reply

TOKENIZER = PieceTokenizer()
FAMILIES = ("hermes", "qwen3_coder")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    found = Grammars(TOKENIZER.vocab_size)
    found.read(TOKENIZER)
    return found


def error_and_grammar(family: str, tool: CallableTool, grammars: Grammars) -> tuple[str | None, str]:
    try:
        grammar = calls_grammar(family, [tool], lambda _text: None, only_one=True).text
    except GrammarError as error:
        return str(error), ""
    return grammars.error_of(grammar), grammar


def check_calls(family: str, schema: dict[str, Any], grammars: Grammars, seed: int) -> bool:
    """Check that 3 calls satisfy a schema, or that its refusal names a keyword; return True if it is enforced."""
    refusal, grammar = error_and_grammar(family, CallableTool("save_all", schema), grammars)
    if refusal is not None:
        assert any(reason in refusal for reason in REASONS) and not any(word in refusal for word in LIBRARY_WORDS), (
            refusal
        )
        assert "save_all" in refusal, refusal
        return False
    validator = jsonschema_rs.validator_for(schema)
    for number in range(3):
        random = Random(f"{seed} {number}")
        reply = random_reply(grammars.matcher(grammar), random, TOKENIZER, random.choice([0, 60, 150]))
        parser = ReplySyntax(family).parser({"save_all": schema}, is_constrained=True)
        (call,) = assembled([*parser.push(reply), *parser.finish()]).calls
        assert call.name == "save_all"
        validator.validate(json.loads(call.arguments))
    return True


def check_many(family: str, kind: str, one_of: int, grammars: Grammars) -> None:
    maker, count = MAKERS[kind]
    seeds = range(1, count, one_of)
    num_held = 0
    for seed in seeds:
        schema = maker(Random(f"{kind} {seed}"))
        try:
            num_held += check_calls(family, schema, grammars, seed)
        except Exception as error:
            error.add_note(f"{kind} {seed}: {json.dumps(schema, ensure_ascii=False)}")
            raise
    print(f"{kind}: {num_held} of {len(seeds)} held")
    assert num_held >= 0.5 * len(seeds)


AB = {"a": {"type": "integer"}, "b": {"type": "integer"}}
WHOLE_OBJECTS: dict[str, dict[str, Any]] = {
    "if": {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "not": {"not": {"required": ["a"]}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependencies": {"allOf": [{"dependencies": {"a": ["b"]}}]},
    "minProperties": {"minProperties": 1},
    "maxProperties": {"anyOf": [{"maxProperties": 1}]},
    "patternProperties": {"patternProperties": {"^a": {"minimum": 5}}},
}


@pytest.mark.parametrize("word", WHOLE_OBJECTS)
def test_xml_calls_refuse_constraints_on_the_whole_parameter_object(word: str, grammars: Grammars) -> None:
    schema = {"type": "object", "properties": AB, **WHOLE_OBJECTS[word]}
    refusal, _ = error_and_grammar("qwen3_coder", CallableTool("save_all", schema), grammars)
    assert refusal == f"the parameters of save_all: {word} cannot be enforced; leave it out"


def test_xml_calls_accept_empty_constraints_on_the_parameter_object(grammars: Grammars) -> None:
    words = {"if": {}, "dependencies": {}, "unevaluatedProperties": False, "minProperties": 1, "maxProperties": 2}
    schema = {"type": "object", "properties": AB, "required": ["b"], "patternProperties": {"^x-": {}}, **words}
    assert check_calls("qwen3_coder", schema, grammars, 0)


TEXT, KINDS = {"type": "string"}, {"enum": ["lo", "hi"], "type": "string"}
HELD: dict[str, dict[str, Any]] = {
    "escaped reference": {"properties": {"a": {"$ref": "#/$defs/a%20b~1c"}}, "$defs": {"a b/c": KINDS}},
    "reference by number": {"properties": {"a": {"$ref": "#/$defs/k/anyOf/1"}}, "$defs": {"k": {"anyOf": [{}, KINDS]}}},
    "reference by anchor": {"properties": {"a": {"$ref": "#k"}}, "$defs": {"k": {**KINDS, "$anchor": "k"}}},
    "null among texts": {"properties": {"a": {**TEXT, "enum": ["a", None], "nullable": True}}},
    "number among texts": {"properties": {"a": {**TEXT, "enum": ["a", 1, True, "b"]}}},
    "values of a pattern": {"properties": {"a": {**TEXT, "enum": ["a", "b1", "b22"], "pattern": "^b", "maxLength": 2}}},
    "others": {"properties": {"b": {"type": "boolean"}}, "additionalProperties": {"type": "integer"}},
    "ends in groups": {"properties": {"a": {**TEXT, "pattern": "(^a$)|^(?:b|(?<c>c$))"}}},
    "flags": {"properties": {"a": {**TEXT, "pattern": "(?i)^a[b-d]$"}}},
    "pointer": {"properties": {"a": {**TEXT, "format": "relative-json-pointer"}}},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", HELD)
def test_parameters_are_constrained_when_their_schemas_are_in_references_or_branches(
    family: str, name: str, grammars: Grammars
) -> None:
    for seed in range(4):
        assert check_calls(family, {"type": "object", "required": ["a"], **HELD[name]}, grammars, seed)


DEAD_ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"$ref": "#/$defs/x"}, "which is not in the schema"),
    "no text": ({**TEXT, "pattern": "^a{5}$", "maxLength": 3}, "no string matches the pattern"),
    "no length": ({**TEXT, "minLength": 5, "maxLength": 3}, "no value is allowed: minLength (5) is greater"),
    "no value": (
        {**TEXT, "enum": ["a", "b"], "pattern": "^c"},
        "no value is allowed: no enum value satisfies all constraints",
    ),
    "end of a value": ({**TEXT, "const": "a\n</parameter>\n<parameter=b>\nc"}, "no value is allowed"),
    "no type": ({"type": {"a": 1}, "enum": ["a"]}, "is not a type of JSON Schema"),
    "word for a length": ({**TEXT, "minLength": "3"}, "minLength must be an integer of 0 or more"),
    "end inside": ({**TEXT, "pattern": "x(a|^b)"}, "`^` or `$` inside"),
}


@pytest.mark.parametrize("name", DEAD_ENDS)
def test_unsatisfiable_parameters_are_refused_before_the_call(name: str, grammars: Grammars) -> None:
    parameter, words = DEAD_ENDS[name]
    schema = {"type": "object", "properties": {"a": parameter}, "required": ["a"]}
    refusal, _ = error_and_grammar("qwen3_coder", CallableTool("save_all", schema), grammars)
    assert refusal is not None and words in refusal and "a" in refusal.split(":")[0] and "\n" not in refusal, refusal


@pytest.mark.parametrize("words", [{"unevaluatedProperties": False}, {"propertyNames": {"pattern": "^[b-z]$"}}])
def test_schema_that_forbids_a_required_parameters_name_is_refused(words: dict[str, Any], grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"b": TEXT}, "required": ["a"], **words}
    refusal, _ = error_and_grammar("qwen3_coder", CallableTool("save_all", schema), grammars)
    assert refusal is not None and refusal.startswith("the parameters of save_all: "), refusal


@pytest.mark.parametrize("family", FAMILIES)
def test_constrained_number_beyond_float64_is_parsed_as_a_number(family: str, grammars: Grammars) -> None:
    """A grammar allows numbers with any number of digits."""
    number, texts = {"type": "number"}, ["1e999", "-1E+400", "9" * 400, "1e2", "9" * 5000]
    schema = {"type": "object", "properties": {"x": {"type": "array", "items": number}}, "required": ["x"]}
    refusal, grammar = error_and_grammar(family, CallableTool("save_all", schema), grammars)
    written = f"[{','.join(texts)}]"
    reply = f'<tool_call>\n{{"name": "save_all", "arguments": {{"x":{written}}}}}\n</tool_call>'
    if family == "qwen3_coder":
        parameter = f"<parameter=x>\n{written}\n</parameter>\n"
        reply = f"<tool_call>\n<function=save_all>\n{parameter}</function>\n</tool_call>"
    assert refusal is None and grammars.matcher(grammar).try_consume_tokens([*reply.encode()]) == len(reply)
    parser = ReplySyntax(family).parser({"save_all": schema}, is_constrained=True)
    (call,) = assembled([*parser.push(reply), *parser.finish()]).calls
    largest = sys.float_info.max
    assert json.loads(call.arguments) == {"x": [largest, -largest, int(largest), 100, int(largest)]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", MAKERS)
def test_constrained_calls_satisfy_client_schemas(family: str, kind: str, grammars: Grammars) -> None:
    check_many(family, kind, 10, grammars)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", MAKERS)
def test_constrained_calls_satisfy_300_client_schemas(family: str, kind: str, grammars: Grammars) -> None:
    check_many(family, kind, 1, grammars)
