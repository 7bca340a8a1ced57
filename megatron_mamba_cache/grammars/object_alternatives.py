"""Expand an object schema into alternatives that only list properties, for tool calls in XML."""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from ..errors import GrammarError
from .exclusive_branches import exclude_branches
from .held_words import UNHELD, drop_empty_words
from .patterns import pattern_of_names
from .schema_words import list_of, mapping_of, target_of, without_notes

_MOST_ALTERNATIVES = 32
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf")
_OF_OTHERS = {"contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"}
"""Keywords for arrays and for properties that a schema does not list; tool calls in XML have neither."""


def object_alternatives(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a dict for each alternative of an object schema, with its allowed "properties" and "required" names.

    Raises:
        GrammarError: If there are too many alternatives or none, or if a keyword cannot be enforced.
    """
    if not any(word in schema for word in _COMBINED):
        found = [_merged([schema])]
    else:
        whole = without_notes(schema)
        exclude_branches(whole)
        found = [_merged(parts) for parts in _ways(whole, whole, 0)]
    possible = [alternative for alternative in map(_without_false, found) if alternative is not None]
    if not possible:
        raise GrammarError("no object satisfies the schema, because a required property is not allowed")
    return possible


def _ways(schema: Any, root: Any, depth: int) -> list[list[dict[str, Any]]]:
    """Return a list of schemas for each combination of alternatives; a value must satisfy all schemas in a list."""
    if not isinstance(schema, dict) or depth > 16:
        return [[]] if schema is not False else []
    own = {word: value for word, value in schema.items() if word not in _COMBINED}
    groups = [[[own]]]
    if isinstance(schema.get("$ref"), str):
        groups.append(_ways(target_of(schema["$ref"], root), root, depth + 1))
    groups += [_ways(part, root, depth + 1) for part in list_of(schema.get("allOf"))]
    if list_of(schema.get("anyOf")):
        groups.append([way for branch in schema["anyOf"] for way in _ways(branch, root, depth + 1)])
    count = prod(map(len, groups))
    if count > _MOST_ALTERNATIVES:
        raise GrammarError(
            f"anyOf and oneOf combine to {count} alternatives; at most {_MOST_ALTERNATIVES} can be enforced"
        )
    return [[part for way in ways for part in way] for ways in product(*groups)]


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    plain = [_plain(part) for part in parts]
    properties: dict[str, Any] = {}
    for part in plain:
        for name, value in part["properties"].items():
            earlier = properties.get(name, value)
            is_forbidden = value is False or earlier is False
            properties[name] = False if is_forbidden else value if earlier == value else {"allOf": [earlier, value]}
    closed = [part["properties"] for part in plain if part["others"] is False]
    for name in properties:
        if any(name not in own for own in closed):
            properties[name] = False
    required = [name for part in plain for name in part["required"]]
    for schema in parts:
        _check_words(schema, {*required, *properties}, len(set(required)))
    is_open = all(part.get("unevaluatedProperties") is not False for part in parts)
    others = next((part["others"] for part in plain if part["others"] is not True), is_open)
    return {"properties": properties, "required": required, "others": others}


def _plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    required = [name for name in list_of(schema.get("required")) if isinstance(name, str)]
    others = schema.get("additionalProperties", True)
    return {"properties": dict(mapping_of(schema.get("properties"))), "required": required, "others": others}


def _check_words(schema: Mapping[str, Any], names: set[str], num_required: int) -> None:
    """Raise `GrammarError` if a schema has a keyword that cannot be expressed by listing properties."""
    words = dict(schema)
    drop_empty_words(words)
    unheld = {word for word in UNHELD - _OF_OTHERS if word in words}
    least, most = words.get("minProperties"), words.get("maxProperties")
    unheld |= {"minProperties"} if isinstance(least, int) and least > num_required else set()
    unheld |= {"maxProperties"} if isinstance(most, int) and most < len(names) else set()
    unheld |= {"propertyNames"} if not _may_have(words.get("propertyNames", {}), names) else set()
    patterns = mapping_of(words.get("patternProperties"))
    unheld |= {"patternProperties"} if any(_may_match(pattern, names) for pattern in patterns) else set()
    if unheld:
        raise GrammarError(f"{min(unheld)} cannot be enforced; leave it out")


def _may_have(schema: Any, names: set[str]) -> bool:
    """Return True if a `propertyNames` schema allows all these names; False if not, or if that is unknown."""
    if isinstance(schema, Mapping) and isinstance(schema.get("enum"), list):
        return names.issubset(map(str, schema["enum"]))
    try:
        return not schema or not names or all(re.search(pattern_of_names(schema), name) for name in names)
    except (GrammarError, re.error):
        return False


def _may_match(pattern: str, names: set[str]) -> bool:
    try:
        return any(re.search(pattern, name) for name in names)
    except re.error:
        return bool(names)


def _without_false(alternative: dict[str, Any]) -> dict[str, Any] | None:
    """Return an alternative without its forbidden properties; None if a forbidden property is required."""
    properties = {**dict.fromkeys(alternative["required"], alternative["others"]), **alternative["properties"]}
    properties = {name: properties[name] for name in [*alternative["properties"], *properties]}
    if any(properties[name] is False for name in alternative["required"]):
        return None
    kept = {name: value for name, value in properties.items() if value is not False}
    return {"properties": kept, "required": alternative["required"]}
