"""Find subschemas, references and types in a JSON schema, and change its keywords."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from ..errors import GrammarError

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
BRANCHES = ("anyOf", "oneOf", "allOf")
_NOTES = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"),
        *("discriminator", "xml", "externalDocs", "enumNames", "enumDescriptions", "markdownDescription"),
        *("contentMediaType", "contentEncoding", "contentSchema", "errorMessage"),
    )
)
"""Annotations, which allow every value. OpenAPI's `discriminator` only repeats information in the alternatives."""
_ONE_SCHEMA = frozenset(
    (
        *("items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else"),
        *("unevaluatedItems", "unevaluatedProperties"),
    )
)
_LISTS = frozenset((*BRANCHES, "prefixItems", "items"))
_BY_NAME = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
_DEFINITIONS = ("$defs", "definitions")
_ROOT = "__whole"
_INDEX = re.compile("[0-9]{1,9}")
_DEFINITION = re.compile(r"#/(\$defs|definitions)/([^/]+)")
_TYPES_OF_PYTHON: tuple[tuple[Any, str], ...] = (
    (type(None), "null"), (bool, "boolean"), (int, "integer"), (float, "number"),
    (str, "string"), (list, "array"), (dict, "object"),
)  # fmt: skip
_MOST_NAMES = 64  # maximum number of references in a chain


def without_notes(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema without annotations, such as `title`, and without unused definitions."""
    copied: dict[str, Any] = json.loads(json.dumps(schema))
    for found in schemas_in(copied):
        for word in _NOTES & found.keys():
            del found[word]
    _drop_unused_definitions(copied)
    return copied


def with_root(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a subschema as a standalone schema that includes the targets of its references."""
    definitions = {word: root[word] for word in _DEFINITIONS if isinstance(root.get(word), dict)}
    alone: dict[str, Any] = json.loads(json.dumps({**schema, **definitions}))
    references = [found for found in values_in(alone) if isinstance(found, dict) and isinstance(found.get("$ref"), str)]
    if all(_DEFINITION.match(found["$ref"]) or not found["$ref"].startswith("#") for found in references):
        return alone
    others = {word: value for word, value in root.items() if word not in _DEFINITIONS}
    alone["$defs"] = {**mapping_of(alone.get("$defs")), _ROOT: json.loads(json.dumps(others))}
    for found in values_in(alone):
        reference = found.get("$ref") if isinstance(found, dict) else None
        if isinstance(reference, str) and reference.startswith("#") and not _DEFINITION.match(reference):
            found["$ref"] = f"#/$defs/{_ROOT}{reference[1:]}"
    return alone


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and its subschemas, parents first. A property whose name is a keyword is treated as a property."""
    yield from locations_in(schema).values()


def locations_in(schema: Any) -> dict[str, dict[str, Any]]:
    """Return a schema, its subschemas and the targets of its references, keyed by path."""
    locations: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()
    references: list[str] = []
    waiting = [("", schema)]
    while waiting:
        path, found = waiting.pop()
        if isinstance(found, dict) and id(found) not in seen:
            seen.add(id(found))
            locations[path] = found
            waiting += [(f"{path}.{step}" if path else step, inner) for step, inner in held_by(found)]
            references += [found["$ref"]] if isinstance(found.get("$ref"), str) else []
        if not waiting:
            waiting = [(path_of(name), target_of(name, schema)) for name in references]
            references = []
    return locations


def path_of(reference: str) -> str:
    """Return the path to a reference's target, such as "$defs.name" for "#/$defs/name"."""
    return reference.lstrip("#/").replace("/", ".")


def held_by(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each direct subschema with its path step, such as "items", "anyOf.0" or "properties.name"."""
    for word, value in schema.items():
        if word in _ONE_SCHEMA and not isinstance(value, list):
            yield word, value
        if word in _LISTS and isinstance(value, list):
            yield from ((f"{word}.{number}", inner) for number, inner in enumerate(value))
        if word in _BY_NAME and isinstance(value, dict):
            yield from ((f"{word}.{name}", inner) for name, inner in value.items())


def target_of(reference: str, root: Any) -> Any:
    """Return the target of a reference, given by path or anchor; None if it is not in `root`."""
    own = root.get("$id", root.get("id")) if isinstance(root, Mapping) else None
    if isinstance(own, str) and own:
        reference = reference.removeprefix(own.rstrip("#"))
    if not reference.startswith("#"):
        return None
    names = reference[1:].split("/")
    if names[0]:
        anchored = (found for found in values_in(root) if isinstance(found, dict) and "$anchor" in found)
        return next((found for found in anchored if found["$anchor"] == names[0]), None)
    found = root
    for name in (unquote(name).replace("~1", "/").replace("~0", "~") for name in names[1:]):
        if isinstance(found, list):
            found = found[int(name)] if _INDEX.fullmatch(name) and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def resolved(schema: Any, root: Any) -> Any:
    """Return the target of a schema that is only a reference; the schema itself if it is not, or has no target."""
    for _ in range(_MOST_NAMES):
        if not isinstance(schema, Mapping) or schema.keys() != {"$ref"} or not isinstance(schema["$ref"], str):
            break
        target = target_of(schema["$ref"], root)
        if target is None:
            break
        schema = target
    return schema


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types in a schema's `type`, or all types if it has none; "number" includes "integer"."""
    named = schema.get("type", TYPES)
    types = set(named if isinstance(named, list | tuple) else [named])
    return types | {"integer"} if "number" in types else types


def also(schema: dict[str, Any], words: Mapping[str, Any]) -> None:
    """Add keywords to a schema, in place; if it has any of these keywords, add them all through `allOf`."""
    if schema.keys() & words.keys():
        schema["allOf"] = [*list_of(schema.get("allOf")), dict(words)]
    else:
        schema.update(words)


@contextmanager
def at_location(path: str) -> Iterator[None]:
    """Context manager that prefixes the message of a `GrammarError` with the path of a schema."""
    try:
        yield
    except GrammarError as error:
        raise GrammarError(f"{path}: {error}" if path else str(error)) from error


def type_of_value(value: Any) -> str:
    """Return the name of a value's JSON type; "integer" for a float with an integral value."""
    if isinstance(value, float) and value.is_integer():
        return "integer"
    return next(name for kind, name in _TYPES_OF_PYTHON if isinstance(value, kind))


def is_same(first: Any, second: Any) -> bool:
    """Return True if two JSON values are equal; 1 equals 1.0 but not true."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(is_same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(is_same(first[name], second[name]) for name in first)
    return bool(first == second)


def list_of(value: Any) -> list[Any]:
    """Return the value if it is a list, otherwise an empty list."""
    return value if isinstance(value, list) else []


def mapping_of(value: Any) -> dict[str, Any]:
    """Return the value if it is a dict, otherwise an empty dict."""
    return value if isinstance(value, dict) else {}


def values_in(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all values nested in it, without property names."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        yield found
        if isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found


def _drop_unused_definitions(root: dict[str, Any]) -> None:
    """Remove unused definitions from a schema, in place; do nothing if a reference has another target."""
    names = {(word, name) for word in _DEFINITIONS for name in mapping_of(root.get(word))}
    outer = {word: value for word, value in root.items() if word not in _DEFINITIONS}
    used: set[tuple[str, str]] = set()
    waiting: list[Any] = [outer]
    while waiting:
        for found in values_in(waiting.pop()):
            for reference in (found.get("$ref"), found.get("$id")) if isinstance(found, dict) else ():
                match = _DEFINITION.match(reference) if isinstance(reference, str) else None
                location = (
                    None if match is None else (match[1], unquote(match[2]).replace("~1", "/").replace("~0", "~"))
                )
                if reference is not None and location not in names:
                    return
                if location in names - used:
                    used.add(location)
                    waiting.append(root[location[0]][location[1]])
    for word, name in names - used:
        del root[word][name]
