"""Split text at tags, and distinguish a tag from a mention of the tag, for example in quotes or code."""

import re
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from typing import Protocol, Self

from .parts import Content, Parsing, Part, Reasoning
from .text_feed import TextFeed


class TagPositions:
    """Positions of single-token tags in one reply's text; `tokens` maps the token ids to the tags."""

    def __init__(self, tokens: Mapping[int, str]) -> None:
        self._tokens = tokens
        self._positions: dict[str, set[int]] = {tag: set() for tag in tokens.values()}

    @property
    def texts(self) -> Collection[str]:
        """The tags whose positions are recorded."""
        return self._positions.keys()

    def find(self, token: int, text: str, start: int) -> int | None:
        """If a token is a tag, record and return the tag's position; otherwise return None.

        `text` is the text that the token adds; `start` is its offset in the reply, in characters.
        """
        tag = self._tokens.get(token)
        at = -1 if tag is None else text.rfind(tag)
        if tag is None or at < 0:
            return None
        self._positions[tag].add(start + at)
        return start + at

    def joined(self, found: Sequence[tuple[str, int]]) -> Self:
        """Return a copy with the (tag, position) pairs in `found` added."""
        joined = type(self)(self._tokens)
        for tag, positions in self._positions.items():
            joined._positions[tag] = {*positions}
        for tag, position in found:
            joined._positions.setdefault(tag, set()).add(position)
        return joined

    def in_rewritten(self, rewritten: str, text: str) -> Iterable[int]:
        """Yield the positions of tags in `rewritten`, the reply's `text` as the chat template renders it.

        Occurrences of a tag in the two texts are matched in order. If their numbers differ, every occurrence in
        `rewritten` counts as a tag rather than a mention.
        """
        for tag, positions in self._positions.items():
            own, others = _mentions(tag, text), _mentions(tag, rewritten)
            counts = [at in positions for at in own] if len(own) == len(others) else [True] * len(others)
            yield from (at for at, does_count in zip(others, counts, strict=True) if does_count)


def _mentions(tag: str, text: str) -> list[int]:
    return [found.start() for found in re.finditer(re.escape(tag), text)]


_FENCE = "```"
_SPACES = " \t"
_SENTENCE_ENDS = frozenset(".!?\u2026\u3002\uff01\uff1f")
_OPENING = frozenset(  # opening quotes and brackets, as in `grammars.reasoning`
    "`'\"\u2018\u201a\u201c\u201e\u2039\u00ab\u3008\u300a\u300c\u300e\u3010\uff08\uff3b\uff5b([{<"
)


class LinePosition:
    """Context of a text position, which decides if a marker there is a tag or a mention.

    The context is the current line up to the position, and any open code fence. If `is_constrained`, a grammar
    constrains the text; code fences and open quotes are then ignored, because grammars cannot track them.
    """

    def __init__(self, *, is_constrained: bool) -> None:
        self._is_constrained = is_constrained
        self.is_in_code = False
        """True inside a fenced code block."""
        self._start_line()

    def add(self, text: str) -> None:
        """Advance the position past `text`."""
        first, *others = text.split("\n")
        self._add_to_line(first)
        for line in others:
            self.is_in_code ^= self._beginning == _FENCE and not self._is_constrained
            self._start_line()
            self._add_to_line(line)

    def begins_call(self) -> bool:
        """Return True if a marker here begins a call: at the start of a line and not in a code block."""
        return not self.is_in_code and not self._beginning

    def ends_reasoning(self, *, is_tag: bool) -> bool:
        """Return True if a closing marker here ends reasoning; return False if it is a mention or in a code block.

        Within a line, a quoted marker is a mention; so is a tag in the middle of a sentence.
        """
        if self.is_in_code:
            return False
        if not self._beginning:
            return True
        is_quoted = self._num_backticks % 2 or self._num_quotes % 2
        last = self._end[-1:]
        if last in _OPENING or (is_quoted and not self._is_constrained):
            return False
        return not (is_tag and last.isspace()) or (last in _SPACES and self._end[0] in _SENTENCE_ENDS)

    def _start_line(self) -> None:
        self._beginning = ""  # first visible characters of the line, at most three
        self._end = ""  # the line's last two characters
        self._num_backticks = self._num_quotes = 0

    def _add_to_line(self, text: str) -> None:
        if not text:
            return
        if len(self._beginning) < len(_FENCE):
            self._beginning = (self._beginning + (text if self._beginning else text.lstrip(_SPACES)))[: len(_FENCE)]
        self._end = (self._end + text)[-2:]
        self._num_backticks += text.count("`")
        self._num_quotes += text.count('"')


_BLANK = " \t\r"

Reading = Generator[Part | None, None, bool]
"""Generator that yields parts, or None to wait for text; returns True if the expected text was found."""


class MarkedCalls(Protocol):
    """Interface of a parser for tool calls that begin with a marker."""

    @property
    def open(self) -> Sequence[str]:
        """Markers that may begin calls; a reply constrained by a grammar uses only the first."""

    def call(self, feed: TextFeed, marker: str) -> Reading:
        """Parse the calls after a marker; if no call follows, yield no parts and return False.

        The feed's mark must be at the start of the marker.
        """


class Prose:
    """Parser for content or reasoning up to a marker; mentions of markers are part of the text.

    Args:
        calls: Syntax of tool calls; None: the text has no calls.
        close: Marker that ends the text; None: only the end of the reply ends it.
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
        self._held = ""  # white space, which is dropped if a marker follows
        self._position = LinePosition(is_constrained=feed.is_constrained)

    def read(self) -> Generator[Part | None, None, str]:
        """Parse through `close` or the next calls; return the marker that was found, or "" at the end of the reply."""
        while marker := (yield from self._text()):
            if (yield from self._counts(marker)):
                self._held, self._position = "", LinePosition(is_constrained=self._feed.is_constrained)
                return marker
            self._add(marker)
        if self._held and self._kind is Content:
            yield Content(self._held)
        return ""

    def next_calls(self) -> Reading:
        """Parse calls if they follow immediately; return False if other text follows."""
        for marker in () if self._calls is None else self._calls.open:
            if (yield from self._feed.accepts(marker)):
                if (yield from self._counts(marker)):
                    return True
                self._feed.back(len(marker))
        return False

    def resume(self) -> None:
        """Continue with the text after a closing marker; put a line break before it."""
        self._held = "\n"

    def _text(self) -> Generator[Part | None, None, str]:
        """Yield the text before the next possible marker; return that marker, or "" at the end of the reply."""
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
        """Return True if a marker is a tag, False if it is a mention; if it begins calls, parse them."""
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
        """Parse the calls after a marker; if there are none, move back to the end of the marker and return False."""
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
    """Consume white space within the line; return True if the line or the reply ends there."""
    while (character := (yield from feed.peek())) and character in _BLANK:
        feed.take()
    return character in ("", "\n")
