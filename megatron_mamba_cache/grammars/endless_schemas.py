"""Schemas that refer to themselves without an end: no JSON value is of them, and a reply that begins one never ends."""

import re
from collections.abc import Iterator
from typing import Any

from ..errors import GrammarError
from .schema_words import at_location, held_by, list_of, locations_in, mapping_of, path_of, target_of, types_of

_MEMBER_OF_ALL = re.compile(r"\.?allOf\.\d+$")
_SCALARS = {"null", "boolean", "integer", "number", "string"}


def close_endless(root: Any) -> None:
    """Replace schemas without a finite value by false, in place.

    Raises:
        GrammarError: If no value of the whole schema is finite.
    """
    places = list(locations_in(root).values())
    finite: set[int] = set()
    while True:
        found = {id(schema) for schema in places if id(schema) not in finite and _has_value(schema, finite, root)}
        if not found:
            break
        finite |= found
    if id(root) not in finite:
        _refuse(root, finite)
    for schema in places:
        for step, inner in list(held_by(schema)):
            if isinstance(inner, dict) and id(inner) not in finite:
                _replace(schema, step)


def _refuse(root: dict[str, Any], finite: set[int]) -> None:
    """Raise the error for a schema without a finite value, with the path to what it lacks."""
    found: Any = root
    path, seen = "", set[int]()
    while isinstance(found, dict) and id(found) not in seen:
        seen.add(id(found))
        lacking = [(step, inner) for step, inner in _needs(found, root) if not _is_finite(inner, finite)]
        if not lacking:
            break
        step, found = lacking[0]
        path = path_of(step) if step.startswith("#") else f"{path}.{step}".lstrip(".")
    if found is False:
        path = _MEMBER_OF_ALL.sub("", path)  # `drop_empty_words` writes `not: {}` as one
    with at_location(path):
        reason = "a value is required where it is false" if found is False else "references never come to an end"
        raise GrammarError(f"no JSON value is of the schema: {reason}")


def _replace(schema: dict[str, Any], step: str) -> None:
    word, _, name = step.partition(".")
    if not name:
        schema[word] = False
    elif isinstance(schema[word], list):
        schema[word][int(name)] = False
    else:
        schema[word][name] = False


def _has_value(schema: dict[str, Any], finite: set[int], root: Any) -> bool:
    """Return whether a schema may have a value that holds only values of schemas known to have one."""
    if not all(_is_finite(inner, finite) for _, inner in _needs(schema, root)):
        return False
    choices = [list_of(schema.get(word)) for word in ("anyOf", "oneOf")]
    return all(any(_is_finite(branch, finite) for branch in branches) for branches in choices if branches)


def _needs(schema: dict[str, Any], root: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas that need to have a value for a schema to have one."""
    reference = schema.get("$ref")
    target = target_of(reference, root) if isinstance(reference, str) else None
    if target is not None:
        yield str(reference), target
    yield from ((f"allOf.{number}", part) for number, part in enumerate(list_of(schema.get("allOf"))))
    types = types_of(schema)
    if schema.keys() & {"enum", "const"} or types & _SCALARS or {"object", "array"} <= types:
        return
    if "object" in types:
        properties = mapping_of(schema.get("properties"))
        others = True if schema.get("patternProperties") else schema.get("additionalProperties", True)
        names = [name for name in list_of(schema.get("required")) if isinstance(name, str)]
        yield from ((f"properties.{name}", properties.get(name, others)) for name in names)
    elif isinstance(schema.get("minItems"), int):
        items = schema.get("items", True)
        first = list_of(items) or list_of(schema.get("prefixItems"))
        rest = schema.get("additionalItems", True) if isinstance(items, list) else items
        for number, item in enumerate([*first, rest][: schema["minItems"]]):
            yield f"prefixItems.{number}" if number < len(first) else "items", item


def _is_finite(schema: Any, finite: set[int]) -> bool:
    return id(schema) in finite if isinstance(schema, dict) else schema is not False
