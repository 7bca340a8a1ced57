"""Reply parsers: results do not depend on how the text is split, and no text raises an error."""

import json
import random
import time
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest

from megatron_mamba_cache.grammars.compiler import Grammars
from megatron_mamba_cache.grammars.forms import Grammar
from megatron_mamba_cache.server.parsers.call_grammars import (
    MARKED_CALLS,
    calls_grammar,
    text_and_calls_grammar,
)
from megatron_mamba_cache.server.parsers.families import REASONING_PARSERS, TOOL_CALL_PARSERS, ReplySyntax, reply_syntax
from megatron_mamba_cache.server.parsers.parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    ParsedReply,
    Part,
    Reasoning,
    ToolCall,
    assembled,
    merged,
)
from megatron_mamba_cache.server.parsers.reasoning import PromptReasoning
from megatron_mamba_cache.server.parsers.xml_call_grammars import CallableTool
from tests.grammars.allowed_tokens import tokens_of_mask
from tests.grammars.piece_tokenizer import END, PieceTokenizer

TOKENIZER = PieceTokenizer()

PARAMETERS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "box": {"$ref": "#/$defs/Box"},
            "anything": {},
            "size": {"type": ["number", "null"]},
            "flag": {"type": "boolean"},
            "names": {"type": "array", "items": {"type": "string"}},
            "days_or_none": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "odd": {"type": "int"},
        },
        "$defs": {"Box": {"type": "object"}},
    },
    "stop-all": {},
    "f": {},
}
FORMS = [*((calls, "think") for calls in (*TOOL_CALL_PARSERS, None)), *(("hermes", name) for name in REASONING_PARSERS)]
FRAGMENTS = (
    "<think>", "</think>", "Here is my thought process:", "Here is my response:", "<tool_call>", "</tool_call>",
    "<TOOLCALL>", "</TOOLCALL>", "<|tool_call|>", "<function=", "<function=get_weather>", "</function>",
    "<parameter=city>", "<parameter=days>", "<parameter=anything>", "</parameter>", "\n", " ", "\t", "\n\n", "[", "]",
    "\n<parameter=box>\n", "\n</parameter>", "</function>\n</tool_call>", "<tool_call>\n<function=get_weather>\n",
    "{", "}", ",", ":", '"', "\\", '\\"', "\\u00e9", "\\ud83d", "\\ude00", '"name"', '"arguments"', ": ",
    '"parameters"',
    '\n<tool_call>{"name": "f"}', '\n<|tool_call|>[{"name": "f"}', '\n<TOOLCALL>[{"name": "f"}',
    '"get_weather"', "null", "True", "12", "-1.5e3", "NaN", "1e999", "x", "é", "\U0001f600", "\x00", "<", "</", ">",
    "=", '{"name": "get_weather", "arguments": {"city": "Oslo"}}', '{"arguments": [1, {}], "name": "stop-all"}',
    '{"name": "get_weather", "arguments": {"city": "\\ud83d', '{"name": "f", "arguments": "{\\"a\\": NaN}"},',
    '{"name": "get_weather", "arguments": ', '{"name": "f", "arguments": "{\\"a\\": 1}"}', "[" * 99,
)  # fmt: skip


def parsed(syntax: ReplySyntax, pieces: list[str], prompt: str = "") -> list[Part]:
    """Return the parts of a reply that arrives in pieces."""
    is_open = syntax.reasoning is not None and syntax.reasoning.after(prompt) is PromptReasoning.OPEN
    parser = syntax.parser(PARAMETERS, is_open=is_open)
    return merged([part for piece in pieces for part in parser.push(piece)] + parser.finish())


def random_reply(rng: random.Random) -> str:
    return "".join(rng.choice(FRAGMENTS) for _ in range(rng.randrange(14)))


def cut(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def check_readable(reply: ParsedReply) -> None:
    """Check that arguments that Python parses as JSON are strict JSON."""
    for call in reply.calls:
        try:
            value = json.loads(call.arguments)
        except (ValueError, RecursionError):
            continue
        json.dumps([call.name, value], ensure_ascii=False, allow_nan=False).encode()


def check_random_replies(calls: str | None, reasoning: str | None, count: int) -> None:
    syntax = ReplySyntax(calls, REASONING_PARSERS.get(reasoning or ""))
    rng, num_calls = random.Random(f"{calls} {reasoning}"), 0
    for _ in range(count):
        reply, prompt = random_reply(rng), rng.choice(["", "<think>\n"])
        whole = parsed(syntax, [reply], prompt)
        assert parsed(syntax, cut(reply, rng), prompt) == whole, reply
        assert parsed(syntax, list(reply[:99]), prompt) == parsed(syntax, [reply[:99]], prompt), reply
        check_readable(assembled(whole))
        num_calls += sum(isinstance(part, CallBegin) for part in whole)
    assert bool(num_calls) == (calls is not None)


@pytest.mark.parametrize(("calls", "reasoning"), FORMS)
def test_parsing_does_not_depend_on_how_text_is_split(calls: str | None, reasoning: str | None) -> None:
    check_random_replies(calls, reasoning, 400)


@pytest.mark.long
@pytest.mark.parametrize(("calls", "reasoning"), FORMS)
def test_parsing_of_10_000_replies_does_not_depend_on_how_text_is_split(
    calls: str | None, reasoning: str | None
) -> None:
    check_random_replies(calls, reasoning, 10_000)


def as_hermes(calls: list[dict[str, Any]], dumps: Callable[[Any], str]) -> str:
    return "\n".join(f"<tool_call>\n{dumps(call)}\n</tool_call>" for call in calls)


def as_xml(calls: list[dict[str, Any]], _dumps: Callable[[Any], str], end: str = "</parameter>\n") -> str:
    text = ""
    for call in calls:
        text += f"<tool_call>\n<function={call['name']}>\n"
        for key, value in call["arguments"].items():
            shown = value if isinstance(value, str) else json.dumps(value) if isinstance(value, dict) else str(value)
            text += f"<parameter={key}>\n{shown}\n{end}"
        text += "</function>\n</tool_call>\n"
    return text


WRITERS: dict[str, Callable[[list[dict[str, Any]], Callable[[Any], str]], str]] = {
    "hermes": as_hermes,
    "qwen3_coder": as_xml,
    "qwen3_coder, values without an end": lambda calls, dumps: as_xml(calls, dumps, end=""),
    "nemotron_nano_v2": lambda calls, dumps: f"<TOOLCALL>{dumps(calls)}</TOOLCALL>",
    "granite": lambda calls, dumps: f"<|tool_call|>{dumps(calls)}",
    "json": lambda calls, dumps: dumps(calls if len(calls) > 1 else calls[0]),
}
TEXTS = (
    "Oslo",
    "",
    " two  spaces ",
    "a\n\nb\n",
    '"quoted" \\ and \\n',
    "</tool_call",
    "<parameter=days>",
    "é\U0001f600",
    "{}",
)


@pytest.mark.parametrize("form", WRITERS)
def test_calls_in_every_format_are_parsed_to_names_and_arguments(form: str) -> None:
    syntax = ReplySyntax(form.partition(",")[0], REASONING_PARSERS["think"])
    rng = random.Random(form)
    for _ in range(400):
        arguments = {
            "city": rng.choice(TEXTS),
            "days": rng.randrange(-9, 9),
            "units": rng.choice([None, "metric", "12"]),
            "box": {"depth": [1.5, True, None, {"x": rng.choice(TEXTS)}]},
        }
        chosen = [key for key in arguments if rng.random() < 0.7]
        calls = [{"name": "get_weather", "arguments": {key: arguments[key] for key in chosen}}]
        calls += [{"name": "stop-all", "arguments": {}}] * rng.randrange(3)
        indent, ascii_only = rng.choice([None, 2]), rng.random() < 0.5
        written = WRITERS[form](calls, lambda found: json.dumps(found, indent=indent, ensure_ascii=ascii_only))  # noqa: B023
        before = "" if form == "json" else rng.choice(["", "I look it up.\n\n"])
        thoughts = rng.choice(["", "<think>\nLet me see. <tool> {\n</think>\n\n"])
        found = assembled(parsed(syntax, cut(thoughts + before + written, rng)))
        assert found.content == before.strip() and found.reasoning == ("Let me see. <tool> {" if thoughts else "")
        assert [{"name": call.name, "arguments": json.loads(call.arguments)} for call in found.calls] == calls


def test_call_arguments_are_yielded_before_the_call_is_complete() -> None:
    for form, begun, rest in (
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os', 'lo"}}'),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nOs", "lo\n</parameter></function>"),
    ):
        parser = ReplySyntax(form).parser(PARAMETERS)
        assert parser.push(begun) == [CallBegin("get_weather"), CallArguments('{"city": "Os')]
        assert merged(parser.push(rest)) == [CallArguments('lo"}'), CallEnd()]
        assert (parser.num_calls, parser.num_complete_calls) == (1, 1)


CUT_OFF = ParsedReply("", "", (ToolCall("f", '{"a": "b'),))


@pytest.mark.parametrize(
    ("form", "reply", "found"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', CUT_OFF),
        ("hermes", '<tool_call>{"arguments": {"a": "b"}}</tool_call>', None),
        ("hermes", "<tool_call>\nno JSON\n</tool_call>", None),
        ("hermes", "a \n<tool_call>", None),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}', None),
        ("hermes", '<tool_call>{"name": "f"', None),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": @b]}}</tool_call> c',
            ParsedReply("c", "", (ToolCall("f", '{"a": @b]}}'),)),
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "line\nend"}}',
            ParsedReply("", "", (ToolCall("f", '{"a": "line\\nend"}'),)),
        ),
        ("hermes", 'a \n<tool_call>{"name": "f"} {b}', ParsedReply("a{b}", "", (ToolCall("f", "{}"),))),
        ("hermes", '<tool_call>{"name": "f"}, {b}', ParsedReply(", {b}", "", (ToolCall("f", "{}"),))),
        ("hermes", '<tool_call>[{"name": "f"},]</tool_call>, b', ParsedReply(", b", "", (ToolCall("f", "{}"),))),
        ("hermes", '<tool_call>{"name": "f"}, </tool_call>', ParsedReply("", "", (ToolCall("f", "{}"),))),
        ("json", '{"name": "f", "parameters": {}}, or so', ParsedReply(", or so", "", (ToolCall("f", "{}"),))),
        ("granite", "<|tool_call|>[]", None),
        ("json", '{"name": "Ada", "age": 36}', None),
        ("json", "[1, 2]", None),
        ("qwen3_coder", "<function=f>\n<parameter=a>\nb", CUT_OFF),
        ("qwen3_coder", "<tool_call>\nno function\n</tool_call>", None),
        ("qwen3_coder", "a <function=f", None),
        ("qwen3_coder", "<function=f></function>", ParsedReply("", "", (ToolCall("f", "{}"),))),
        ("qwen3_coder", "Write <tool_call><function=name> and\n<function=other>x</function>", None),
        (
            "qwen3_coder",
            "<function=f><parameter=a>\nsome </function> text\n</function>\n </function> \n",
            ParsedReply("", "", (ToolCall("f", '{"a": "some </function> text\\n</function>\\n "}'),)),
        ),
    ],
)  # fmt: skip
def test_text_of_incomplete_or_malformed_calls_is_unchanged(form: str, reply: str, found: ParsedReply | None) -> None:
    assert assembled(parsed(ReplySyntax(form), [reply])) == (found or ParsedReply(reply, "", ()))


def test_parameter_text_is_parsed_as_the_type_in_the_schema() -> None:
    for key, text, value in (
        ("days", "12", 12),
        ("days", "a dozen", "a dozen"),
        ("city", "12", "12"),
        ("units", "None", None),
        ("units", "12", "12"),
        ("box", '{"a": [1]}', {"a": [1]}),
        ("anything", "True", True),
        ("anything", "NaN", "NaN"),
        ("anything", "[" * 100_000, "[" * 100_000),
        ("undeclared", "12", "12"),
        ("days", '"12"', 12),
        ("days", "'12'", 12),
        ("days", "+12", 12),
        ("days", "1.5", "1.5"),
        ("days", "12.0", 12),
        ("days", "True", "True"),
        ("size", "1", 1),
        ("size", "1e999", "1e999"),
        ("flag", "True", True),
        ("flag", "FALSE", False),
        ("flag", "'true'", True),
        ("flag", "1", "1"),
        ("units", "'C'", "'C'"),
        ("units", "null", None),
        ("units", "['C']", "['C']"),
        ("days_or_none", "None", None),
        ("days_or_none", "'7'", 7),
        ("names", "['a', \"b\", None, True, 1.5]", ["a", "b", None, True, 1.5]),
        ("names", "('a', ('b',))", ["a", ["b"]]),
        ("names", '"[1, 2]"', [1, 2]),
        ("names", "{1, 2}", "{1, 2}"),
        ("names", "[true, None, 'a']", [True, None, "a"]),
        ("names", '["a\nb"]', ["a\nb"]),
        ("names", "[undefined]", "[undefined]"),
        ("box", '{"a": True, "b": null}', {"a": True, "b": None}),
        ("box", '{"a": "b\tc\nd"}', {"a": "b\tc\nd"}),
        ("names", "[1e999]", "[1e999]"),
        ("names", "[open('x')]", "[open('x')]"),
        ("names", "['\\d']", ["\\d"]),
        ("names", "'" * 70_001, "'" * 70_001),
        ("box", "{'a': (1, {'b': None}), 2: 'c'}", {"a": [1, {"b": None}], "2": "c"}),
        ("box", "{(1, 2): 3}", "{(1, 2): 3}"),
        ("box", "[1]", "[1]"),
        ("box", "{" * 5000, "{" * 5000),
        ("box", "-" * 60_000 + "1", "-" * 60_000 + "1"),
        ("anything", "{'a': 'b'}", {"a": "b"}),
        ("anything", "'a'", "'a'"),
        ("odd", "12", 12),
    ):
        reply = f"<function=get_weather><parameter={key}>\n{text}\n</parameter></function>"
        (call,) = assembled(parsed(ReplySyntax("qwen3_coder"), [reply])).calls
        assert json.loads(call.arguments) == {key: value}


@pytest.mark.parametrize(
    ("form", "written", "expected"),
    [
        ("hermes", '{"a": NaN, "b": [-Infinity, 1e999]}', '{"a": "NaN", "b": ["-Infinity", "1e999"]}'),
        ("hermes", '"{\\"a\\": NaN}"', '{"a": "NaN"}'),
        ("hermes", '{"a": "\\ud800x\\ud83d\\ud83d\\ude00"}', '{"a": "\\ufffdx\\ufffd\\ud83d\\ude00"}'),
        ("hermes", '{"a": "\\\\ud800"}', '{"a": "\\\\ud800"}'),
        ("qwen3_coder", "1e999", '{"anything": "1e999"}'),
        ("qwen3_coder", '["\\ud800\\ud83d\\ude00"]', '{"anything": ["\ufffd\U0001f600"]}'),
    ],
)
def test_parameter_values_that_are_not_json_become_strings(form: str, written: str, expected: str) -> None:
    reply = f'<tool_call>{{"name": "\\udc00", "arguments": {written}}}</tool_call>'
    if form == "qwen3_coder":
        reply = f"<function=get_weather><parameter=anything>{written}</parameter></function>"
    (call,) = assembled(parsed(ReplySyntax(form), [reply])).calls
    assert call == ToolCall("\ufffd" if form == "hermes" else "get_weather", expected)


REFERRING = {"anyOf": [{"$ref": "#/properties/x"}] * 99}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (REFERRING, 1),
        ({"anyOf": [*REFERRING["anyOf"], {"type": "string"}]}, "1"),
        ({"anyOf": [{"type": "string"}, {}]}, 1),
        ({"anyOf": 5, "oneOf": "x", "allOf": None}, 1),
        ({"anyOf": [5, None]}, 1),
        ({"anyOf": [{"anyOf": [{"type": "string"}] * 99}] * 99}, 1),
        ({"$ref": "#" + "/x" * 99}, 1),
        ({"type": [[], {}], "enum": 5}, 1),
        ({"enum": ["1"] * 9999}, "1"),
        ({"type": {"a": 1}}, 1),
    ],
)
def test_parameter_types_are_found_in_bounded_time_for_any_schema(schema: Any, value: Any) -> None:
    syntax = ReplySyntax("qwen3_coder")
    reply = "<function=f><parameter=x>1</parameter></function>" * 20
    begun = time.monotonic()
    parser = syntax.parser({"f": {"properties": {"x": schema}}})
    calls = assembled([*parser.push(reply), *parser.finish()]).calls
    assert time.monotonic() - begun < 2
    assert [json.loads(call.arguments) for call in calls] == [{"x": value}] * 20


@pytest.mark.parametrize(
    ("reasoning", "prompt", "reply", "parts"),
    [
        ("think", "", "<think>\na b\n</think>\n\nc ", [Reasoning("a b"), Content("c ")]),
        ("think", "<think>\n", "a</think>c", [Reasoning("a"), Content("c")]),
        ("think", "<think></think>\n", "c", [Content("c")]),
        ("think", "", "a</think>c", [Content("a</think>c")]),
        ("think", "", " c", [Content(" c")]),
        ("think", "<think>", "never closed", [Reasoning("never closed")]),
        ("think", "<think>", '<tool_call>{"name": "f"}', [CallBegin("f"), CallArguments("{}"), CallEnd()]),
        ("deepseek_r1", "", "a</think>c", [Reasoning("a"), Content("c")]),
        ("think", "", "<think>\n<think>\na\n</think>\nc", [Reasoning("a"), Content("c")]),
        ("think", "", "<think>a</think>\n<think>\nb</think>c", [Reasoning("a\nb"), Content("c")]),
        ("think", "", "<think>a</think>\n<think> is a tag", [Reasoning("a"), Content("<think> is a tag")]),
        ("think", "<think>", "a. </think> c", [Reasoning("a."), Content("c")]),
        ("think", "<think>", "write </think> now\n</think>c", [Reasoning("write </think> now"), Content("c")]),
        (
            "think", "<think>", 'a\n<tool_call>{"name": "f"}</tool_call>\n</think>\nc',
            [Reasoning("a"), CallBegin("f"), CallArguments("{}"), CallEnd(), Content("c")],
        ),
        ("granite", "", "Here is my thought process: a Here is my response: c", [Reasoning("a"), Content("c")]),
        (None, "<think>", "a</think>c", [Content("a</think>c")]),
    ],
)  # fmt: skip
def test_reasoning_is_separated_from_content(reasoning: str | None, prompt: str, reply: str, parts: list[Part]) -> None:
    syntax = ReplySyntax("hermes", REASONING_PARSERS.get(reasoning or ""))
    assert parsed(syntax, [reply], prompt) == parts


@pytest.mark.parametrize(
    ("template", "tool_calls", "reasoning"),
    [
        ("{% if tools %}<tool_call>{% endif %}</think>", "hermes", "think"),
        ("{% if tools %}<tool_call>\n<function={% endif %}", "qwen3_coder", None),
        ("{% if tools %}<TOOLCALL>{% endif %}", "nemotron_nano_v2", None),
        ("{% if tools %}<|tool_call|>{% endif %}Here is my thought process:", "granite", "granite"),
        ('{% if tools %}{"name": , "parameters": }{% endif %}', "json", None),
        ("{{ messages }}", None, None),
        ("<tool_call>", None, None),
        ("", None, None),
    ],
)
def test_chat_template_selects_the_parsers(template: str, tool_calls: str | None, reasoning: str | None) -> None:
    assert reply_syntax(template) == ReplySyntax(tool_calls, REASONING_PARSERS.get(reasoning or ""))
    assert reply_syntax(template, "json", "none") == ReplySyntax("json", None)
    assert reply_syntax(template, "none", "deepseek_r1") == ReplySyntax(None, REASONING_PARSERS["deepseek_r1"])


def test_every_call_format_has_a_grammar() -> None:
    assert {*MARKED_CALLS, "json"} == TOOL_CALL_PARSERS.keys()
    for name, form in MARKED_CALLS.items():
        assert {form.marker, *form.others} == set(TOOL_CALL_PARSERS[name]({}).open)


@pytest.mark.parametrize(("unit", "is_allowed"), [("C", True), ("X", False), ('"C"', False)])
def test_text_parameter_with_a_schema_reference_round_trips(unit: str, is_allowed: bool) -> None:
    """The schema is declared in the same way as pydantic's enums."""
    units = {"type": "string", "enum": ["C", "F"]}
    parameters = {"type": "object", "properties": {"unit": {"$ref": "#/$defs/Unit"}}, "required": ["unit"]}
    tool = CallableTool("f", {**parameters, "$defs": {"Unit": units}})
    text = f"<tool_call>\n<function=f>\n<parameter=unit>\n{unit}\n</parameter>\n</function>\n</tool_call>"
    assert is_of(calls_grammar("qwen3_coder", [tool], TOKENIZER.id_of, only_one=True), text) is is_allowed


def matcher_of(grammar: Grammar) -> Any:
    """Return a matcher at the start of a grammar."""
    grammars = Grammars(TOKENIZER.vocab_size)
    grammars.read(TOKENIZER)
    return grammars.matcher(grammar.text)


def is_of(grammar: Grammar, text: str) -> bool:
    """Return True if a grammar accepts a text."""
    matcher, tokens = matcher_of(grammar), TOKENIZER.tokenize(text)
    return bool(matcher.validate_tokens([*tokens, END]) == len(tokens) + 1)


VALUES = (
    "Oslo", "", "a\n\nb", "</parameter", "<parameter=a>", "a\n<paramete", "</function> or so", "</tool_call>\n",
    "a</parameter>b", "</parameter>\nb",
)  # fmt: skip
BROKEN = (
    "a\n<parameter=b>",
    "a</parameter>",
    "a</parameter>\n <parameter=b",
    "\n</function>\n</tool_call>",
    "</function></tool_call>",
    "a\n<parameter=",
)
SEARCH = CallableTool("f", {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})


@pytest.mark.parametrize("value", [*VALUES, *BROKEN])
def test_parameter_text_round_trips(value: str) -> None:
    """The grammar excludes text that would end the value early."""
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    grammar = calls_grammar("qwen3_coder", [SEARCH], TOKENIZER.id_of, only_one=True)
    (call, *_), *_ = assembled(parsed(ReplySyntax("qwen3_coder"), [text])).calls, None
    is_read = json.loads(call.arguments) == {"a": value}
    assert is_of(grammar, text) is is_read is (value in VALUES)


TEXT_PARAMETERS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "long": ({"minLength": 2, "maxLength": 5000}, ["ab", "x" * 5000, "<b>a</b>", "x" * 300 + "<b>"], ["a", "x" * 5001]),
    "short": ({"maxLength": 60}, ["", "x" * 60, "</parameter", "a\n<paramete"], ["x" * 61]),
    "pattern": ({"pattern": "^v[0-9]+|z$"}, ["v1", "v12 a", "a z"], ["a", "z a"]),
    "format": ({"format": "date"}, ["2024-02-03"], ["2024-2-3", "today", ""]),
    "choice": ({"anyOf": [{"enum": ["a", "b"]}, {"pattern": "^c+$"}, {"not": {}}]}, ["a", "cc"], ["d", ""]),
}


@pytest.mark.parametrize("name", TEXT_PARAMETERS)
def test_text_parameter_is_constrained_between_other_parameters(name: str) -> None:
    schema, good, bad = TEXT_PARAMETERS[name]
    text: dict[str, Any] = {"type": "string", **schema}
    others = {key: {"type": "string", "maxLength": 45} for key in ("b", "c", "d")}
    tool = CallableTool("f", {"type": "object", "properties": {"a": text, **others}, "required": ["a", "b"]})
    grammar = calls_grammar("qwen3_coder", [tool], TOKENIZER.id_of, only_one=True)
    for value in (*good, *bad):
        assert is_of(grammar, xml_of("f", json.dumps({"a": value, "b": "x"}))) is (value in good), value


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "granite"])
def test_grammar_of_128_tools_with_long_descriptions_compiles(form: str) -> None:
    kinds: list[dict[str, Any]] = [{"type": "string", "maxLength": 90}, {"type": "integer"}, {"enum": ["a", "b"]}]
    properties = {f"p{number}": {**kinds[number % 3], "description": "word " * 40} for number in range(18)}
    parameters = {"type": "object", "properties": properties, "required": ["p0"]}
    tools = [CallableTool(f"tool_{number}", parameters) for number in range(128)]
    text = xml_of("tool_77", '{"p0": "x"}') if form == "qwen3_coder" else WRITTEN[form] % ("tool_77", '{"p0": "x"}')
    began = time.monotonic()
    grammar = calls_grammar(form, tools, TOKENIZER.id_of, only_one=True)
    assert is_of(grammar, text) and not is_of(grammar, text.replace("tool_77", "tool_128"))
    assert time.monotonic() - began < 20


PUT_TOGETHER: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "reference": (
        {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}}},
        ['{"n": 3}'],
        ["{}"],
    ),
    "alternatives": (
        {
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "oneOf": [{"required": ["n"]}, {"properties": {"m": {"type": "boolean"}}, "required": ["m"]}],
        },
        ['{"n": 3}', '{"m": true}'],
        ["{}", '{"n": 3, "m": true}'],
    ),
    "recursion": (
        {"type": "object", "properties": {"n": {"type": "integer"}, "o": {"$ref": "#"}}, "required": ["n"]},
        ['{"n": 1, "o": {"n": 2}}'],
        ['{"n": 1, "o": {}}'],
    ),
    "a property by its path": (
        {"properties": {"n": {"type": "integer"}, "m": {"$ref": "#/properties/n"}}, "required": ["m"]},
        ['{"m": 1}', '{"n": 1, "m": 2}'],
        ['{"m": "x"}'],
    ),
}


@pytest.mark.parametrize("name", PUT_TOGETHER)
def test_xml_calls_have_the_parameters_that_combined_schemas_require(name: str) -> None:
    parameters, good, bad = PUT_TOGETHER[name]
    grammar = calls_grammar("qwen3_coder", [CallableTool("f", parameters)], TOKENIZER.id_of, only_one=True)
    for arguments in (*good, *bad):
        values = {key: json.dumps(value) for key, value in json.loads(arguments).items()}
        text = xml_of("f", json.dumps(values))
        assert is_of(grammar, text) is (arguments in good), arguments
        parser = ReplySyntax("qwen3_coder").parser({"f": parameters})
        (call,) = assembled([*parser.push(text), *parser.finish()]).calls
        assert json.loads(call.arguments) == json.loads(arguments)


STRICT = {
    "type": "object",
    "properties": {"days": {"type": "integer"}, "city": {"type": "string", "maxLength": 9}},
    "required": ["days", "city"],
    "additionalProperties": False,
}
TOOLS = [CallableTool("get_weather", STRICT), CallableTool("f", None)]
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "nemotron_nano_v2": '<TOOLCALL>[{"name": "%s", "arguments": %s}]</TOOLCALL>',
    "granite": '<|tool_call|>[{"name": "%s", "arguments": %s}]',
}


def xml_of(name: str, arguments: str) -> str:
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in json.loads(arguments).items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


@pytest.mark.parametrize("form", MARKED_CALLS)
def test_calls_to_strict_tools_are_constrained_when_calls_are_optional(form: str) -> None:
    grammar = text_and_calls_grammar(form, TOOLS, TOKENIZER.id_of)
    assert grammar is not None

    def call(name: str, arguments: str) -> str:
        return xml_of(name, arguments) if form == "qwen3_coder" else WRITTEN[form] % (name, arguments)

    good, free = call("get_weather", '{"days": 3, "city": "Oslo"}'), call("f", '{"x": 1, "y": [{}]}')
    marker = MARKED_CALLS[form].marker
    for text in ("", "Hello.\n", good, f"I look.\n{good}", f"{good}\n{free} so", f"{free}{good}", marker[:-1], "{[<日"):
        assert is_of(grammar, text), text
    bad = [
        call("get_weather", '{"days": "x", "city": "Oslo"}'),
        call("get_weather", '{"days": 3, "city": "Oslo, far away"}'),
        call("get_weather", "{}"),
        call("other", "{}"),
        f"{marker} is a marker",
        marker,
    ]
    for text in bad:
        assert not is_of(grammar, text), text
        assert not is_of(grammar, f"So: {good} {text}"), text


@pytest.mark.parametrize("form", MARKED_CALLS)
def test_random_calls_to_strict_tools_satisfy_their_schemas(form: str) -> None:
    """Tokens are sampled from the allowed tokens; a marker is sometimes inserted first."""
    grammar = text_and_calls_grammar(form, TOOLS[:1], TOKENIZER.id_of)
    assert grammar is not None
    rng, num_calls = random.Random(form), 0
    for _ in range(40):
        matcher, tokens = matcher_of(grammar), list[int]()
        while len(tokens) < 400 and (not tokens or tokens[-1] != END):
            if rng.random() < 0.05:
                begun = TOKENIZER.tokenize("\n" * bool(tokens) + MARKED_CALLS[form].marker)
                count = matcher.try_consume_tokens(begun)
                tokens += begun[:count]
            allowed = tokens_of_mask(matcher.compute_bitmask(), TOKENIZER.vocab_size)
            assert allowed, TOKENIZER.detokenize(tokens)
            tokens.append(END if END in allowed and rng.random() < 0.02 else rng.choice(allowed))
            assert matcher.consume_token(tokens[-1])
        parser = ReplySyntax(form).parser({"get_weather": STRICT})
        calls = assembled([*parser.push(TOKENIZER.detokenize(tokens)), *parser.finish()]).calls
        for found in calls[: parser.num_complete_calls]:
            assert found.name == "get_weather" and jsonschema_rs.is_valid(STRICT, json.loads(found.arguments)), found
            num_calls += 1
    assert num_calls > 5, num_calls
