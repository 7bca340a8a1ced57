"""One reply as it grows: tokens in, text with a right end out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .backend import Progress
from .errors import ApiError
from .text_stream import IncrementalText, StopStrings


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A generated token.

    Args:
        text: Of this token alone; U+FFFD stands for bytes that are no whole character. Only with log-probs.
        content: Its bytes; None if they are not known.
        offset: Characters of the reply before the first one that it is a part of.
        log_prob, alternatives: If wanted; alternatives map text to log-prob.
    """

    token_id: int
    text: str = ""
    content: bytes | None = None
    offset: int = 0
    log_prob: float | None = None
    alternatives: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Piece:
    """What a reply has grown by.

    Args:
        finish_reason: "stop" or "length" with the last piece, else None.
        is_prompt: Whether this is the prompt, given back before the reply.
    """

    text: str
    tokens: tuple[TokenInfo, ...]
    finish_reason: str | None = None
    is_prompt: bool = False


class TokenTexts(Protocol):
    """What turns generated tokens into text."""

    def detokenize(self, tokens: list[int]) -> str:
        """Return the text of tokens; bytes that are no UTF-8 come out as U+FFFD."""

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token; None if they are not known."""


class Reply:
    """A reply of the engine's tokens up to its end, or to the first stop string in its text.

    Args:
        stops: Stop strings; they are not part of the text.
        end_ids: Tokens that end a reply without text of their own.
        offset: Characters that are given out before it.
    """

    def __init__(
        self,
        tokenizer: TokenTexts,
        stops: Sequence[str] = (),
        end_ids: frozenset[int] = frozenset(),
        offset: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._text = IncrementalText(tokenizer.detokenize)
        self._stops = StopStrings(stops)
        self._end_ids = end_ids
        self._offset = offset
        self._num_characters = 0  # of the tokens' text, a stop string and what follows included
        self._ends: list[int | None] = []  # characters up to the end of each token; None: inside a character
        self._parts: list[str] = []
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.latest = Progress()

    @property
    def text(self) -> str:
        """The text so far, as it was given out."""
        return "".join(self._parts)

    def take(self, progress: Progress) -> Piece:
        """Add a step's progress and return what it gives out, which may be nothing yet.

        Raises:
            ApiError: 500 if the engine could not go on.
        """
        self._note(progress)
        tokens, new = [], []
        for index, token in enumerate(progress.tokens):
            tokens.append(self._info(token, index, progress))
            new.append(self._push(token))
            if self._stops.found is not None:
                self.finish_reason = "stop"
                break
        if self.finish_reason is None and progress.end is not None:
            rest = self._text.finish()
            self._num_characters += len(rest)
            self._ends[-1:] = [self._num_characters] * bool(self._ends)
            new += [self._stops.push(rest), self._stops.finish()]
            self.finish_reason = "stop" if self._stops.found is not None else progress.end
        text = "".join(new)
        self._parts.append(text)
        return Piece(text, tuple(tokens), self.finish_reason)

    def exact(self) -> tuple[str, list[int]]:
        """Return the reply's text, or as much of it as ends with a token, and its tokens without end tokens."""
        length = len(self.text)
        inside = [(end, index) for index, end in enumerate(self._ends) if end is not None and end <= length]
        end, last = max(inside, default=(0, -1))
        token_ids = self.token_ids[: last + 1]
        while token_ids and token_ids[-1] in self._end_ids:
            token_ids.pop()
        return self.text[:end], token_ids

    def _push(self, token: int) -> str:
        self.token_ids.append(token)
        text = self._text.push(token)
        self._num_characters += len(text)
        self._ends.append(None if self._text.holds_back else self._num_characters)
        return self._stops.push(text)

    def _info(self, token: int, index: int, progress: Progress) -> TokenInfo:
        if not progress.log_probs:
            return TokenInfo(token)
        alternatives = progress.alternatives[index] if progress.alternatives else {}
        text, content = self._tokenizer.detokenize([token]), self._tokenizer.bytes_of(token)
        offset = self._offset + self._num_characters
        return TokenInfo(token, text, content, offset, progress.log_probs[index], alternatives)

    def _note(self, progress: Progress) -> None:
        self.latest = progress
        if progress.end == "error":
            raise ApiError(500, f"the request failed: {progress.error}", code="engine_error")


class EmptyReply(Reply):
    """The reply of no tokens: it ends once the prompt is computed, and the token that tells so is dropped."""

    def take(self, progress: Progress) -> Piece:
        """See `Reply`."""
        self._note(progress)
        self.finish_reason = "length"
        return Piece("", (), self.finish_reason)
