"""Tool calls as grammars, so that a reply cannot be anything else: in the form that the family's parser reads."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import GrammarError
from ...grammars.compiler import has_text
from ...grammars.forms import (
    Grammar,
    SpecialId,
    any_of,
    choice_grammar,
    escaped,
    json_grammar,
    literal,
    matching,
    quoted,
    sequence,
    without,
)
from ...grammars.held_words import UNHELD
from ...grammars.object_alternatives import object_alternatives
from ...grammars.patterns import is_found, whole_patterns
from ...grammars.schema_words import TYPES, at_place, list_of, type_of_value, types_of, with_root
from .parameter_types import resolved, types_of_parameter

_MOST_CALLS = 16
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_COMBINED = {"anyOf", "oneOf", "allOf"}
_NOTHING: tuple[Any, ...] = (False, {"not": {}})
_MOST_RICH, _MOST_SAFE = 100, 2_000
"""Characters of a text of bounded length that may have any markup, and markup that is like no end of a value: the time
to exclude the ends grows with the length. Longer texts have no `<`."""
_SAFE = "([^<]|<([^<\\/p]|p[^<a]|\\/([^<pf]|p[^<a]|f[^<u])))*"
"""Texts that do not even begin what might end a value before its end."""
_VALUE_END = r"\n<\/parameter>\n"
_SPACE = r"(\s|[\x1c-\x1f])*"
_VALUE_ENDS = (  # for `XmlCalls`
    rf"<\/parameter>{_SPACE}(<parameter=|<\/parameter>|<\/function>|<\/tool_call>)"
    rf"|\n<parameter=|<\/function>{_SPACE}<\/tool_call>"
)


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
        rules = {"TEXT": f"/(.|\\n)*/ & {without(self.marker, *self.others)}"}
        begun = f"TEXT <[{number}]>"
        if number is None:
            marker = escaped(self.marker)
            marked = f"/((.|\\n)*\\n)?[ \\t]*{marker}/ & ~/(.|\\n)*{marker}(.|\\n)+/"
            others = f" & {without(*self.others)}" if self.others else ""
            rules |= {"text_and_marker[lazy]": "TEXT_AND_MARKER", "TEXT_AND_MARKER": marked + others}
            begun = "text_and_marker"
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


def _json_call(tools: Sequence[CallableTool], key: str) -> Grammar:
    return any_of(
        *(
            sequence(
                Grammar(quoted(f'{{"name": {quoted(tool.name)}, "{key}": ')),
                json_grammar(
                    _ANY_OBJECT if tool.parameters is None else tool.parameters,
                    f"arguments{number}",
                    f"the parameters of {tool.name}",
                ),
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
    with at_place(f"the parameters of {tool.name}"):
        calls = [
            sequence(*_xml_parameters(alternative, f"value{number}_{place}", tool), closing)
            for place, alternative in enumerate(object_alternatives(tool.parameters))
        ]
    return sequence(opening, any_of(*calls))


def _xml_parameters(alternative: Mapping[str, Any], name: str, tool: CallableTool) -> list[Grammar]:
    """Return the grammar of each parameter of an object, in the order of its properties."""
    return [
        _xml_parameter(key, schema, f"{name}_{place}", tool, is_required=key in alternative["required"])
        for place, (key, schema) in enumerate(alternative["properties"].items())
    ]


def _xml_parameter(key: str, schema: Any, name: str, tool: CallableTool, *, is_required: bool) -> Grammar:
    opening, closing = Grammar(quoted(f"<parameter={key}>\n")), "\n</parameter>\n"
    root: Mapping[str, Any] = tool.parameters or {}
    told = resolved(schema, root)
    is_missing = not told and isinstance(schema, Mapping) and "$ref" in schema
    if _is_text(key, told, root) and not is_missing:
        with at_place(f"properties.{key}"):
            value = _xml_value([told], name, root)
    else:
        value = json_grammar(with_root(schema, root), name, f"the parameter {key} of {tool.name}")
        value = sequence(value, Grammar(quoted(closing)))
    parameter = sequence(opening, value)
    return parameter if is_required else Grammar(f"({parameter.rule})?", parameter.rules, parameter.parts)


def _xml_value(schemas: Sequence[Any], name: str, root: Mapping[str, Any]) -> Grammar:
    """Return the grammar of a text of which all schemas hold, and the end of its parameter."""
    parts = [resolved(part, root) for schema in schemas for part in (schema, *list_of(schema.get("allOf")))]
    for number, part in enumerate(parts):
        word = next((word for word in ("anyOf", "oneOf") if list_of(part.get(word))), None)
        if word is not None:
            rest = {key: part[key] for key in part if key not in (word, "allOf")}
            others = [*parts[:number], rest, *parts[number + 1 :]]
            branches = [branch for branch in part[word] if branch not in _NOTHING]
            return any_of(
                *(
                    _xml_value([*others, resolved(branch, root)], f"{name}_{place}", root)
                    for place, branch in enumerate(branches)
                )
            )
    unheld = sorted(UNHELD & set[str]().union(*parts))
    if unheld:
        raise GrammarError(f"{unheld[0]} cannot be held to; leave it out")
    for part in parts:
        for word in ("minLength", "maxLength"):
            if word in part and (type(part[word]) is not int or part[word] < 0):
                raise GrammarError(f"{word} has to be an integer of 0 or more, not {part[word]!r:.50}")
        if not all(name is None or name in TYPES for name in _named_types(part)):
            raise GrammarError(f"{part['type']!r:.50} is not a type of JSON Schema; use one of {', '.join(TYPES)}")
    lists = [part.get("enum", [part["const"]] if "const" in part else None) for part in parts]
    lists = [values for values in lists if isinstance(values, list) and values]
    if lists:
        common = [value for value in lists[0] if all(str(value) in map(str, values) for values in lists)]
        held = [str(value) for value in common if _may_be(value, parts)]
        if not held:
            raise GrammarError("no value is allowed: no enum value is left")
        return sequence(choice_grammar(held), Grammar(quoted("\n</parameter>\n")))
    return _xml_text(parts, name)


def _may_be(value: Any, parts: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether schemas allow a value of their lists by its type, length and pattern, and calls can write it."""
    if not all(type_of_value(value) in types_of(part) for part in parts):
        return False
    if not isinstance(value, str):
        return True
    lengths = [part.get("minLength", 0) <= len(value) <= part.get("maxLength", len(value)) for part in parts]
    patterns = [part["pattern"] for part in parts if isinstance(part.get("pattern"), str)]
    ends = re.search(_VALUE_ENDS.replace("\\/", "/"), f"{value}\n")
    return all(lengths) and all(is_found(pattern, value) for pattern in patterns) and ends is None


def _xml_text(parts: Sequence[Mapping[str, Any]], name: str) -> Grammar:
    """Return the grammar of a text by its length, pattern and format, and the end of its parameter."""
    least = max(part.get("minLength", 0) for part in parts)
    most = min((part["maxLength"] for part in parts if "maxLength" in part), default=None)
    ends = rf"~/(.|\n)*({_VALUE_ENDS})(.|\n)*/"
    if most is not None and least > most:
        raise GrammarError(f"no value is allowed: minLength ({least}) is greater than maxLength ({most})")
    kinds: list[tuple[str, ...]] = [(matching(f"(?s:.{{{least},{'' if most is None else most}}}){_VALUE_END}"), ends)]
    if most is not None and most > _MOST_RICH:
        bounds = [f"{{{least},{max(least, cap)}}}" for cap in (_MOST_RICH, min(most, _MOST_SAFE), most)]
        counted = (f"(?s:.{bounds[0]})", f"(?s:.{bounds[1]})", f"[^<]{bounds[2]}")
        rich, safe, plain = (matching(f"{text}{_VALUE_END}") for text in counted)
        kinds = [(rich, ends), (safe, matching(f"{_SAFE}{_VALUE_END}")), (plain,)]
    held = [matching(f"{pattern}{_VALUE_END}") for part in parts for pattern in whole_patterns(part)]
    texts = [" & ".join((*terms, *held)) for terms in kinds]
    if held and not any(map(has_text, texts)):
        raise GrammarError("no string is of the pattern, the format and the length together")
    rules: dict[str, str] = {}
    for number, text in enumerate(texts):
        key = f"{name}_{number}"
        rules |= {f"{key}[lazy]": key.upper(), key.upper(): text}
    return Grammar(" | ".join(rule.removesuffix("[lazy]") for rule in rules if rule.endswith("[lazy]")), rules)


def _is_text(key: str, told: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Return whether a parameter is written as it is, not as JSON: as `XmlCalls` reads it, whatever else it may be."""
    types = types_of_parameter(root, key)
    return types == {"string"} or not (types or told.keys() & _COMBINED) or "string" in _named_types(told)


def _named_types(told: Mapping[str, Any]) -> list[Any]:
    named = told.get("type")
    return named if isinstance(named, list) else [named]
