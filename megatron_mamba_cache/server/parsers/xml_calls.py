"""Tool calls as tags: the form of Qwen 3 Coder, Qwen 3.5 and Nemotron 3.

A parameter is text between tags, so the tool's schema decides what it means: text, or a value of any other type. Models
forget the tag that ends a parameter, so the next parameter's tag ends it too, and so do the tags that end the call.
"""

from collections.abc import Generator, Mapping, Sequence

from ..strict_json import strict_text
from .content import Reading, text_and_calls
from .parameter_types import Schema, types_of_parameter
from .parameter_values import json_of
from .parts import CallArguments, CallBegin, CallEnd, Parsing, Part
from .text_feed import TextFeed, each, gathered

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = ("\n" + _PARAMETER_END, _PARAMETER_END, "\n" + _PARAMETER, "\n" + _FUNCTION_END, _FUNCTION_END)
_AFTER: Mapping[str, Sequence[str]] = {
    _PARAMETER_END: (_PARAMETER, _PARAMETER_END, _FUNCTION_END, _CALL_END),
    _FUNCTION_END: (_CALL_END,),
}


class XmlCalls:
    """Calls of tools with these parameters.

    Args:
        parameters: The JSON schema of each tool's parameters, by its name. What looks like a call of another tool is
            content; with no tools at all, every name is taken.
    """

    open = (_CALL, _FUNCTION)

    def __init__(self, parameters: Mapping[str, Schema]) -> None:
        self._parameters = parameters

    def parse(self, feed: TextFeed) -> Parsing:
        """Parse content and calls up to the end of the reply."""
        return text_and_calls(feed, self)

    def call(self, feed: TextFeed, marker: str) -> Reading:
        """See `MarkedCalls`. Without the tag around it, a call needs a parameter or its end to be one."""
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
    """Return whether a parameter or the end of the function comes next, after white space."""
    yield from feed.space()
    for tag in (_PARAMETER, _FUNCTION_END):
        if (yield from feed.accepts(tag)):
            feed.back(len(tag))
            return True
    return False


def _arguments(feed: TextFeed, schema: Schema) -> Parsing:
    """Parse a call from its first parameter on; whatever is written between parameters is left out."""
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
    if marker:  # else it is cut off
        yield CallArguments("}")
        yield CallEnd()


def _next_tag(feed: TextFeed) -> Generator[None, None, str]:
    _text, marker = yield from gathered(feed.until((_PARAMETER, _FUNCTION_END, _CALL_END)))
    return marker


def _value(feed: TextFeed, types: set[str]) -> Generator[Part | None, None, str]:
    """Yield a parameter's value; return the tag that ended it, "" at the end of the reply."""
    if types == {"string"}:
        yield CallArguments('"')
        end = yield from each(_value_text(feed), _escaped)
        yield CallArguments('"' if end else "")
    else:
        text, end = yield from gathered(_value_text(feed))
        yield CallArguments(json_of(text, types, is_held=feed.is_held) if end else text)
    return end.removeprefix("\n")


def _value_text(feed: TextFeed) -> Generator[str | None, None, str]:
    """Yield a value's text as it arrives; return what ended it: a tag, after a line end if there is one.

    A closing tag is text unless a tag that may follow it does.
    """
    while True:
        end = yield from feed.until(_VALUE_ENDS)
        following = _AFTER.get(end.removeprefix("\n"))
        if following is None or (yield from _comes_next(feed, following)):
            return end
        yield end


def _comes_next(feed: TextFeed, tags: Sequence[str]) -> Generator[None, None, bool]:
    """Return whether one of some tags comes next, or the end of the reply, after white space."""
    feed.mark()
    yield from feed.space()
    found = not (yield from feed.peek())
    for tag in tags:
        found = found or (yield from feed.accepts(tag))
    feed.back_to_mark()
    return found


def _name(feed: TextFeed) -> Generator[None, None, str]:
    """Return what is written up to the end of a tag; "" if the tag does not end in its line."""
    text, end = yield from gathered(feed.until((">", "\n")))
    return text.strip().strip("\"'") if end == ">" else ""


def _escaped(text: str) -> CallArguments:
    return CallArguments(strict_text(text)[1:-1])
