"""Random replies that a grammar allows, in tokens of `PieceTokenizer`; after some tokens, they are led to an end."""

from collections.abc import Sequence
from random import Random
from typing import Any

from tests.grammars.piece_tokenizer import END, PieceTokenizer

_MOST = 4000
_VALUES = b"n0tf["  # first characters of the shortest JSON values
_CLOSING_TAG = b"\n</parameter>\n"


class StuckReplyError(AssertionError):
    """Error for a reply that cannot end: the grammar allows no token, or the end is not reached."""


def random_reply(matcher: Any, random: Random, tokenizer: PieceTokenizer, length: int) -> str:
    """Return the text of a random reply that ends soon after `length` tokens.

    Args:
        matcher: New matcher, which has consumed no token.

    Raises:
        StuckReplyError: If the grammar allows no token before the end, or the end is not reached.
    """
    reply = _Reply()
    for step in range(_MOST):
        allowed = _allowed(matcher, tokenizer.vocab_size)
        if matcher.is_error() or not allowed:
            reason = matcher.get_error()[:300]
            raise StuckReplyError(f"after {reply.data!r}: {reason}")
        if reply.ends_with_number:  # keep numbers short, because JSON allows numbers beyond float64
            short = [t for t in allowed if t == END or b"e" not in (tokenizer.bytes_of(t) or b"").lower()]
            allowed = short or allowed
        tokens = [random.choice(allowed)] if step < length else _towards_end(matcher, allowed, reply, random)
        if END in tokens:
            return reply.data.decode()
        matcher.consume_tokens(tokens)
        reply.add(b"".join(tokenizer.bytes_of(token) or b"" for token in tokens))
    raise StuckReplyError(f"no end after {reply.data[-300:]!r}")


class _Reply:
    """Bytes of a reply so far, and True if they end inside a JSON string."""

    def __init__(self) -> None:
        self.data = b""
        self.is_in_string = False
        self._is_escaped = False

    @property
    def ends_with_number(self) -> bool:
        """True if the last byte is a digit outside a string."""
        return not self.is_in_string and self.data[-1:].isdigit()

    def add(self, data: bytes) -> None:
        self.data += data
        if data == _CLOSING_TAG:
            self.is_in_string = False  # a quote in plain text does not start a string
        for byte in data:
            if self._is_escaped:
                self._is_escaped = False
            elif byte == ord("\\"):
                self._is_escaped = self.is_in_string
            elif byte == ord('"'):
                self.is_in_string = not self.is_in_string


def _allowed(matcher: Any, vocab_size: int) -> list[int]:
    mask = matcher.compute_bitmask()
    return [token for token in range(vocab_size) if mask[token >> 3] >> (token & 7) & 1]


def _towards_end(matcher: Any, allowed: Sequence[int], reply: _Reply, random: Random) -> list[int]:
    """Return tokens that lead to the end if known, otherwise one allowed token, preferably with printable text."""
    if END in allowed:
        return [END]
    for tag in (_CLOSING_TAG, b"</function>\n</tool_call>"):
        if tag[0] in allowed and matcher.deep_copy().try_consume_tokens(list(tag)) == len(tag):
            return list(tag)
    wanted = b'"' if reply.is_in_string else b"}]," + (b"" if reply.ends_with_number else _VALUES)
    known = [byte for byte in wanted if byte in allowed]
    printable = [token for token in allowed if 32 < token < 127 and token != ord("\\")]
    return known[:1] or [random.choice(printable or list(allowed))]
