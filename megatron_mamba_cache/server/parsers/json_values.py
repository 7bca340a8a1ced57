"""Read and repair JSON values in a text feed.

Some models do not escape control characters in strings, such as line breaks; the reader escapes them. Many clients
cannot parse lone surrogates or numbers beyond float64. A lone surrogate therefore becomes U+FFFD, and such a number
becomes a string. If a grammar constrains the reply, the number instead becomes the nearest finite number, so that it
still satisfies the schema. Other text is unchanged.
"""

import json
import math
import re
from collections.abc import Container, Generator

from ..strict_json import nearest_number, strict_scalar
from .text_feed import TextFeed, each, gathered

_CLOSERS = {"{": "}", "[": "]"}
_OF_SCALARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_BETWEEN = frozenset(",: \t\r\n")
_CONTROL = re.compile(r"[\x00-\x1f]")
_UNICODE_ESCAPE = "\\u"
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_HIGH = re.compile(r"\\u[dD][89abAB]..")  # escape of the first half of a surrogate pair
_PAIR_OR_HALF = re.compile(r"(\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|\\u[dD][89a-fA-F]..")


def json_value(feed: TextFeed) -> Generator[str | None, None, bool]:
    """Yield the repaired text of the next value as it arrives; return True if the value is complete."""
    closers: list[str] = []
    while True:
        character = yield from feed.peek()
        if character == '"':
            if not (yield from _string_text(feed)):
                return False
        elif character in _OF_SCALARS:
            scalar = yield from _run_of(_OF_SCALARS, feed)
            yield nearest_number(scalar) if feed.is_constrained else strict_scalar(scalar)
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


def strict_json(text: str, *, is_constrained: bool = False) -> str:
    """Return `text` with the JSON value at its start repaired as in `json_value`, and the rest unchanged."""
    feed = TextFeed(is_constrained=is_constrained)
    feed.add(text)
    feed.end()
    pieces = [piece or "" for piece in json_value(feed)]
    return "".join(pieces) + feed.take_all()


def json_string(feed: TextFeed) -> Generator[None, None, str | None]:
    """Read the next JSON string and return its value; return None if no complete, valid string follows."""
    if (yield from feed.peek()) != '"':
        return None
    text, is_complete = yield from gathered(_string_text(feed))
    try:
        return str(json.loads(text)) if is_complete else None
    except ValueError:  # the string has an unknown escape
        return None


def _string_text(feed: TextFeed) -> Generator[str | None, None, bool]:
    """Yield the text of the next string with its quotes; return True if the string is complete."""
    yield feed.take()
    while marker := (yield from each(feed.until(('"', "\\")), _with_controls_escaped)):
        if marker == '"':
            yield marker
            return True
        if not (yield from feed.peek()):
            return False
        if (yield from feed.accepts("u")):
            yield (yield from _unicode_escape(feed))
        else:
            yield marker + feed.take()
    return False


def _unicode_escape(feed: TextFeed) -> Generator[None, None, str]:
    """Read the rest of a Unicode escape, or of both escapes of a surrogate pair; replace a lone surrogate."""
    text = _UNICODE_ESCAPE + (yield from _run_of(_HEX_DIGITS, feed, most=4))
    while _HIGH.fullmatch(text[-6:]) and (yield from feed.accepts(_UNICODE_ESCAPE)):
        text += _UNICODE_ESCAPE + (yield from _run_of(_HEX_DIGITS, feed, most=4))
    return _PAIR_OR_HALF.sub(lambda found: found[1] or "\\ufffd", text)


def _run_of(characters: Container[str], feed: TextFeed, most: float = math.inf) -> Generator[None, None, str]:
    """Consume and return up to `most` characters, as long as they are in `characters`."""
    text = ""
    while len(text) < most and (yield from feed.peek()) in characters:
        text += feed.take()
    return text


def _with_controls_escaped(text: str) -> str:
    return _CONTROL.sub(lambda found: json.dumps(found[0])[1:-1], text)
