"""Convert a reply's tokens to text and parsed parts as they arrive, up to a stop string."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from ..grammars.compiler import TOO_COMPLEX
from ..models.tokenizers.token_reader import TokenReader
from .backend import Progress
from .conversation import arguments_object
from .errors import ApiError
from .parsers.content import TagPositions
from .parsers.parts import Content, ParsedReply, Part, ReplyParser, assembled, merged, plain_text
from .prompt_scores import finite
from .text_stream import IncrementalText, StopStrings


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """Token of a reply or echoed prompt, or one of the top-n alternatives at its position."""

    token_id: int
    text: str = ""  # empty without log-probs; U+FFFD for a partial character
    content: bytes | None = None  # the token's bytes; None if unknown
    offset: int = 0  # offset of the token's text in the reply, in characters
    log_prob: float | None = None  # None unless requested
    alternatives: tuple["TokenInfo", ...] = ()  # top-n tokens, most probable first; empty unless requested


@dataclass(frozen=True, slots=True)
class Piece:
    """Text, tokens and parsed parts that one step adds to a reply."""

    text: str
    tokens: tuple[TokenInfo, ...]
    finish_reason: str | None = None  # "stop", "length", "abort" or "tool_calls" in the last piece, otherwise None
    is_prompt: bool = False
    parts: tuple[Part, ...] = ()  # parts parsed from the text


@dataclass(frozen=True, slots=True)
class ReplyReading:
    """Parser settings for a reply: visible special tokens, tool calls and reasoning."""

    shown: Collection[str] | None = ()  # special tokens that the text includes; None: all
    # Creates a parser. Arguments: True if the reply begins within reasoning; tags that are single tokens.
    parser: Callable[[bool, Collection[str]], ReplyParser] = lambda _is_open, _tags: ReplyParser(plain_text)
    tags: Mapping[int, str] = field(default_factory=dict)  # tags that are single tokens, by token id
    most_calls: int | None = None  # maximum number of tool calls; None: no limit


def scored_token(
    reader: TokenReader,
    token: int,
    log_prob: float | None,
    alternatives: Mapping[int, float] = MappingProxyType({}),
    offset: int = 0,
) -> TokenInfo:
    """Build the `TokenInfo` for a token; `alternatives` has the top-n log-probs, by token id."""
    best = tuple(scored_token(reader, other, value) for other, value in alternatives.items())
    value = None if log_prob is None else finite(log_prob)
    return TokenInfo(token, reader.text_of(token), reader.bytes_of(token), offset, value, best)


@dataclass(frozen=True, slots=True)
class ReplyPrompt:
    """Properties of a prompt that affect how its reply is decoded and parsed."""

    token_ids: Sequence[int] = ()
    opens_reasoning: bool = False  # True if the prompt ends within reasoning
    num_echoed: int = 0  # number of characters that the echo adds before the reply


class Reply:
    """One reply: its tokens, and the text and parts decoded from them up to the first stop string.

    The text is what the reply's tokens add to the text of the prompt's tokens; see `IncrementalText`.

    Args:
        stops: Stop strings; they are not part of the text.
        end_ids: Tokens that end a reply; `exact` omits them.
        reading: Settings for parsing the reply; None: all text is content.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        end_ids: frozenset[int] = frozenset(),
        *,
        prompt: ReplyPrompt | None = None,
        reading: ReplyReading | None = None,
    ) -> None:
        reading, prompt = reading or ReplyReading(), prompt or ReplyPrompt()
        self._reader = TokenReader(tokenizer, reading.shown)
        self._text = IncrementalText(self._reader, prompt.token_ids)
        self._stops = StopStrings(stops)
        self._special_stops = special_stops(tokenizer, stops)
        self._new_parser = partial(reading.parser, prompt.opens_reasoning)
        self._tags = TagPositions(reading.tags)
        self._num_pushed = 0  # number of decoded characters, including text after a stop string
        self._parser = self._new_parser(self._tags.texts)
        self._most_calls = reading.most_calls
        self._end_ids = end_ids
        self._offset = prompt.num_echoed
        self._texts: list[str] = []
        self.parts: list[Part] = []
        self.token_ids: list[int] = []
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None
        self._was_cut = False
        self.latest = Progress()

    @property
    def text(self) -> str:
        """Text of the reply so far."""
        return "".join(self._texts)

    @property
    def stop_string(self) -> str | None:
        """Stop string that ended the reply; None if the reply continues or ended for another reason."""
        if self._stops.found is None and self.finish_reason == "stop" and self.token_ids:
            return self._special_stops.get(self.token_ids[-1])
        return self._stops.found

    def take(self, progress: Progress) -> Piece:
        """Add one step's tokens; return the new piece, which may be empty. Raise `ApiError` if the request failed."""
        self._note(progress)
        tokens, new, parts = [], [], []
        for index, token in enumerate(progress.tokens):
            tokens.append(self._info(token, index, progress))
            new.append(self._push(token))
            was_reasoning = self._parser.is_reasoning
            parts += self._parser.push(new[-1])
            self.num_reasoning_tokens += was_reasoning or self._parser.is_reasoning
            if self._stops.found is not None or self._parser.num_complete_calls == self._most_calls:
                self.finish_reason = "stop"
                self._was_cut = True
                break
        if self.finish_reason is None and progress.end is not None:
            new += [self._stops.push(self._text.finish()), self._stops.finish()]
            parts += self._parser.push("".join(new[-2:]))
            self.finish_reason = "stop" if self._stops.found is not None else progress.end
            self._was_cut = self._stops.found is not None or progress.end in ("length", "abort")
        if self.finish_reason is not None:
            parts += self._parser.finish()
        if self.finish_reason == "stop" and 0 < self._parser.num_calls == self._parser.num_complete_calls:
            self.finish_reason = "tool_calls"
        text, found = "".join(new), merged(parts)
        self._texts.append(text)
        self.parts += found
        return Piece(text, tuple(tokens), self.finish_reason, parts=tuple(found))

    def exact(self) -> tuple[str, list[int]]:
        """Return the longest prefix of the text that ends at a token boundary, and its token ids without end tokens."""
        length = len(self.text)
        inside = [
            (end, index)
            for index, (end, token) in enumerate(zip(self._text.ends, self.token_ids, strict=True))
            if end is not None and end <= length and token not in self._end_ids
        ]
        end, last = max(inside, default=(0, -1))
        return self.text[:end], self.token_ids[: last + 1]

    @property
    def is_parsed(self) -> bool:
        """True if the reply contains reasoning or tool calls."""
        return any(not isinstance(part, Content) for part in self.parts)

    @property
    def is_whole(self) -> bool:
        """True if `exact` returns the whole text and all tool calls are complete."""
        return self.exact()[0] == self.text and self._parser.num_complete_calls == self._parser.num_calls

    def parsed(self) -> ParsedReply:
        """Return the content, reasoning and calls so far."""
        return assembled(self.parts)

    def same_in(self, text: str) -> str | None:
        """Return the prefix of `text` that parses to this reply; None if there is none.

        `text` is this reply as the chat template renders it. White space at both ends and in arguments may differ. If a
        stop string or limit ended the reply after a call, the reply lacks the closing marker that templates render; the
        prefix then ends with that call. Otherwise, the prefix is the whole text.
        """
        if self._was_cut and self._parser.num_calls:
            if self.text[len(self._through_calls(self.text)) :].strip():
                return None
            text = self._through_calls(text)
        parser = self._parser_of(text)
        found = assembled([*parser.push(text), *parser.finish()])
        return text if _essence(found) == _essence(self.parsed()) else None

    def _through_calls(self, text: str) -> str:
        """Return the shortest prefix of `text` with as many complete calls as this reply; if none, all of `text`."""
        parser = self._parser_of(text)
        for index, character in enumerate(text):
            parser.push(character)
            if parser.num_complete_calls == self._parser.num_complete_calls:
                return text[: index + 1]
        return text

    def _parser_of(self, rewritten: str) -> ReplyParser:
        """Return a parser for `rewritten`, the template's rendering of this reply, with its tag positions recorded."""
        own = self._tags.joined(self._parser.found_tags)
        parser = self._new_parser(own.texts)
        for position in own.in_rewritten(rewritten, self.text):
            parser.note_tag(position)
        return parser

    def _push(self, token: int) -> str:
        """Add a token; return its text up to a stop string. Also detect stop strings that end in held-back text."""
        self.token_ids.append(token)
        text = self._text.push(token)
        position = self._tags.find(token, text, self._num_pushed)
        if position is not None:
            self._parser.note_tag(position)
        self._num_pushed += len(text)
        new = self._stops.push(text)
        if self._stops and self._stops.ends_in(self._text.held):
            new += self._stops.push(self._text.finish())
        return new

    def _info(self, token: int, index: int, progress: Progress) -> TokenInfo:
        if not progress.log_probs:
            return TokenInfo(token)
        alternatives = progress.alternatives[index] if progress.alternatives else {}
        offset = self._offset + self._text.offset
        return scored_token(self._reader, token, progress.log_probs[index], alternatives, offset)

    def _note(self, progress: Progress) -> None:
        self.latest = progress
        if progress.end == "error":
            if progress.error is not None and progress.error.startswith(TOO_COMPLEX):
                raise ApiError(400, progress.error, code="grammar_too_complex")
            raise ApiError(500, f"the request failed: {progress.error}", code="engine_error")


def special_stops(tokenizer: Any, stops: Sequence[str]) -> dict[int, str]:
    """Return the stop strings that are special tokens, by token id."""
    special: Collection[int] = getattr(tokenizer, "special_ids", ())
    ids = [tokenizer.id_of(stop) for stop in stops] if special else []
    return {token: stop for token, stop in zip(ids, stops, strict=False) if token in special}


def _essence(reply: ParsedReply) -> object:
    calls = [(call.name, arguments_object(call.arguments)) for call in reply.calls]
    return reply.content.strip(), reply.reasoning.strip(), calls


class EmptyReply(Reply):
    """Reply to a request with `max_tokens=0`; has no tokens and ends with the first `Progress`."""

    def take(self, progress: Progress) -> Piece:
        self._note(progress)
        self.finish_reason = "abort" if progress.end == "abort" else "length"
        return Piece("", (), self.finish_reason)
