"""Decode streamed tokens to text; hold back partial characters and possible stop strings."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from ..models.tokenizers.token_reader import REPLACEMENT, TokenReader

_WINDOW = 16
_CONTEXT = 8  # number of tokens kept as context; a character has at most 4 bytes
_NOT_UTF8 = b"\xff"
_Utf8 = getincrementaldecoder("utf-8")


class IncrementalText:
    """Incremental detokenizer: returns the text that each new token adds after the tokens `before`.

    The added text is the text of all tokens, minus its common prefix with the text of `before` alone. If `before` ends
    inside a character, the character belongs to the token that completes it.

    Text that a later token may change is held back. This is the case for an incomplete character, and for a run of
    single-byte tokens (see `TokenReader.joins`) until it ends or cannot be UTF-8.

    Attributes:
        ends: Offset of each token's end, in characters; None while unknown, or if the token ends inside a character.
    """

    def __init__(self, reader: TokenReader, before: Sequence[int] = ()) -> None:
        self._reader = reader
        self.ends: list[int | None] = []
        self._newest_shown = 0  # index of the latest token that has text
        self._inside: dict[int, int] = {}  # offset of the end of each held-back token, by token index
        self._length = 0
        self._restart(_last_tokens(reader, before) if reader.continues else [])

    @property
    def holds_back(self) -> bool:
        """True if text is held back or the latest token ends inside a character."""
        return self._tail.may_change

    @property
    def held(self) -> str:
        """Held-back text; "" if its last character is incomplete."""
        if not self._tail.num_whole or self._tail.num_open:
            return ""
        text = self._reader.text(self._window)
        return text[self._start(text) :]

    @property
    def offset(self) -> int:
        """Number of characters before the next token, including held-back text."""
        return self._length + self._tail.num_whole

    def push(self, token: int) -> str:
        """Add a token; return the new text that later tokens cannot change."""
        if not self._reader.shows(token):
            self.ends.append(None if self.holds_back else self._length)
            return ""
        was_invalid, may_have_changed = self._tail.is_invalid, self.holds_back
        num_before = len(self._window)
        self._add(token)
        if self._tail.is_run and self._tail.may_change:
            new = ""
        elif self._tail.is_invalid and was_invalid:
            new = REPLACEMENT
            self._length += 1
        else:
            text = self._reader.text(self._window)
            num_held = self._tail.num_held(text)
            certain = text[: len(text) - num_held]
            new = self._ended(certain, num_before) if may_have_changed else ""
            new += self._take(certain)
            if len(self._window) > _WINDOW and not self._tail.is_run:
                self._slide(num_held)
        self._newest_shown = len(self.ends)
        if not self.holds_back:
            self._inside.clear()
        elif not self._tail.num_open:
            self._inside[len(self.ends)] = self.offset
        self.ends.append(None if self.holds_back else self._length)
        return new

    def finish(self) -> str:
        """End the stream; return the held-back text."""
        if not self.holds_back:
            return ""
        self._tail = _Tail(self._reader)
        return self._take_held(self._reader.text(self._window))

    def _restart(self, tokens: Sequence[int]) -> None:
        """Reset the window, which is decoded again with each new token, to `tokens`; their text has been returned."""
        self._window: list[int] = []
        self._tail = _Tail(self._reader)
        for token in tokens:
            self._add(token)
        self._tail.num_whole = 0
        self._before = self._reader.text(self._window)
        self._taken = 0

    def _slide(self, num_held: int) -> None:
        """Drop the window's oldest tokens, which no longer affect later text."""
        self._restart(self._window[-_CONTEXT:])
        self._taken = len(self._before) - num_held
        self._before = ""

    def _add(self, token: int) -> None:
        was_invalid = self._tail.is_invalid
        self._tail.push(token)
        if not (was_invalid and self._tail.is_invalid):  # further invalid tokens do not affect later text
            self._window.append(token)

    def _ended(self, certain: str, num_tokens: int) -> str:
        """Return the held text of the first `num_tokens` tokens if the new token leaves it unchanged, otherwise "".

        `certain` is the window's text, including the new token, that later tokens cannot change.
        """
        earlier = self._reader.text(self._window[:num_tokens])
        if not certain.startswith(earlier):
            return ""
        return self._take_held(earlier)

    def _take_held(self, text: str) -> str:
        """Return the held text at the end of `text`, and record the ends of its tokens."""
        new = self._take(text)
        if self._inside.get(self._newest_shown) == self._length:  # otherwise the tokens decoded to different text
            for index, end in self._inside.items():
                self.ends[index] = end
        if self.ends:
            self.ends[self._newest_shown :] = [self._length] * (len(self.ends) - self._newest_shown)
        return new

    def _take(self, text: str) -> str:
        """Return the part of `text` that was not returned before; `text` is the final text of the window so far."""
        new = text[self._start(text) :]
        if not self._before.startswith(text):
            self._before = ""
        self._taken = max(self._taken, len(text))
        self._length += len(new)
        return new

    def _start(self, text: str) -> int:
        return max(self._taken, common_length(text, self._before)) if self._before else self._taken


def text_after(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text that `tokens` add when they follow the tokens `before`."""
    stream = IncrementalText(TokenReader(tokenizer), before)
    return "".join([*map(stream.push, tokens), stream.finish()])


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _last_tokens(reader: TokenReader, tokens: Sequence[int]) -> list[int]:
    """Return the last tokens in `tokens` that can affect how later tokens are decoded."""
    found: list[int] = []
    num_before_run = 0
    for token in reversed(tokens):
        if reader.shows(token):
            found.append(token)
            num_before_run += bool(num_before_run) or not reader.joins(token)
            if num_before_run == _CONTEXT:
                break
    return found[::-1]


class _Tail:
    """State of the decoder at the end of the text, which later tokens may still change.

    Attributes:
        is_run: True if the latest token belongs to a run of single-byte tokens, which are decoded together.
        is_invalid: True if the run cannot become valid UTF-8.
        num_whole: Number of complete characters in a run that later tokens may still change.
        num_open: Number of bytes of the incomplete last character; 0 if it is complete.
    """

    def __init__(self, reader: TokenReader) -> None:
        self._reader = reader
        self._utf8 = _Utf8(errors="replace")
        self.is_run = self.is_invalid = False
        self.num_whole = self.num_open = 0

    @property
    def may_change(self) -> bool:
        """True if a later token may change the text."""
        return self.num_open > 0 or (self.is_run and not self.is_invalid)

    def push(self, token: int) -> None:
        """Add a token that has text."""
        is_run = self._reader.joins(token)
        if is_run != self.is_run:
            self._utf8 = _Utf8(errors="strict" if is_run else "replace")
            self.is_run, self.is_invalid, self.num_whole = is_run, False, 0
        if self.is_invalid:
            return
        content = self._reader.bytes_of(token)
        try:
            text = self._utf8.decode(_NOT_UTF8 if content is None else content)
        except UnicodeDecodeError:
            self.is_invalid, self.num_whole, self.num_open = True, 0, 0
        else:
            self.num_whole += len(text) if is_run else 0
            self.num_open = len(self._utf8.getstate()[0])

    def num_held(self, text: str) -> int:
        """Return how many U+FFFD at the end of `text` come from an incomplete character."""
        num_replaced = len(text) - len(text.rstrip(REPLACEMENT))
        return min(num_replaced, self._reader.replacements(self.num_open))


class StopStrings:
    """Filter that returns text up to the first stop string, even if the string spans several pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """Stop string that ended the text; None before that."""

    def __bool__(self) -> bool:
        """Return True if there is at least one stop string."""
        return bool(self._stops)

    def ends_in(self, text: str) -> bool:
        """Return True if the held text plus `text` would contain a stop string."""
        return self.found is None and any(stop in self._held + text for stop in self._stops)

    def push(self, text: str) -> str:
        """Add text; return the text that cannot be part of a stop string. After a stop string, return ""."""
        if self.found is not None:
            return ""
        self._held += text
        positions = [
            (position + len(stop), position) for stop in self._stops if (position := self._held.find(stop)) >= 0
        ]
        if positions:
            stop_end, end = min(positions)  # the stop string that ends first, independent of the pieces
            self.found = self._held[end:stop_end]
        else:
            end = len(self._held) - self._begun()
        new, self._held = self._held[:end], self._held[end:]
        return new

    def finish(self) -> str:
        """End the text; return the held text, unless a stop string was found."""
        new, self._held = ("" if self.found is not None else self._held), ""
        return new

    def _begun(self) -> int:
        """Return the length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        ends = range(min(longest, len(self._held)), 0, -1)
        return next((size for size in ends if any(stop.startswith(self._held[-size:]) for stop in self._stops)), 0)
