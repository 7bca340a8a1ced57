"""Grammars that constrain tool calls to the tag format that `XmlCalls` parses."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import GrammarError
from ...grammars.compiler import has_text
from ...grammars.forms import (
    Grammar,
    SpecialId,
    any_of,
    choice_grammar,
    json_grammar,
    literal,
    matching,
    quoted,
    sequence,
)
from ...grammars.held_words import UNHELD
from ...grammars.object_alternatives import object_alternatives
from ...grammars.patterns import is_found, whole_patterns
from ...grammars.reasoning import SPACE
from ...grammars.schema_words import TYPES, at_location, list_of, type_of_value, types_of, with_root
from .parameter_types import resolved, types_of_parameter

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallableTool:
    """Tool that a reply may call."""

    name: str
    # JSON schema for the arguments object; None allows any object.
    parameters: Mapping[str, Any] | None = field(default_factory=lambda: _NO_PARAMETERS)


_COMBINED = {"anyOf", "oneOf", "allOf"}
_NOTHING: tuple[Any, ...] = (False, {"not": {}})
_MOST_RICH, _MOST_SAFE = 100, 2_000
"""Limits on the markup in strings with `maxLength`. A string of up to `_MOST_RICH` characters may contain any markup
except a value's end, and one of up to `_MOST_SAFE` must match `_SAFE`. Longer strings may not contain `<`, because the
cost of excluding value ends grows with the length."""
_SAFE = "([^<]|<([^<\\/p]|p[^<a]|\\/([^<pf]|p[^<a]|f[^<u])))*"
"""Pattern for strings that do not contain even the first characters of a value's end."""
_VALUE_END = r"\n<\/parameter>\n"
_VALUE_ENDS = (  # tags that end a value for `XmlCalls`
    rf"<\/parameter>{SPACE}(<parameter=|<\/parameter>|<\/function>|<\/tool_call>)"
    rf"|\n<parameter=|<\/function>{SPACE}<\/tool_call>"
)


def xml_call(tool: CallableTool, number: int, special_id: SpecialId) -> Grammar:
    """Return the grammar for a call, without its first tag; `number` makes the rule names unique in the grammar."""
    opening = Grammar(quoted(f"\n<function={tool.name}>\n"))
    closing = Grammar(literal("</function>\n</tool_call>", special_id))
    if tool.parameters is None:
        name = f"parameters{number}"
        anything = Grammar(name, {f"{name}[lazy]": r"/(.|\n)*<\/function>\n/"})
        return sequence(opening, anything, Grammar(literal("</tool_call>", special_id)))
    with at_location(f"the parameters of {tool.name}"):
        calls = [
            sequence(*_parameters(alternative, f"value{number}_{index}", tool), closing)
            for index, alternative in enumerate(object_alternatives(tool.parameters))
        ]
    return sequence(opening, any_of(*calls))


def _parameters(alternative: Mapping[str, Any], name: str, tool: CallableTool) -> list[Grammar]:
    """Return one grammar for each property of the object schema `alternative`, in the schema's order."""
    return [
        _parameter(key, schema, f"{name}_{index}", tool, is_required=key in alternative["required"])
        for index, (key, schema) in enumerate(alternative["properties"].items())
    ]


def _parameter(key: str, schema: Any, name: str, tool: CallableTool, *, is_required: bool) -> Grammar:
    opening, closing = Grammar(quoted(f"<parameter={key}>\n")), "\n</parameter>\n"
    root: Mapping[str, Any] = tool.parameters or {}
    target = resolved(schema, root)
    is_missing = not target and isinstance(schema, Mapping) and "$ref" in schema
    if _is_text(key, target, root) and not is_missing:
        with at_location(f"properties.{key}"):
            value = _value([target], name, root)
    else:
        value = json_grammar(with_root(schema, root), name, f"the parameter {key} of {tool.name}")
        value = sequence(value, Grammar(quoted(closing)))
    parameter = sequence(opening, value)
    return parameter if is_required else Grammar(f"({parameter.rule})?", parameter.rules, parameter.parts)


def _value(schemas: Sequence[Any], name: str, root: Mapping[str, Any]) -> Grammar:
    """Return the grammar for a string value that satisfies all schemas, and for its closing tag."""
    parts = [resolved(part, root) for schema in schemas for part in (schema, *list_of(schema.get("allOf")))]
    for number, part in enumerate(parts):
        word = next((word for word in ("anyOf", "oneOf") if list_of(part.get(word))), None)
        if word is not None:
            rest = {key: part[key] for key in part if key not in (word, "allOf")}
            others = [*parts[:number], rest, *parts[number + 1 :]]
            branches = [branch for branch in part[word] if branch not in _NOTHING]
            return any_of(
                *(
                    _value([*others, resolved(branch, root)], f"{name}_{index}", root)
                    for index, branch in enumerate(branches)
                )
            )
    unheld = sorted(UNHELD & set[str]().union(*parts))
    if unheld:
        raise GrammarError(f"{unheld[0]} cannot be enforced; leave it out")
    for part in parts:
        for word in ("minLength", "maxLength"):
            if word in part and (type(part[word]) is not int or part[word] < 0):
                raise GrammarError(f"{word} must be an integer of 0 or more, not {part[word]!r:.50}")
        if not all(name is None or name in TYPES for name in _named_types(part)):
            raise GrammarError(f"{part['type']!r:.50} is not a type of JSON Schema; use one of {', '.join(TYPES)}")
    lists = [part.get("enum", [part["const"]] if "const" in part else None) for part in parts]
    lists = [values for values in lists if isinstance(values, list) and values]
    if lists:
        common = [value for value in lists[0] if all(str(value) in map(str, values) for values in lists)]
        held = [str(value) for value in common if _may_be(value, parts)]
        if not held:
            raise GrammarError("no value is allowed: no enum value satisfies all constraints")
        return sequence(choice_grammar(held), Grammar(quoted("\n</parameter>\n")))
    return _text(parts, name)


def _may_be(value: Any, parts: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if all schemas allow an enum value, and the call format can represent the value."""
    if not all(type_of_value(value) in types_of(part) for part in parts):
        return False
    if not isinstance(value, str):
        return True
    lengths = [part.get("minLength", 0) <= len(value) <= part.get("maxLength", len(value)) for part in parts]
    patterns = [part["pattern"] for part in parts if isinstance(part.get("pattern"), str)]
    ends = re.search(_VALUE_ENDS.replace("\\/", "/"), f"{value}\n")
    return all(lengths) and all(is_found(pattern, value) for pattern in patterns) and ends is None


def _text(parts: Sequence[Mapping[str, Any]], name: str) -> Grammar:
    """Return the grammar for a string with the schemas' length, pattern and format, and for its closing tag."""
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
        raise GrammarError("no string matches the pattern, the format and the length together")
    rules: dict[str, str] = {}
    for number, text in enumerate(texts):
        key = f"{name}_{number}"
        rules |= {f"{key}[lazy]": key.upper(), key.upper(): text}
    return Grammar(" | ".join(rule.removesuffix("[lazy]") for rule in rules if rule.endswith("[lazy]")), rules)


def _is_text(key: str, target: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Return True if `XmlCalls` parses a parameter's value as text, False if as JSON."""
    types = types_of_parameter(root, key)
    return types == {"string"} or not (types or target.keys() & _COMBINED) or "string" in _named_types(target)


def _named_types(target: Mapping[str, Any]) -> list[Any]:
    named = target.get("type")
    return named if isinstance(named, list) else [named]
