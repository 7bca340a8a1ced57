"""Values of XML-style parameters: text that is read as JSON or as a literal of Python, as the parameter's types say."""

import ast
import math
import warnings
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Any

from ..strict_json import strict_text, strict_value
from .json_values import strict_json
from .parameter_types import JSON_TYPES, type_of_value

_LONGEST_LITERAL = 64 * 1024
_BOOLEANS = {"true": True, "false": False}
_JSON_NAMES = {**_BOOLEANS, "null": None}


def json_of(text: str, types: Collection[str], *, is_held: bool = False) -> str:
    """Return a parameter's text as JSON of one of its types; what fits none of them stays text.

    Args:
        types: JSON types; none if the schema does not say. Names that JSON Schema does not have say nothing.
        is_held: Whether a grammar holds the text. Then numbers beyond float64 are replaced by the nearest in it.
    """
    known = types if JSON_TYPES.issuperset(types) else ()
    written = strict_json(text.strip(), is_held=True) if is_held else text.strip()
    try:
        return strict_text(_value(written, known))
    except ValueError:
        return strict_text(text)


def _value(text: str, types: Collection[str]) -> Any:
    """Return the first value of one of the types that a text can be read as, or what is in its quotes.

    Raises:
        ValueError: If there is none.
    """
    may_be_text = not types or "string" in types
    for read in (partial(strict_value, allows_controls=True), _literal_value):
        try:
            value = read(text)
        except ValueError:
            continue
        if read is _literal_value and may_be_text and not isinstance(value, bool | list | dict | None):
            continue  # its quotes, or its way to write a number, belong to the text
        if not types or _is_of(value, types):
            return value
        if isinstance(value, str) and value != text:  # a number, a list or another value in quotes
            with suppress(ValueError):
                return _value(value.strip(), types)
            return value
    if "boolean" in types and not may_be_text and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    raise ValueError(f"{text:.100} matches none of the types {types}")


def _is_of(value: Any, types: Collection[str]) -> bool:
    found = type_of_value(value)
    is_whole = found == "integer" or (found == "number" and value.is_integer())
    return found in types or (found == "integer" and "number" in types) or (is_whole and "integer" in types)


def _literal_value(text: str) -> Any:
    """Return the value of a literal of Python that JSON can hold, with JSON's names or Python's; nothing is executed.

    Raises:
        ValueError: If the text is not one, or is too long or too deeply nested.
    """
    if len(text) > _LONGEST_LITERAL:
        raise ValueError(f"the literal has {len(text)} characters; at most {_LONGEST_LITERAL} are read")
    try:
        with warnings.catch_warnings(action="ignore"):  # of unknown escapes
            return _plain(ast.literal_eval(_WithConstants().visit(ast.parse(text, mode="eval"))))
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"the text is not a literal: {error}") from error


class _WithConstants(ast.NodeTransformer):
    """Replaces JSON's names of constants by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _plain(value: Any) -> Any:
    """Return a value with lists instead of tuples and text as keys of objects."""
    match value:
        case list() | tuple():
            return [_plain(item) for item in value]
        case dict():
            return {_key(key): _plain(item) for key, item in value.items()}
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return value
    raise ValueError(f"JSON cannot represent this {type(value).__name__}")


def _key(key: Any) -> str:
    if isinstance(key, tuple):
        raise ValueError("JSON has no tuple keys")
    return key if isinstance(key, str) else strict_text(_plain(key))
