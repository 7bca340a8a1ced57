"""Parse tool calls between tags: the format of Qwen 3 Coder, Qwen 3.5 and Nemotron 3.

A parameter is text between tags; the tool's schema decides if the value is a string or has another type. Some models
omit a parameter's closing tag, so the next parameter's tag and the closing tags of the call also end a parameter.
"""

import ast
import math
import warnings
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ...grammars.schema_words import type_of_value
from ..strict_json import strict_text, strict_value
from .content import Reading, text_and_calls
from .json_values import strict_json
from .parameter_types import JSON_TYPES, Schema, types_of_parameter
from .parts import CallArguments, CallBegin, CallEnd, Parsing, Part
from .text_feed import TextFeed, each, gathered

_LONGEST_LITERAL = 64 * 1024
_BOOLEANS = {"true": True, "false": False}
_JSON_NAMES = {**_BOOLEANS, "null": None}


def json_of(text: str, types: Collection[str], *, is_constrained: bool) -> str:
    """Convert a parameter's text to JSON of one of the allowed types; if none fits, to a JSON string.

    Empty or unknown `types` allow any type. If a grammar constrains the text (`is_constrained`), numbers beyond float64
    become the nearest finite number.
    """
    known = types if JSON_TYPES.issuperset(types) else ()
    written = strict_json(text.strip(), is_constrained=True) if is_constrained else text.strip()
    try:
        return strict_text(_value_of_values(written, known))
    except ValueError:
        return strict_text(text)


def _value_of_values(text: str, types: Collection[str]) -> Any:
    """Parse text as a value of an allowed type; raise `ValueError` if it matches none."""
    may_be_text = not types or "string" in types
    for read in (partial(strict_value, allows_controls=True), _literal_value):
        try:
            value = read(text)
        except ValueError:
            continue
        if read is _literal_value and may_be_text and not isinstance(value, bool | list | dict | None):
            continue  # keep the text, with its quotes or its number notation
        kind = type_of_value(value)
        if not types or kind in types or (kind == "integer" and "number" in types):
            return value
        if isinstance(value, str) and value != text:  # a value of another type in quotes
            with suppress(ValueError):
                return _value_of_values(value.strip(), types)
            return value
    if "boolean" in types and not may_be_text and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    raise ValueError(f"{text!r:.100} matches none of the types {sorted(types)}")


def _literal_value(text: str) -> Any:
    """Evaluate a Python or JSON literal without executing code; raise `ValueError` if `text` is not a literal."""
    if len(text) > _LONGEST_LITERAL:
        raise ValueError(f"the literal has {len(text)} characters; at most {_LONGEST_LITERAL} are allowed")
    try:
        with warnings.catch_warnings(action="ignore"):  # Python warns about unknown escapes
            return _plain(ast.literal_eval(_WithConstants().visit(ast.parse(text, mode="eval"))))
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"the text is not a literal: {error}") from error


class _WithConstants(ast.NodeTransformer):
    """AST transformer that replaces the names `true`, `false` and `null` with their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _plain(value: Any) -> Any:
    """Convert a Python value to a JSON value: tuples to lists, keys to text; raise `ValueError` for other types."""
    match value:
        case list() | tuple():
            return [_plain(item) for item in value]
        case dict():
            return {_key(key): _plain(item) for key, item in value.items()}
        case None | bool() | int() | str():
            return value
        case float() if math.isfinite(value):
            return value
    raise ValueError(f"JSON cannot represent a value of type {type(value).__name__}")


def _key(key: Any) -> str:
    if isinstance(key, tuple):
        raise ValueError("JSON cannot represent a tuple as a key")
    return key if isinstance(key, str) else strict_text(_plain(key))


_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = ("\n" + _PARAMETER_END, _PARAMETER_END, "\n" + _PARAMETER, "\n" + _FUNCTION_END, _FUNCTION_END)
_AFTER: Mapping[str, Sequence[str]] = {
    _PARAMETER_END: (_PARAMETER, _PARAMETER_END, _FUNCTION_END, _CALL_END),
    _FUNCTION_END: (_CALL_END,),
}


class XmlCalls:
    """Parser for tool calls in the tag format.

    `parameters` has the JSON schema for each tool's parameters, by tool name. A call to a tool without a schema is
    content, but if `parameters` is empty, all tool names are accepted.
    """

    open = (_CALL, _FUNCTION)

    def __init__(self, parameters: Mapping[str, Schema]) -> None:
        self._parameters = parameters

    def parse(self, feed: TextFeed) -> Parsing:
        """Parse content and calls up to the end of the reply."""
        return text_and_calls(feed, self)

    def call(self, feed: TextFeed, marker: str) -> Reading:
        """Parse one call. If it lacks the outer tag, a parameter or closing tag must follow the tool name."""
        if marker == _CALL:
            yield from feed.space()
            if not (yield from feed.accepts(_FUNCTION)):
                return False
        name = yield from _name(feed)
        if not name or (self._parameters and name not in self._parameters):
            return False
        if marker == _FUNCTION and not (yield from _has_arguments(feed)):
            return False
        feed.forget_mark()
        yield CallBegin(name)
        yield from _arguments(feed, self._parameters.get(name, {}))
        yield from feed.space()
        yield from feed.accepts(_CALL_END)
        yield from feed.space()
        return True


def _has_arguments(feed: TextFeed) -> Generator[None, None, bool]:
    """Skip white space; return True if a parameter's tag or the function's closing tag follows."""
    yield from feed.space()
    for tag in (_PARAMETER, _FUNCTION_END):
        if (yield from feed.accepts(tag)):
            feed.back(len(tag))
            return True
    return False


def _arguments(feed: TextFeed, schema: Schema) -> Parsing:
    """Parse the parameters of a call to JSON pieces; drop any text between parameters."""
    yield CallArguments("{")
    separator = ""
    marker = yield from _next_tag(feed)
    while marker == _PARAMETER:
        key = yield from _name(feed)
        yield CallArguments(f"{separator}{strict_text(key)}: ")
        separator = ", "
        yield from feed.accepts("\n")
        marker = yield from _value(feed, types_of_parameter(schema, key))
        if marker == _PARAMETER_END:
            marker = yield from _next_tag(feed)
    if marker:  # the reply did not end within the call
        yield CallArguments("}")
        yield CallEnd()


def _next_tag(feed: TextFeed) -> Generator[None, None, str]:
    _text, marker = yield from gathered(feed.until((_PARAMETER, _FUNCTION_END, _CALL_END)))
    return marker


def _value(feed: TextFeed, types: set[str]) -> Generator[Part | None, None, str]:
    """Yield a parameter's value as JSON pieces; return the tag after it, or "" at the end of the reply."""
    if types == {"string"}:
        yield CallArguments('"')
        end = yield from each(_value_text(feed), lambda text: CallArguments(strict_text(text)[1:-1]))
        yield CallArguments('"' if end else "")
    else:
        text, end = yield from gathered(_value_text(feed))
        yield CallArguments(json_of(text, types, is_constrained=feed.is_constrained) if end else text)
    return end.removeprefix("\n")


def _value_text(feed: TextFeed) -> Generator[str | None, None, str]:
    """Yield a value's text as it arrives; return the tag that ends it, or "" at the end of the reply.

    A closing tag counts as text unless the reply ends after it or a tag that can follow it comes next.
    """
    while True:
        end = yield from feed.until(_VALUE_ENDS)
        following = _AFTER.get(end.removeprefix("\n"))
        if following is None or (yield from _comes_next(feed, following)):
            return end
        yield end


def _comes_next(feed: TextFeed, tags: Sequence[str]) -> Generator[None, None, bool]:
    """Return True if one of the tags or the end of the reply follows, after white space; consume nothing."""
    feed.mark()
    yield from feed.space()
    found = not (yield from feed.peek())
    for tag in tags:
        found = found or (yield from feed.accepts(tag))
    feed.back_to_mark()
    return found


def _name(feed: TextFeed) -> Generator[None, None, str]:
    """Consume a tag through `>` and return the name in it; return "" if the tag does not end on its line."""
    text, end = yield from gathered(feed.until((">", "\n")))
    return text.strip().strip("\"'") if end == ">" else ""
