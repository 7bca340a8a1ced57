"""Determine the JSON types that a tool's schema allows for a parameter."""

from collections.abc import Mapping
from typing import Any

from ...grammars.schema_words import TYPES, target_of, type_of_value

_MOST_SCHEMAS = 256
_MOST_VALUES = 256
_MOST_NAMES = 16  # maximum length of a chain of `$ref`s
JSON_TYPES = frozenset(TYPES)

Schema = Mapping[str, Any]


def types_of_parameter(schema: Schema, name: str) -> set[str]:
    """Return the JSON types that a tool's schema allows for the parameter `name`; empty if any type is allowed.

    Clients can send any schema, so the run time is bounded, and no schema raises an error.
    """
    declared = _declared(name, schema)
    if not declared:
        return {"string"}
    types = _types({"anyOf": declared} if len(declared) > 1 else declared[0], schema)
    return types | {"integer"} if "number" in types else types


def resolved(schema: Any, root: Schema) -> Schema:
    """Return `schema`, or the target of its chain of `$ref`s into `root`; {} if a reference has no target."""
    for _ in range(_MOST_NAMES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = target_of(reference, root)
    return schema if isinstance(schema, Mapping) else {}


def _declared(name: str, root: Schema) -> list[Schema]:
    """Return the schemas for `name` in `root` and its branches; if there are none, those for additional properties."""
    found: list[Schema] = []
    others: list[Schema] = []
    is_named = False
    left: list[Any] = [root]
    for _ in range(_MOST_SCHEMAS):
        if not left:
            break
        current = left.pop()
        if not isinstance(current, Mapping):
            continue
        properties = current.get("properties")
        declared = properties.get(name) if isinstance(properties, Mapping) else None
        is_named |= isinstance(properties, Mapping) and name in properties
        found += [declared] if isinstance(declared, Mapping) and declared not in found else []
        other = current.get("additionalProperties")
        others += [other] if isinstance(other, Mapping) and other else []
        reference = current.get("$ref")
        left += _choices(current) + ([target_of(reference, root)] if isinstance(reference, str) else [])
    return found if is_named else others


def _types(schema: Schema, root: Schema) -> set[str]:
    """Return the union of the types in a schema's branches; empty if a branch allows any type."""
    found: set[str] = set()
    followed: set[str] = set()
    left: list[Any] = [schema]
    for _ in range(_MOST_SCHEMAS):
        if not left:
            return found
        current = left.pop()
        reference = current.get("$ref") if isinstance(current, Mapping) else None
        if isinstance(reference, str):
            if reference not in followed:
                followed.add(reference)
                left.append(target_of(reference, root))
            continue
        named, choices = _named_types(current), _choices(current)
        if not named and not choices:
            return set()
        found |= named
        left += [] if named else choices
    return set()


def _named_types(schema: Any) -> set[str]:
    """Return the types in a schema's `type`; without `type`, the types of its `enum` or `const` values."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    if named is not None:
        return {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    values = schema.get("enum")
    if not isinstance(values, list):
        values = [schema["const"]] if "const" in schema else []
    return {"number" if isinstance(value, float) else type_of_value(value) for value in values[:_MOST_VALUES]}


def _choices(schema: Any) -> list[Any]:
    if not isinstance(schema, Mapping):
        return []
    lists = (schema.get(name) for name in ("anyOf", "oneOf", "allOf"))
    return [choice for found in lists if isinstance(found, list) for choice in found[:_MOST_SCHEMAS]]
