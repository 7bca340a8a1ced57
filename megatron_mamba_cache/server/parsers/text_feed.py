"""Input buffer for parsers that read text as it arrives.

The parsers are generators: they yield None when they need more text, and finally return a result. The result does not
depend on how the text was split into pieces.
"""

from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeVar

_Answer = TypeVar("_Answer")
_Changed = TypeVar("_Changed")


class TextFeed:
    """Buffer with the text of a reply, which a parser consumes from the start.

    Args:
        token_tags: Tags that are single tokens. Their text is a tag only at positions passed to `note_tag`.
        is_constrained: True if a grammar constrains the reply, and thereby the positions of its tags.
    """

    def __init__(self, token_tags: Collection[str] = (), *, is_constrained: bool = False) -> None:
        self.is_constrained = is_constrained
        self._token_tags = frozenset(token_tags)
        self._tag_positions: set[int] = set()
        self._num_dropped = 0  # number of characters dropped from the start of the reply
        self.found: list[tuple[str, int]] = []
        """Pairs (tag, position) found so far, without mentions."""
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self.has_ended = False
        """True if no more text will arrive."""
        self.is_reasoning = False
        """True while the parser is within reasoning."""

    def note_tag(self, position: int) -> None:
        """Record that one of `token_tags` begins at this character of the reply."""
        self._tag_positions.add(position)

    @property
    def position(self) -> int:
        """Number of characters consumed since the start of the reply."""
        return self._num_dropped + self._at

    def is_token(self, tag: str) -> bool:
        """Return True if a tag is a single token; its text then counts only at positions passed to `note_tag`."""
        return tag in self._token_tags

    def add(self, text: str) -> None:
        """Append text; drop the consumed text, but keep the text after the mark."""
        start = self._at if self._mark is None else self._mark
        self._text = self._text[start:] + text
        self._num_dropped += start
        self._at -= start
        self._mark = None if self._mark is None else 0

    def end(self) -> None:
        """Record that no more text will arrive."""
        self.has_ended = True

    def mark(self, back: int = 0) -> None:
        """Mark this position, or the position `back` characters earlier, so that `back_to_mark` can return to it."""
        self._mark = self._at - back

    def forget_mark(self) -> None:
        """Remove the mark, so that text after it can be dropped."""
        self._mark = None

    def take_all(self) -> str:
        """Consume and return all text that has arrived."""
        return self._take(len(self._text))

    def back_to_mark(self) -> None:
        """Move back to the mark, and remove the mark."""
        assert self._mark is not None
        self._at, self._mark = self._mark, None

    def back(self, count: int) -> None:
        """Move back by `count` consumed characters; valid only if no text was added since they were consumed."""
        self._at -= count

    def skip(self, count: int) -> None:
        """Move forward by `count` characters, for example after `back_to_mark`."""
        self._at += count

    def peek(self) -> Generator[None, None, str]:
        """Return the next character without consuming it; return "" at the end of the reply."""
        while self._at == len(self._text) and not self.has_ended:
            yield None
        return self._text[self._at : self._at + 1]

    def take(self) -> str:
        """Consume and return the character that `peek` has returned."""
        return self._take(self._at + 1)

    def space(self) -> Generator[None, None, str]:
        """Consume and return white space, including line breaks."""
        found = ""
        while (character := (yield from self.peek())) and character.isspace():
            found += self.take()
        return found

    def accepts(self, expected: str) -> Generator[None, None, bool]:
        """Consume `expected` and return True if it comes next; otherwise return False."""
        while True:
            rest = self._text[self._at : self._at + len(expected)]
            if rest == expected:
                if not self._is_tag(expected, self._at):
                    return False
                self._at += len(expected)
                return True
            if self.has_ended or not expected.startswith(rest):
                return False
            yield None

    def until(self, markers: Sequence[str]) -> Generator[str | None, None, str]:
        """Consume text through the first marker; yield the text before it; return the marker, or "" if none comes."""
        while True:
            positions = [(at + len(marker), at) for marker in markers if (at := self._find(marker)) >= 0]
            if positions:
                end, start = min(positions)
                if start > self._at:
                    yield self._take(start)
                return self._take(end)
            kept = 0 if self.has_ended else self._begun(markers)
            if len(self._text) - kept > self._at:
                yield self._take(len(self._text) - kept)
            if self.has_ended:
                return ""
            yield None

    def _take(self, end: int) -> str:
        text, self._at = self._text[self._at : end], end
        return text

    def _find(self, marker: str) -> int:
        at = self._text.find(marker, self._at)
        while at >= 0 and not self._is_tag(marker, at):
            at = self._text.find(marker, at + 1)
        return at

    def _is_tag(self, marker: str, at: int) -> bool:
        return marker not in self._token_tags or self._num_dropped + at in self._tag_positions

    def _begun(self, markers: Sequence[str]) -> int:
        """Return the length of the longest suffix of the buffer that is a prefix of a marker."""
        longest = max(map(len, markers), default=1) - 1
        rest = self._text[max(self._at, len(self._text) - longest) :]
        starts = range(len(rest))
        return next((len(rest) - at for at in starts if any(marker.startswith(rest[at:]) for marker in markers)), 0)


def each(
    reading: Generator[str | None, None, _Answer], change: Callable[[str], _Changed]
) -> Generator[_Changed | None, None, _Answer]:
    """Yield `change(piece)` for each piece that the generator `reading` yields; return the generator's result."""
    while True:
        try:
            piece = next(reading)
        except StopIteration as done:
            return done.value
        yield None if piece is None else change(piece)


def gathered(reading: Generator[str | None, None, _Answer]) -> Generator[None, None, tuple[str, _Answer]]:
    """Run the generator `reading` to its end; return its joined pieces and its result."""
    pieces: list[str] = []
    while True:
        try:
            piece = next(reading)
        except StopIteration as done:
            return "".join(pieces), done.value
        if piece is None:
            yield None
        else:
            pieces.append(piece)
