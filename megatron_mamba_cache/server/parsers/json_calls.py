"""Parse JSON tool calls: the formats of Hermes, Granite and Nemotron Nano v2, and plain JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from .content import Reading, text_and_calls
from .json_values import json_string, json_value, strict_json
from .parts import CallArguments, CallBegin, CallEnd, Parsing, plain_text
from .text_feed import TextFeed, each, gathered

_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Parser for tool calls written between markers as one JSON object or a list of objects.

    If the text after an opening marker is not a call, the marker and the text are content.
    """

    open: tuple[str, ...]  # markers that begin calls
    close: str  # marker that ends calls; models may omit it

    def parse(self, feed: TextFeed) -> Parsing:
        """Parse content and calls up to the end of the reply."""
        return text_and_calls(feed, self)

    def call(self, feed: TextFeed, _marker: str) -> Reading:
        found = yield from _calls(feed, (self.close,))
        if found:
            yield from feed.space()
        return found


@dataclass(frozen=True, slots=True)
class PlainJsonCalls:
    """Parser for replies that are one JSON call or a list of calls, without markers; other replies are content."""

    open: tuple[str, ...] = ()

    def parse(self, feed: TextFeed) -> Parsing:
        feed.mark()
        if not (yield from self.call(feed, "")):
            feed.back_to_mark()
        yield from plain_text(feed)

    def call(self, feed: TextFeed, _marker: str) -> Reading:
        yield from feed.space()
        return (yield from _calls(feed, closers=()))


def _calls(feed: TextFeed, closers: Sequence[str]) -> Reading:
    """Parse one or more calls and their closing marker; return False, with the mark in place, if there is no call.

    Args:
        feed: Text feed whose mark is at the start of the calls.
        closers: Markers that end calls, even if a call's arguments are not valid JSON. If empty, calls without
            arguments are not accepted.
    """
    num_calls = 0
    yield from feed.space()
    yield from feed.accepts("[")
    while True:
        yield from feed.space()
        call = _Call(feed, needs_arguments=not closers)
        if not (yield from call.read()):
            if not call.has_begun:
                break
            if not (yield from each(feed.until(closers), CallArguments)):
                return True  # the reply ends within the call
        yield CallEnd()
        num_calls += 1
        yield from feed.space()
        feed.mark()
        yield from feed.accepts(",")
        yield from feed.space()
        if (yield from feed.peek()) == "{":
            continue
        if (yield from _ends(feed, closers)):
            feed.forget_mark()
            return True
        break
    if num_calls:
        feed.back_to_mark()  # the text after the calls is content
    return num_calls > 0


def _ends(feed: TextFeed, closers: Sequence[str]) -> Reading:
    """Consume a closing bracket and a closing marker if they follow; return True if at least one follows."""
    found = yield from feed.accepts("]")
    yield from feed.space()
    for closer in closers:
        found = (yield from feed.accepts(closer)) or found
    return found


class _Call:
    """Parser for one JSON call."""

    def __init__(self, feed: TextFeed, *, needs_arguments: bool) -> None:
        self._feed = feed
        self._name: str | None = None
        self._arguments = None if needs_arguments else "{}"
        self.has_begun = False

    def read(self) -> Reading:
        """Yield the call's parts except `CallEnd`; return True if the call is complete and valid JSON."""
        feed = self._feed
        if not (yield from feed.accepts("{")):
            return False
        while (yield from self._member()):
            yield from feed.space()
            if (yield from feed.accepts("}")):
                if not self.has_begun and self._name is not None and self._arguments is not None:
                    yield self._begin(self._name)
                    yield CallArguments(self._arguments)
                return self.has_begun
            if not (yield from feed.accepts(",")):
                return False
            yield from feed.space()
        return False

    def _member(self) -> Reading:
        feed = self._feed
        yield from feed.space()
        key = yield from json_string(feed)
        yield from feed.space()
        if key is None or not (yield from feed.accepts(":")):
            return False
        yield from feed.space()
        if key == "name" and self._name is None:
            self._name = yield from json_string(feed)
            return bool(self._name)
        first = yield from feed.peek()
        if key in _ARGUMENTS and self._name is not None and not self.has_begun and first in ("{", "["):
            yield self._begin(self._name)
            return (yield from each(json_value(feed), CallArguments))
        text, is_complete = yield from gathered(json_value(feed))
        if key in _ARGUMENTS and is_complete:
            self._arguments = _arguments_of(text)
        return is_complete

    def _begin(self, name: str) -> CallBegin:
        self.has_begun = True
        self._feed.forget_mark()
        return CallBegin(name)


def _arguments_of(text: str) -> str:
    """Return arguments as JSON; decode them if the model encoded them as a string, and convert null to {}."""
    if text == "null":
        return "{}"
    if not text.startswith('"'):
        return text
    try:
        return strict_json(str(json.loads(text)))
    except ValueError:
        return text


HERMES = JsonCalls(("<tool_call>",), "</tool_call>")
"""Format of Hermes, Qwen 2.5, Qwen 3 and Granite 4."""
NEMOTRON_NANO_V2 = JsonCalls(("<TOOLCALL>",), "</TOOLCALL>")
GRANITE = JsonCalls(("<|tool_call|>", "<tool_call>"), "</tool_call>")
"""Format of Granite 3."""
PLAIN_JSON = PlainJsonCalls()
