"""Parts of a reply, and their parser."""

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from .text_feed import TextFeed


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call begins; parts up to its `CallEnd` belong to it."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; the pieces together are JSON unless the model wrote something else."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A tool call is complete."""


Part = Content | Reasoning | CallBegin | CallArguments | CallEnd

Parsing = Generator[Part | None, None, None]
"""Parts as they become certain; None when more text is needed."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call."""

    name: str
    arguments: str  # JSON, unless the model wrote something else or was cut off


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """All parts of a reply."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]


class ReplyParser:
    """Parses one reply; merged parts do not depend on how the text arrives.

    Args:
        parse: Reads the text and yields the parts.
        token_tags: Tags that count only at noted positions.
        is_held: True if a grammar holds the reply.
    """

    def __init__(
        self, parse: Callable[[TextFeed], Parsing], token_tags: Collection[str] = (), *, is_held: bool = False
    ) -> None:
        self._feed = TextFeed(token_tags, is_held=is_held)
        self._parsing = parse(self._feed)
        self.num_calls = 0
        """Tool calls that have begun."""
        self.num_complete_calls = 0

    @property
    def is_reasoning(self) -> bool:
        """True when the reply so far ends within reasoning."""
        return self._feed.is_reasoning

    def note_tag(self, position: int) -> None:
        """Note that one of `token_tags` begins at this character of the reply."""
        self._feed.note_tag(position)

    @property
    def found_tags(self) -> Sequence[tuple[str, int]]:
        """Tags of the reply that were not mentions, with their positions."""
        return self._feed.found

    def push(self, text: str) -> list[Part]:
        """Add text and return the parts that are now certain."""
        self._feed.add(text)
        return self._advance()

    def finish(self) -> list[Part]:
        """End the reply and return its last parts."""
        self._feed.end()
        return self._advance()

    def _advance(self) -> list[Part]:
        parts: list[Part] = []
        for part in self._parsing:
            if part is None:
                break
            parts.append(part)
            if isinstance(part, CallBegin):
                self.num_calls += 1
                self._feed.is_reasoning = False
            self.num_complete_calls += isinstance(part, CallEnd)
        return merged(parts)


def plain_text(feed: TextFeed) -> Parsing:
    """Parse a reply of plain content."""
    while True:
        if text := feed.take_all():
            yield Content(text)
        if feed.has_ended:
            return
        yield None


def merged(parts: Iterable[Part]) -> list[Part]:
    """Join adjacent pieces of one kind and drop empty ones."""
    found: list[Part] = []
    for kind, group in groupby(parts, type):
        if kind in (CallBegin, CallEnd):
            found += group
        elif text := "".join(part.text for part in group):  # type: ignore[union-attr]
            found.append(kind(text))
    return found


def assembled(parts: Iterable[Part]) -> ParsedReply:
    """Return the reply of these parts."""
    content, reasoning = [], []
    calls: list[tuple[str, list[str]]] = []
    for part in parts:
        match part:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallBegin(name):
                calls.append((name, []))
            case CallArguments(text):
                calls[-1][1].append(text)
    found = tuple(ToolCall(name, "".join(arguments)) for name, arguments in calls)
    return ParsedReply("".join(content), "".join(reasoning), found)
