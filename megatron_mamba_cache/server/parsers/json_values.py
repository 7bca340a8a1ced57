"""JSON read from a text feed: as far as it goes, whatever follows.

Raw control characters inside strings, such as line ends, are escaped, since models forget to; everything else is passed
on as written.
"""

import json
import re
from collections.abc import Generator

from .text_feed import TextFeed, each, gathered

_CLOSERS = {"{": "}", "[": "]"}
_OF_SCALARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_BETWEEN = frozenset(",: \t\r\n")
_CONTROL = re.compile(r"[\x00-\x1f]")


def json_value(feed: TextFeed) -> Generator[str | None, None, bool]:
    """Yield the text of one value as it arrives; return whether it is complete and its brackets match."""
    closers: list[str] = []
    while True:
        character = yield from feed.peek()
        if character == '"':
            if not (yield from _string_text(feed)):
                return False
        elif character in _OF_SCALARS:
            yield (yield from _scalar(feed))
        elif character in _CLOSERS:
            closers.append(_CLOSERS[character])
            yield feed.take()
        elif closers and character == closers[-1]:
            closers.pop()
            yield feed.take()
        elif closers and character in _BETWEEN:
            yield feed.take()
        else:
            return False
        if not closers:
            return True


def json_string(feed: TextFeed) -> Generator[None, None, str | None]:
    """Return the value of a string; None if no complete one comes next."""
    if (yield from feed.peek()) != '"':
        return None
    text, is_complete = yield from gathered(_string_text(feed))
    try:
        return str(json.loads(text)) if is_complete else None
    except ValueError:  # an unknown escape
        return None


def _string_text(feed: TextFeed) -> Generator[str | None, None, bool]:
    """Yield the text of the string that comes next, quotes included; return whether it is complete."""
    yield feed.take()
    while marker := (yield from each(feed.until(('"', "\\")), _with_controls_escaped)):
        if marker == '"':
            yield marker
            return True
        if not (yield from feed.peek()):
            return False
        yield marker + feed.take()
    return False


def _scalar(feed: TextFeed) -> Generator[None, None, str]:
    text = ""
    while (yield from feed.peek()) in _OF_SCALARS:
        text += feed.take()
    return text


def _with_controls_escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: json.dumps(found[0])[1:-1], text)
