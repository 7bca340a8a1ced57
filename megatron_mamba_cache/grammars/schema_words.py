"""What clients write into JSON schemas that allows every value: such words are taken out before compiling."""

from collections.abc import Iterator
from typing import Any

_FORMATS = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "iri", "iri-reference", "uri-template", "uuid", "regex"),
        *("json-pointer", "relative-json-pointer"),
    )
)
"""Those that JSON Schema defines; any other one, such as OpenAPI's `int64` or `binary`, is a note to readers."""
_ANY_NAME: tuple[Any, ...] = (True, {}, {"type": "string"})
_ONE_SCHEMA = frozenset(
    (
        *("items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else"),
        *("unevaluatedItems", "unevaluatedProperties"),
    )
)
_LISTS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems", "items"))
_BY_NAME = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))


def drop_empty_words(schema: Any) -> None:
    """Take out of a JSON schema, in place, what allows every value; other words stay, whatever they are."""
    for found in schemas_in(schema):
        told = found.get("format")
        if isinstance(told, str) and told not in _FORMATS:
            del found["format"]
        if "propertyNames" in found and found["propertyNames"] in _ANY_NAME:
            del found["propertyNames"]


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and those in it, each before what it holds; a property may be called like a word."""
    waiting = [schema]
    while waiting:
        found = waiting.pop()
        if not isinstance(found, dict):
            continue
        yield found
        for word, value in found.items():
            if word in _ONE_SCHEMA:
                waiting.append(value)
            if word in _LISTS and isinstance(value, list):
                waiting += value
            if word in _BY_NAME and isinstance(value, dict):
                waiting += value.values()


def values_in(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all that it holds, but for names."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        yield found
        if isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found
