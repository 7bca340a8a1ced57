"""Tool calls as grammars, so that a reply cannot be anything else: in the form that the family's parser reads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...grammars.forms import Grammar, SpecialId, any_of, choice_grammar, json_grammar, literal, quoted, sequence
from .parameter_types import resolved, types_of_parameter

_MOST_CALLS = 16
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_DEFINITIONS = ("$defs", "definitions")
_COMBINED = {"anyOf", "oneOf", "allOf"}


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that a reply may call; `parameters` is the JSON schema of its arguments, an object."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: _NO_PARAMETERS)


CallGrammar = Callable[[Sequence[CallableTool], SpecialId, int], Grammar]
"""Returns the grammar of one to so many calls of any of the tools."""


def hermes_calls(tools: Sequence[CallableTool], special_id: SpecialId, most: int) -> Grammar:
    """Return the grammar of `JsonCalls` of Hermes' form: each call between markers of its own."""
    opening, closing = (Grammar(literal(text, special_id)) for text in ("<tool_call>\n", "\n</tool_call>"))
    return _repeated(sequence(opening, _json_call(tools, "arguments"), closing), quoted("\n"), most)


def nemotron_calls(tools: Sequence[CallableTool], special_id: SpecialId, most: int) -> Grammar:
    """Return the grammar of Nemotron Nano v2's calls: a list between markers."""
    opening, closing = (Grammar(literal(text, special_id)) for text in ("<TOOLCALL>[", "]</TOOLCALL>"))
    return sequence(opening, _repeated(_json_call(tools, "arguments"), quoted(", "), most), closing)


def granite_calls(tools: Sequence[CallableTool], special_id: SpecialId, most: int) -> Grammar:
    """Return the grammar of Granite 3's calls: a list behind a marker."""
    opening, closing = Grammar(literal("<|tool_call|>[", special_id)), Grammar(quoted("]"))
    return sequence(opening, _repeated(_json_call(tools, "arguments"), quoted(", "), most), closing)


def plain_json_call(tools: Sequence[CallableTool], _special_id: SpecialId, _most: int) -> Grammar:
    """Return the grammar of one call as a bare JSON object."""
    return _json_call(tools, "parameters")


def xml_calls(tools: Sequence[CallableTool], special_id: SpecialId, most: int) -> Grammar:
    """Return the grammar of `XmlCalls`: parameters in the order of the schema, text or JSON as their types say."""
    call = any_of(*(_xml_call(tool, number, special_id) for number, tool in enumerate(tools)))
    return _repeated(call, quoted("\n"), most)


CALL_GRAMMARS: Mapping[str, CallGrammar] = {
    "hermes": hermes_calls,
    "qwen3_coder": xml_calls,
    "nemotron_nano_v2": nemotron_calls,
    "granite": granite_calls,
    "json": plain_json_call,
}
"""By the names of `TOOL_CALL_PARSERS`."""


def calls_grammar(family: str, tools: Sequence[CallableTool], special_id: SpecialId, *, only_one: bool) -> Grammar:
    """Return the grammar of a reply that calls tools, at least one time."""
    return CALL_GRAMMARS[family](tools, special_id, 1 if only_one else _MOST_CALLS)


def _json_call(tools: Sequence[CallableTool], key: str) -> Grammar:
    return any_of(
        *(
            sequence(
                Grammar(quoted(f'{{"name": {quoted(tool.name)}, "{key}": ')),
                json_grammar(tool.parameters, f"arguments{number}"),
                Grammar(quoted("}")),
            )
            for number, tool in enumerate(tools)
        )
    )


def _repeated(grammar: Grammar, separator: str, most: int) -> Grammar:
    if most == 1:
        return grammar
    rule = f"({grammar.rule}) ({separator} ({grammar.rule})){{0,{most - 1}}}"
    return Grammar(rule, grammar.rules, grammar.parts)


def _xml_call(tool: CallableTool, number: int, special_id: SpecialId) -> Grammar:
    opening = Grammar(literal(f"<tool_call>\n<function={tool.name}>\n", special_id))
    closing = Grammar(literal("</function>\n</tool_call>", special_id))
    required, properties = tool.parameters.get("required"), tool.parameters.get("properties")
    required = required if isinstance(required, list) else []
    properties = properties if isinstance(properties, Mapping) else {}
    parameters = [
        _xml_parameter(key, schema, f"value{number}_{place}", tool.parameters, is_required=key in required)
        for place, (key, schema) in enumerate(properties.items())
    ]
    return sequence(opening, *parameters, closing)


def _xml_parameter(key: str, schema: Any, name: str, root: Mapping[str, Any], *, is_required: bool) -> Grammar:
    opening, closing = Grammar(quoted(f"<parameter={key}>\n")), "\n</parameter>\n"
    told = resolved(schema, root)
    values = told.get("enum", [told["const"]] if "const" in told else None)
    if not _is_text(key, told, root):
        whole = {**schema, **{word: root[word] for word in _DEFINITIONS if word in root}}
        value = sequence(json_grammar(whole, name), Grammar(quoted(closing)))
    elif isinstance(values, list) and values:
        value = sequence(choice_grammar(list(map(str, values))), Grammar(quoted(closing)))
    else:
        bounds = f"{{{told.get('minLength', 0)},{told['maxLength']}}}" if "maxLength" in told else "*"
        value = Grammar(name, {f"{name}[lazy]": rf"/(.|\n){bounds}\n<\/parameter>\n/"})
    parameter = sequence(opening, value)
    return parameter if is_required else Grammar(f"({parameter.rule})?", parameter.rules, parameter.parts)


def _is_text(key: str, told: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Return whether a parameter is written as it is, not as JSON: as `XmlCalls` reads it, whatever else it may be."""
    types = types_of_parameter(root, key)
    return types == {"string"} or not (types or told.keys() & _COMBINED) or "string" in _named_types(told)


def _named_types(told: Mapping[str, Any]) -> list[Any]:
    named = told.get("type")
    return named if isinstance(named, list) else [named]
