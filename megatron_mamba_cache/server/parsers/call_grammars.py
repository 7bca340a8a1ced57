"""Tool calls as grammars, so that a reply cannot be anything else: in the form that the family's parser reads."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...grammars.forms import Grammar, SpecialId, any_of, choice_grammar, json_grammar, literal, quoted, sequence
from .parameter_types import resolved, types_of_parameter

_MOST_CALLS = 16
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_DEFINITIONS = ("$defs", "definitions")
_COMBINED = {"anyOf", "oneOf", "allOf"}
_VALUE_END = r"\n<\/parameter>\n"
_VALUE_ENDS = r"<\/parameter>|\n<parameter=|<\/function>(\s|[\x1c-\x1f])*<\/tool_call>"  # for `XmlCalls`


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that a reply may call.

    Args:
        parameters: The JSON schema of its arguments, an object; None: any object.
    """

    name: str
    parameters: Mapping[str, Any] | None = field(default_factory=lambda: _NO_PARAMETERS)


@dataclass(frozen=True, slots=True)
class MarkedCalls:
    """Calls behind a marker, as a family writes them.

    Args:
        marker: What every call, or list of calls, begins with.
        rest: Returns the grammar of what follows the marker, given how many calls a list may have.
        separator: A rule between calls with a marker each; None: calls are a list behind one marker.
        others: What else the family's parser takes for the beginning of calls.
    """

    marker: str
    rest: Callable[[Sequence[CallableTool], SpecialId, int], Grammar]
    separator: str | None = None
    others: tuple[str, ...] = ()

    def calls(self, tools: Sequence[CallableTool], special_id: SpecialId, most: int) -> Grammar:
        """Return the grammar of one to so many calls of any of the tools."""
        calls = sequence(Grammar(literal(self.marker, special_id)), self.rest(tools, special_id, most))
        return calls if self.separator is None else _repeated(calls, self.separator, most)

    def text_and_calls(self, tools: Sequence[CallableTool], special_id: SpecialId) -> Grammar:
        """Return the grammar of any text in which calls are calls of the tools."""
        number = special_id(self.marker)
        rules = {"TEXT": f"/(.|\\n)*/ & {_without((self.marker, *self.others))}"}
        begun = f"TEXT <[{number}]>"
        if number is None:
            begun, marked = "text_and_marker", f"/(.|\\n)*{re.escape(self.marker)}/"
            rules["text_and_marker[lazy]"] = "TEXT_AND_MARKER"
            rules["TEXT_AND_MARKER"] = f"{marked} & {_without(self.others)}" if self.others else marked
        rest = self.rest(tools, special_id, _MOST_CALLS)
        return Grammar(f"({begun} ({rest.rule}))* TEXT", rules | dict(rest.rules or {}), rest.parts)


def _hermes_rest(tools: Sequence[CallableTool], special_id: SpecialId, _most: int) -> Grammar:
    closing = Grammar(literal("\n</tool_call>", special_id))
    return sequence(Grammar(quoted("\n")), _json_call(tools, "arguments"), closing)


def _nemotron_rest(tools: Sequence[CallableTool], special_id: SpecialId, most: int) -> Grammar:
    closing = Grammar(literal("]</TOOLCALL>", special_id))
    return sequence(Grammar(quoted("[")), _repeated(_json_call(tools, "arguments"), quoted(", "), most), closing)


def _granite_rest(tools: Sequence[CallableTool], _special_id: SpecialId, most: int) -> Grammar:
    calls = _repeated(_json_call(tools, "arguments"), quoted(", "), most)
    return sequence(Grammar(quoted("[")), calls, Grammar(quoted("]")))


def _xml_rest(tools: Sequence[CallableTool], special_id: SpecialId, _most: int) -> Grammar:
    """Return the grammar of a call: parameters in the order of the schema, text or JSON as their types say."""
    return any_of(*(_xml_call(tool, number, special_id) for number, tool in enumerate(tools)))


MARKED_CALLS: Mapping[str, MarkedCalls] = {
    "hermes": MarkedCalls("<tool_call>", _hermes_rest, quoted("\n")),
    "qwen3_coder": MarkedCalls("<tool_call>", _xml_rest, quoted("\n"), ("<function=",)),
    "nemotron_nano_v2": MarkedCalls("<TOOLCALL>", _nemotron_rest),
    "granite": MarkedCalls("<|tool_call|>", _granite_rest, others=("<tool_call>",)),
}
"""By the names of `TOOL_CALL_PARSERS`; the form that is not here, `json`, has no marker."""


def calls_grammar(family: str, tools: Sequence[CallableTool], special_id: SpecialId, *, only_one: bool) -> Grammar:
    """Return the grammar of a reply that calls tools, at least one time."""
    form = MARKED_CALLS.get(family)
    if form is None:
        return _json_call(tools, "parameters")
    return form.calls(tools, special_id, 1 if only_one else _MOST_CALLS)


def text_and_calls_grammar(family: str, tools: Sequence[CallableTool], special_id: SpecialId) -> Grammar | None:
    """Return the grammar of a reply that may call tools, None if its calls cannot be told from text."""
    form = MARKED_CALLS.get(family)
    return None if form is None else form.text_and_calls(tools, special_id)


def _without(texts: Sequence[str]) -> str:
    """Return a rule that matches any text without some texts in it."""
    return f"~/(.|\\n)*({'|'.join(map(re.escape, texts))})(.|\\n)*/"


def _json_call(tools: Sequence[CallableTool], key: str) -> Grammar:
    return any_of(
        *(
            sequence(
                Grammar(quoted(f'{{"name": {quoted(tool.name)}, "{key}": ')),
                json_grammar(_ANY_OBJECT if tool.parameters is None else tool.parameters, f"arguments{number}"),
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
    opening = Grammar(quoted(f"\n<function={tool.name}>\n"))
    closing = Grammar(literal("</function>\n</tool_call>", special_id))
    if tool.parameters is None:
        name = f"parameters{number}"
        anything = Grammar(name, {f"{name}[lazy]": r"/(.|\n)*<\/function>\n/"})
        return sequence(opening, anything, Grammar(literal("</tool_call>", special_id)))
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
        text = rf"/(.|\n){bounds}{_VALUE_END}/ & ~/(.|\n)*({_VALUE_ENDS})(.|\n)*{_VALUE_END}/"
        value = Grammar(name, {f"{name}[lazy]": name.upper(), name.upper(): text})
    parameter = sequence(opening, value)
    return parameter if is_required else Grammar(f"({parameter.rule})?", parameter.rules, parameter.parts)


def _is_text(key: str, told: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Return whether a parameter is written as it is, not as JSON: as `XmlCalls` reads it, whatever else it may be."""
    types = types_of_parameter(root, key)
    return types == {"string"} or not (types or told.keys() & _COMBINED) or "string" in _named_types(told)


def _named_types(told: Mapping[str, Any]) -> list[Any]:
    named = told.get("type")
    return named if isinstance(named, list) else [named]
