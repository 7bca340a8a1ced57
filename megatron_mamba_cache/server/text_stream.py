"""Decode streamed tokens to text, without partial characters or stop strings."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from ..models.tokenizers.token_reader import REPLACEMENT, TokenReader

_WINDOW = 16
_CONTEXT = 8  # number of tokens to keep; a character has at most 4 bytes
_NOT_UTF8 = b"\xff"
_Utf8 = getincrementaldecoder("utf-8")


class IncrementalText:
    """Decoder that takes one token at a time; the returned pieces join to the text that the tokens add.

    The added text is the text of all tokens without the prefix that it shares with the text of the earlier tokens. If
    the earlier tokens end inside a character, that character belongs to the token that completes it.

    Text that a later token may change is held back: an incomplete character, and single-byte tokens until their run
    ends (see `TokenReader.joins`), unless the run is certainly not UTF-8.

    Attributes:
        ends: Offset of each token's end, in characters; None if its text is held back or it ends inside a character.
    """

    def __init__(self, reader: TokenReader, before: Sequence[int] = ()) -> None:
        self._reader = reader
        self.ends: list[int | None] = []
        self._newest_shown = 0  # index of the newest token with text
        self._inside: dict[int, int] = {}  # offsets of token ends in a run that is held back, by token index
        self._length = 0
        self._restart(_last_tokens(reader, before) if reader.continues else [])

    @property
    def holds_back(self) -> bool:
        """True if the newest token ends inside a character or part of its text is held back."""
        return self._tail.may_change

    @property
    def held(self) -> str:
        """Text that is held back; "" if its last character is incomplete."""
        if not self._tail.num_whole or self._tail.num_open:
            return ""
        text = self._reader.text(self._window)
        return text[self._start(text) :]

    @property
    def offset(self) -> int:
        """Number of characters before the next token, including text that is held back."""
        return self._length + self._tail.num_whole

    def push(self, token: int) -> str:
        """Add a token; return the text that can no longer change."""
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
        """Return the text that was held back."""
        if not self.holds_back:
            return ""
        self._tail = _Tail(self._reader)
        return self._take_held(self._reader.text(self._window))

    def _restart(self, tokens: Sequence[int]) -> None:
        """Restart with tokens whose text was already returned."""
        self._window: list[int] = []
        self._tail = _Tail(self._reader)
        for token in tokens:
            self._add(token)
        self._tail.num_whole = 0
        self._before = self._reader.text(self._window)
        self._taken = 0

    def _slide(self, num_held: int) -> None:
        """Keep only the tokens that affect the decoding of later tokens."""
        self._restart(self._window[-_CONTEXT:])
        self._taken = len(self._before) - num_held
        self._before = ""

    def _add(self, token: int) -> None:
        was_invalid = self._tail.is_invalid
        self._tail.push(token)
        if not (was_invalid and self._tail.is_invalid):  # more tokens in an invalid run do not affect later text
            self._window.append(token)

    def _ended(self, certain: str, num_tokens: int) -> str:
        """Return the held text of the window's first `num_tokens` tokens if it can no longer change."""
        earlier = self._reader.text(self._window[:num_tokens])
        if not certain.startswith(earlier):
            return ""
        return self._take_held(earlier)

    def _take_held(self, text: str) -> str:
        """Return the held text and record the ends of its tokens."""
        new = self._take(text)
        if self._inside.get(self._newest_shown) == self._length:  # otherwise the run decoded to other text
            for index, end in self._inside.items():
                self.ends[index] = end
        if self.ends:
            self.ends[self._newest_shown :] = [self._length] * (len(self.ends) - self._newest_shown)
        return new

    def _take(self, text: str) -> str:
        """Return the part of `text` that was not returned before; `text` is the certain text of the window."""
        new = text[self._start(text) :]
        if not self._before.startswith(text):
            self._before = ""
        self._taken = max(self._taken, len(text))
        self._length += len(new)
        return new

    def _start(self, text: str) -> int:
        return max(self._taken, common_length(text, self._before)) if self._before else self._taken


def text_after(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text that `tokens` add after the tokens `before`."""
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
    """Return the last tokens of `tokens`, as many as affect the decoding of later tokens."""
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
    """State of the end of a text, which later tokens may change.

    Attributes:
        is_run: True if the newest token belongs to a run that is decoded as a whole.
        is_invalid: True if the run is not UTF-8, whatever tokens follow.
        num_whole: Number of complete characters in a run that may change.
        num_open: Number of bytes in an incomplete character.
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
        """Return how many replacement characters at the end of `text` represent an incomplete character."""
        num_replaced = len(text) - len(text.rstrip(REPLACEMENT))
        return min(num_replaced, self._reader.replacements(self.num_open))


class StopStrings:
    """Filter that passes text through up to the first stop string, which may span several pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """Stop string that ended the text."""

    def __bool__(self) -> bool:
        """Return True if there are stop strings."""
        return bool(self._stops)

    def ends_in(self, text: str) -> bool:
        """Return True if `text` would complete a stop string."""
        return self.found is None and any(stop in self._held + text for stop in self._stops)

    def push(self, text: str) -> str:
        """Add text; return the text that is certainly before a stop string, or "" after a stop string."""
        if self.found is not None:
            return ""
        self._held += text
        positions = [
            (position + len(stop), position) for stop in self._stops if (position := self._held.find(stop)) >= 0
        ]
        if positions:
            stop_end, end = min(positions)  # the stop string that is complete first, however the text was split
            self.found = self._held[end:stop_end]
        else:
            end = len(self._held) - self._begun()
        new, self._held = self._held[:end], self._held[end:]
        return new

    def finish(self) -> str:
        """End the text; return the held text, which can no longer begin a stop string."""
        new, self._held = ("" if self.found is not None else self._held), ""
        return new

    def _begun(self) -> int:
        """Return the length of the held text's longest suffix that is a prefix of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        ends = range(min(longest, len(self._held)), 0, -1)
        return next((size for size in ends if any(stop.startswith(self._held[-size:]) for stop in self._stops)), 0)
