"""Text from tokens as they arrive, without partial characters or any part of a stop string."""

from collections.abc import Callable, Sequence

from ..models.tokenizers.token_bytes import REPLACEMENT

_MOST_HELD = 3  # an unfinished UTF-8 character has at most three bytes
_WINDOW = 16
_CONTEXT = 8
_LONGEST_WINDOW = 64


class IncrementalText:
    """Turns tokens into text one at a time; the pieces together are the text of all tokens.

    Args:
        detokenize: Returns the text of a list of tokens; bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self, detokenize: Callable[[list[int]], str]) -> None:
        self._detokenize = detokenize
        self._window: list[int] = []  # the newest tokens, after enough earlier ones for their context
        self._given = 0  # characters of the window's text that were returned already
        self._is_held = False

    @property
    def holds_back(self) -> bool:
        """True when part of the newest token's text is held back."""
        return self._is_held

    def push(self, token: int) -> str:
        """Return the text that is certain now; an incomplete character at its end is held back."""
        self._window.append(token)
        text = self._detokenize(self._window)
        tail = len(text) - len(text.rstrip(REPLACEMENT))
        end = len(text) - (0 if len(self._window) > _LONGEST_WINDOW else min(tail, _MOST_HELD))
        new = text[self._given : end]
        self._given, self._is_held = max(self._given, end), end < len(text)
        if len(self._window) > _WINDOW and end == len(text):
            self._window = self._window[-_CONTEXT:]
            self._given = len(self._detokenize(self._window))
        return new

    def finish(self) -> str:
        """Return what was held back."""
        new = self._detokenize(self._window)[self._given :] if self._window else ""
        self._given, self._is_held = self._given + len(new), False
        return new


class StopStrings:
    """Passes text through up to the first stop string, which may span several pieces.

    Args:
        stops: Non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """Return the text that is certainly before any stop string; "" once one was found."""
        if self.found is not None:
            return ""
        self._held += text
        places = [(place + len(stop), place) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            stop_end, end = min(places)  # the one that is complete first, however the text was split
            self.found = self._held[end:stop_end]
        else:
            end = len(self._held) - self._begun()
        new, self._held = self._held[:end], self._held[end:]
        return new

    def finish(self) -> str:
        """Return what was held back, since no stop string can be completed any more."""
        new, self._held = ("" if self.found is not None else self._held), ""
        return new

    def _begun(self) -> int:
        """Return the length of the longest suffix of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        ends = range(min(longest, len(self._held)), 0, -1)
        return next((size for size in ends if any(stop.startswith(self._held[-size:]) for stop in self._stops)), 0)
