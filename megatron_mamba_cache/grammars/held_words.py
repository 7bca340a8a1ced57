"""Rewrite JSON Schema keywords that llguidance does not support as supported keywords, or reject the schema."""

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import permutations
from math import perm
from typing import Any

from ..errors import GrammarError
from .patterns import pattern_of_names, pattern_of_properties, words_of_format, words_of_pattern
from .schema_words import (
    TYPES,
    also,
    at_location,
    is_same,
    list_of,
    locations_in,
    mapping_of,
    resolved,
    type_of_value,
    types_of,
)

Schema = dict[str, Any]
UNHELD = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "dependencies", "dependentRequired"),
        *("dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
    )
)
"""JSON Schema keywords that cannot be enforced."""
_ANY: tuple[Any, ...] = (True, {})
_NO_WORDS: dict[str, tuple[Any, ...]] = {
    **{word: (*_ANY, None) for word in ("unevaluatedItems", "unevaluatedProperties")},
    "propertyNames": (*_ANY, {"type": "string"}),
    "uniqueItems": (False,),
    "not": (False, {"not": {}}),
    **{word: ({},) for word in ("dependencies", "dependentRequired", "dependentSchemas")},
}
"""Keyword → values for which the keyword has no effect."""
_MOST_ORDERS = 120
Refusal = Callable[[Schema], str | None]
"""Returns the error that llguidance gives for a schema; None if it compiles the schema."""


def hold_words(root: Any, refusal: Refusal) -> None:
    """Rewrite a JSON schema of any version, in place, so that it has only keywords that llguidance enforces.

    Raises:
        GrammarError: If a keyword cannot be enforced; the message gives its location.
    """
    root.pop("$schema", None)
    hold_strings = partial(_hold_strings, refusal=refusal)
    for step in (drop_empty_words, _hold_names, hold_strings, _hold_unique, _refuse_others):
        for location, found in locations_in(root).items():
            with at_location(location):
                step(found, root)


def drop_empty_words(schema: Schema, _root: Any = None) -> None:
    """Remove keywords that have no effect, and rewrite keywords from older versions of JSON Schema, in place."""
    for word, values in _NO_WORDS.items():
        if word in schema and any(is_same(schema[word], value) for value in values):
            del schema[word]
    if not ("if" in schema and schema.keys() & {"then", "else"}):
        _take_out(schema, "if", "then", "else")
    if "contains" not in schema:
        _take_out(schema, "minContains", "maxContains")
    if any(is_same(schema.get("not"), everything) for everything in _ANY):
        del schema["not"]
        schema["allOf"] = [*list_of(schema.get("allOf")), False]
    for word in ("minimum", "maximum"):
        exclusive = f"exclusive{word.capitalize()}"
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and word in schema:
            schema[exclusive] = schema.pop(word)
    others = schema.pop("additionalItems", True)  # has an effect only if `items` is a list
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
        schema["items"] = others
    is_alone = not schema.keys() & {"allOf", "anyOf", "oneOf", "$ref", "if", "additionalProperties"}
    if is_alone and schema.get("unevaluatedProperties") is False:
        schema["additionalProperties"] = schema.pop("unevaluatedProperties")


def _hold_strings(schema: Schema, _root: Any, refusal: Refusal) -> None:
    """Rewrite `pattern`, `format` and `patternProperties`, in place; drop a format that contradicts the pattern."""
    name, pattern = schema.get("format"), schema.get("pattern")
    parts = [] if not isinstance(pattern, str) else words_of_pattern(pattern, name)
    is_plain = all(part.keys() == {"pattern"} for part in parts)
    if isinstance(name, str) and is_plain:
        del schema["format"]
        words = words_of_format(name)
        alone, both = ({"allOf": [{"type": "string"}, *found]} for found in (parts, [*parts, words]))
        parts += [] if parts and refusal(both) is not None and refusal(alone) is None else [words]
    if parts:
        _take_out(schema, "format", "pattern")
    for part in parts:
        also(schema, part)
    if isinstance(schema.get("patternProperties"), dict):
        schema["patternProperties"] = {
            pattern_of_properties(pattern): value for pattern, value in schema["patternProperties"].items()
        }


def _hold_names(schema: Schema, root: Any) -> None:
    """Rewrite `propertyNames` in a schema, in place, as `properties` or `patternProperties`."""
    if "propertyNames" not in schema:
        return
    names = resolved(schema.pop("propertyNames"), root)
    properties = mapping_of(schema.get("properties"))
    others = schema.get("additionalProperties", True)
    listed = [] if names is False else _listed_values(names, root)
    if listed is not None:
        schema["properties"] = {
            name: _value_of(name, properties, mapping_of(schema.get("patternProperties")), others)
            for name in listed
            if isinstance(name, str)
        }
        _take_out(schema, "patternProperties")
        schema["additionalProperties"] = False
        return
    pattern = pattern_of_names(names)
    is_matched = {name: _matches(pattern, name) for name in properties}
    is_overlap = any(is_matched.values()) and others not in (True, False, {})
    if schema.get("patternProperties") or is_overlap:
        raise GrammarError(
            "propertyNames cannot be enforced together with other keywords for properties; use patternProperties alone"
        )
    schema["properties"] = {name: value if is_matched[name] else False for name, value in properties.items()}
    if others is not False:
        schema["patternProperties"] = {pattern: others}
    schema["additionalProperties"] = False


def _value_of(name: str, properties: Schema, patterns: Schema, others: Any) -> Any:
    """Return the schema that applies to the property `name`."""
    found = [properties[name]] if name in properties else []
    found += [value for pattern, value in patterns.items() if _matches(pattern, name)]
    return found[0] if len(found) == 1 else {"allOf": found} if found else others


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name, re.ASCII) is not None
    except re.error as error:
        raise GrammarError(f"the pattern {pattern!r:.100} for property names is invalid: {error}") from error


def _listed_values(schema: Any, root: Any) -> list[Any] | None:
    """Return all distinct values that a schema allows; None if they cannot be listed."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return None
    words = schema.keys() - {"type"}
    types = types_of(schema)
    if words in ({"const"}, {"enum"}):
        found = [schema["const"]] if "const" in schema else list_of(schema["enum"])
        found = [value for value in found if type_of_value(value) in types]
    elif words == {"anyOf"}:
        branches = [_listed_values(branch, root) for branch in list_of(schema["anyOf"])]
        if None in branches:
            return None
        found = [value for branch in branches for value in branch or () if type_of_value(value) in types]
    elif not words and types <= {"boolean", "null"}:
        found = [value for value in (None, False, True) if type_of_value(value) in types]
    else:
        return None
    return [value for index, value in enumerate(found) if not any(is_same(value, other) for other in found[:index])]


def _hold_unique(schema: Schema, root: Any) -> None:
    """Rewrite `uniqueItems` as all permutations of a few values; drop it for arrays with at most one item."""
    if not schema.get("uniqueItems"):
        return
    most = schema.get("maxItems")
    if "array" not in types_of(schema) or (isinstance(most, int) and most <= 1):
        del schema["uniqueItems"]
        return
    values = _listed_values(schema.get("items", {}), root)
    if values is None or "prefixItems" in schema:
        raise GrammarError("uniqueItems cannot be enforced unless the items are an enum; leave it out")
    longest = min(len(values), most if isinstance(most, int) else len(values))
    if perm(len(values), max(longest - 1, 0)) > _MOST_ORDERS:
        raise GrammarError(
            f"uniqueItems with {len(values)} values has too many permutations to be enforced; lower maxItems, or leave "
            "uniqueItems out"
        )
    least = schema.get("minItems", 0)
    others = types_of(schema) - {"array"}
    arrays = [
        {
            "type": "array",
            "prefixItems": [*({"const": value} for value in order), {"enum": _without(values, order)}][:longest],
            "items": False,
            "minItems": least,
            "maxItems": longest,
        }
        for order in permutations(values, max(longest - 1, 0))
    ]
    _take_out(schema, "uniqueItems", "items", "minItems", "maxItems", "additionalItems")
    also(schema, {"anyOf": [*arrays, *([{"type": sorted(others)}] if others else [])]})


def _without(values: list[Any], taken: Iterable[Any]) -> list[Any]:
    return [value for value in values if not any(value is other for other in taken)]


def _refuse_others(schema: Schema, _root: Any) -> None:
    for word in schema:
        if word in UNHELD:
            raise GrammarError(f"{word} cannot be enforced; leave it out")
    named = schema.get("type")
    for name in named if isinstance(named, list) else [named] if "type" in schema else []:
        if name not in TYPES:
            raise GrammarError(f"{json.dumps(name):.100} is not a type of JSON Schema; use one of {', '.join(TYPES)}")


def _take_out(schema: Schema, *words: str) -> None:
    for word in words:
        schema.pop(word, None)
