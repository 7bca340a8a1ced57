"""The JSON types that a tool's schema allows for a parameter."""

from collections.abc import Mapping
from typing import Any

from ...grammars.schema_words import TYPES, target_of, type_of_value

_MOST_SCHEMAS = 256
_MOST_VALUES = 256
_MOST_NAMES = 16  # of a reference
JSON_TYPES = frozenset(TYPES)

Schema = Mapping[str, Any]


def types_of_parameter(schema: Schema, name: str) -> set[str]:
    """Return the JSON types of a parameter in the schema of all of them; none if it has no type.

    For any schema of a client, this raises nothing and takes bounded time.
    """
    declared = _declared(name, schema)
    if not declared:
        return {"string"}
    types = _types({"anyOf": declared} if len(declared) > 1 else declared[0], schema)
    return types | {"integer"} if "number" in types else types


def resolved(schema: Any, root: Schema) -> Schema:
    """Return a parameter's schema with its reference resolved in the schema of all parameters; {} without one."""
    for _ in range(_MOST_NAMES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = target_of(reference, root)
    return schema if isinstance(schema, Mapping) else {}


def _declared(name: str, root: Schema) -> list[Schema]:
    """Return a parameter's schemas in a schema and its combined ones, or else those of `additionalProperties`."""
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
    """Return the types that a schema's choices allow; none if one has no type."""
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
    """Return the types that a schema names, or those of its allowed values."""
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
