"""Tool calls as tags: the form of Qwen 3 Coder, Qwen 3.5 and Nemotron 3.

A parameter is text between tags, so the tool's schema decides what it means: text, or JSON for any other type.
"""

import json
from collections.abc import Generator, Mapping
from typing import Any

from .content import text_until
from .parts import CallArguments, CallBegin, CallEnd, Content, Parsing
from .text_feed import TextFeed, each, gathered

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER = "<parameter="
_VALUE_ENDS = ("\n</parameter>", "</parameter>")
_MOST_DEPTH = 8
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # templates print values of the history so
_TYPES: tuple[tuple[Any, str], ...] = (
    (type(None), "null"),
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)

Schema = Mapping[str, Any]


class XmlCalls:
    """Calls of tools with these parameters.

    Args:
        parameters: The JSON schema of each tool's parameters, by its name.
    """

    open = (_CALL, _FUNCTION)

    def __init__(self, parameters: Mapping[str, Schema]) -> None:
        self._parameters = parameters

    def parse(self, feed: TextFeed) -> Parsing:
        """Parse content and calls up to the end of the reply."""
        while True:
            space, marker = yield from text_until(feed, self.open)
            if not marker:
                return
            feed.mark(back=len(marker))
            yield from feed.space()
            if marker == _CALL and not (yield from feed.accepts(_FUNCTION)):
                yield Content(space + feed.since_mark())
                continue
            name = yield from _name(feed)
            if not name:
                yield Content(space + feed.since_mark())
                continue
            feed.forget_mark()
            yield CallBegin(name)
            yield from _arguments(feed, self._parameters.get(name, {}))
            yield from feed.space()
            yield from feed.accepts(_CALL_END)
            yield from feed.space()


def _arguments(feed: TextFeed, schema: Schema) -> Parsing:
    """Parse a call from its first parameter on; whatever is written between parameters is left out."""
    yield CallArguments("{")
    separator = ""
    while True:
        _text, marker = yield from gathered(feed.until((_PARAMETER, _FUNCTION_END, _CALL_END)))
        if not marker:
            return  # cut off
        if marker != _PARAMETER:
            yield CallArguments("}")
            yield CallEnd()
            return
        key = yield from _name(feed)
        yield CallArguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        yield from feed.accepts("\n")
        types = _types(_property(schema, key), schema)
        if types == {"string"}:
            yield CallArguments('"')
            if (yield from each(feed.until(_VALUE_ENDS), _escaped)):
                yield CallArguments('"')
        else:
            text, end = yield from gathered(feed.until(_VALUE_ENDS))
            yield CallArguments(_json_of(text, types) if end else text)


def _name(feed: TextFeed) -> Generator[None, None, str]:
    """Return what is written up to the end of a tag; "" if the tag does not end in its line."""
    text, end = yield from gathered(feed.until((">", "\n")))
    return text.strip().strip("\"'") if end == ">" else ""


def _escaped(text: str) -> CallArguments:
    return CallArguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _property(schema: Schema, key: str) -> Schema:
    """Return the schema of a parameter; one that the tool does not declare is text."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {"type": "string"}


def _types(schema: Any, root: Schema, depth: int = _MOST_DEPTH) -> set[str]:
    """Return the JSON types that a schema allows; none if it does not say."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_referenced(reference, root), root, depth - 1)
    named = schema.get("type")
    if named is not None:
        return {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    values = (
        schema.get("enum") if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    )
    if values:
        return {_type_of(value) for value in values}
    choices = [choice for name in ("anyOf", "oneOf", "allOf") for choice in schema.get(name) or ()]
    found = [_types(choice, root, depth - 1) for choice in choices]
    return set().union(*found) if all(found) else set()


def _referenced(reference: str, root: Schema) -> Any:
    found: Any = root
    for name in reference.removeprefix("#/").split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _json_of(text: str, types: set[str]) -> str:
    """Return a parameter's text as JSON of one of the types, as far as it can be read so."""
    word = text.strip()
    try:
        value = json.loads(_PYTHON_WORDS.get(word, word), parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = text
    if "string" in types and _type_of(value) not in types:
        value = text
    return json.dumps(value, ensure_ascii=False)


def _type_of(value: Any) -> str:
    return next(name for kind, name in _TYPES if isinstance(value, kind))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
