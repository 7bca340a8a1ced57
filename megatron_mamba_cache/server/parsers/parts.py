"""Parts of a parsed reply, and the incremental parser that produces them."""

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from .text_feed import TextFeed


@dataclass(frozen=True, slots=True)
class Content:
    """Reply text for the user, or a piece of it."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The model's reasoning, or a piece of it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Start of a call to the tool `name`; `CallArguments` and, if the call is complete, `CallEnd` follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Piece of a call's arguments; the joined pieces are JSON unless the model generated other text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """End of a tool call; missing if the call is incomplete."""


Part = Content | Reasoning | CallBegin | CallArguments | CallEnd

Parsing = Generator[Part | None, None, None]
"""Generator that yields parts, or None when it needs more text."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call in a reply."""

    name: str
    arguments: str  # JSON, unless the model generated other text or the call is incomplete


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """Content, reasoning and tool calls of one reply."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]


class ReplyParser:
    """Incremental parser for one reply; the merged parts do not depend on how the text was split into pieces.

    Args:
        parse: Generator function that reads a `TextFeed` and yields the parts.
        token_tags: Tags that are single tokens; their text is a tag only at positions passed to `note_tag`.
        is_constrained: True if a grammar constrains the reply.
    """

    def __init__(
        self, parse: Callable[[TextFeed], Parsing], token_tags: Collection[str] = (), *, is_constrained: bool = False
    ) -> None:
        self._feed = TextFeed(token_tags, is_constrained=is_constrained)
        self._parsing = parse(self._feed)
        self.num_calls = 0
        """Number of tool calls that have begun."""
        self.num_complete_calls = 0

    @property
    def is_reasoning(self) -> bool:
        """True while the reply is within reasoning."""
        return self._feed.is_reasoning

    def note_tag(self, position: int) -> None:
        """Record that one of `token_tags` begins at this character of the reply."""
        self._feed.note_tag(position)

    @property
    def found_tags(self) -> Sequence[tuple[str, int]]:
        """(tag, position) pairs found so far, without mentions of tags."""
        return self._feed.found

    def push(self, text: str) -> list[Part]:
        """Add text; return the new parts that later text cannot change."""
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
    """Parse a reply without reasoning or calls: all text is content."""
    while True:
        if text := feed.take_all():
            yield Content(text)
        if feed.has_ended:
            return
        yield None


def merged(parts: Iterable[Part]) -> list[Part]:
    """Join adjacent pieces of the same kind and drop empty pieces."""
    found: list[Part] = []
    for kind, group in groupby(parts, type):
        if kind in (CallBegin, CallEnd):
            found += group
        elif text := "".join(part.text for part in group):  # type: ignore[union-attr]
            found.append(kind(text))
    return found


def assembled(parts: Iterable[Part]) -> ParsedReply:
    """Assemble the complete reply from its parts."""
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
