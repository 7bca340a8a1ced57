"""Text between tags: content or reasoning, without the white space right before a tag."""

from collections.abc import Generator, Sequence
from typing import Protocol

from .mentions import LinePosition
from .parts import Content, Parsing, Part, Reasoning
from .text_feed import TextFeed

_BLANK = " \t\r"

Reading = Generator[Part | None, None, bool]
"""Parts as they become certain; returns whether what was asked for came."""


class MarkedCalls(Protocol):
    """The syntax of a family's tool calls, which begin with a marker."""

    @property
    def open(self) -> Sequence[str]:
        """Markers before a call; grammars write the first one."""

    def call(self, feed: TextFeed, marker: str) -> Reading:
        """Parse the calls after a marker; return False, without any part, if what follows it is not a call.

        Args:
            feed: Has a mark before the marker.
        """


class Prose:
    """Reads text of one kind up to the tags in it. What only mentions a tag is text.

    Args:
        calls: How tool calls are written; None: there are none.
        close: The marker that ends the text; None: it goes on to the end of the reply.
    """

    def __init__(
        self,
        feed: TextFeed,
        kind: type[Content] | type[Reasoning],
        calls: MarkedCalls | None = None,
        close: str | None = None,
    ) -> None:
        self._feed = feed
        self._kind = kind
        self._calls = calls
        self._close = close
        self._markers = (*([] if close is None else [close]), *(() if calls is None else calls.open))
        self._held = ""  # white space that may come right before a tag
        self._position = LinePosition(is_held=feed.is_held)

    def read(self) -> Generator[Part | None, None, str]:
        """Yield the text up to `close` or through the next calls; return the marker of either, "" at the end."""
        while marker := (yield from self._text()):
            if (yield from self._counts(marker)):
                self._held, self._position = "", LinePosition(is_held=self._feed.is_held)
                return marker
            self._add(marker)
        if self._held and self._kind is Content:
            yield Content(self._held)
        return ""

    def next_calls(self) -> Reading:
        """Parse the calls that come next; return False if something else does."""
        for marker in () if self._calls is None else self._calls.open:
            if (yield from self._feed.accepts(marker)):
                if (yield from self._counts(marker)):
                    return True
                self._feed.back(len(marker))
        return False

    def resume(self) -> None:
        """Go on after a marker with text on a line of its own."""
        self._held = "\n"

    def _text(self) -> Generator[Part | None, None, str]:
        """Yield the text before the next marker; return that marker, "" at the end of the reply."""
        reading = self._feed.until(self._markers)
        while True:
            try:
                piece = next(reading)
            except StopIteration as done:
                marker: str = done.value
                break
            if piece is None:
                yield None
                continue
            self._add(piece)
            if text := self._held.rstrip():
                yield self._kind(text)
                self._held = self._held[len(text) :]
        return marker

    def _add(self, text: str) -> None:
        self._held += text
        self._position.add(text)

    def _counts(self, marker: str) -> Reading:
        """Parse what a marker begins; return False, right after the marker, if it is a mention."""
        found = marker, self._feed.position - len(marker)
        self._feed.found.append(found)
        if (yield from self._ends(marker) if marker == self._close else self._calls_after(marker)):
            return True
        self._feed.found.remove(found)
        return False

    def _ends(self, marker: str) -> Generator[None, None, bool]:
        if self._feed.is_token(marker) or self._position.ends_reasoning(is_tag=marker.startswith("<")):
            return True
        self._feed.mark()
        ends_line = yield from rest_is_blank(self._feed)
        self._feed.back_to_mark()
        return ends_line and not self._position.is_in_code

    def _calls_after(self, marker: str) -> Reading:
        """Parse calls after a marker, or leave the feed right after it; return which."""
        if self._calls is None or not (self._feed.is_token(marker) or self._position.begins_call()):
            return False
        self._feed.mark(back=len(marker))
        if (yield from self._calls.call(self._feed, marker)):
            return True
        self._feed.back_to_mark()
        self._feed.skip(len(marker))
        return False


def text_and_calls(feed: TextFeed, calls: MarkedCalls) -> Parsing:
    """Parse content and calls up to the end of the reply."""
    prose = Prose(feed, Content, calls)
    while (yield from prose.read()):
        pass


def rest_is_blank(feed: TextFeed) -> Generator[None, None, bool]:
    """Consume white space up to the end of the line; return whether that is all that is left of it."""
    while (character := (yield from feed.peek())) and character in _BLANK:
        feed.take()
    return character in ("", "\n")
