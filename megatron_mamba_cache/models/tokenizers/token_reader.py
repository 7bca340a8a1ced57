"""Tokens read as text, with what an incremental reader has to know of each of them."""

import re
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

REPLACEMENT = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenReader:
    """Reads the tokens of a tokenizer as text.

    Args:
        tokenizer: Has `detokenize` and `bytes_of`; if it knows special tokens, also `detokenizer`, `special_ids` and
            `id_of`; if its tokens have names, `token_of`; if its text is a list of token ids, a false `writes_text`.
        shown: Texts of the special tokens that are part of the text; None: all are.

    Attributes:
        continues: True if the text of later tokens continues that of earlier ones.
    """

    def __init__(self, tokenizer: Any, shown: Collection[str] | None = ()) -> None:
        make: Callable[..., Callable[[list[int]], str]] | None = getattr(tokenizer, "detokenizer", None)
        self._decode: Callable[[list[int]], str] = tokenizer.detokenize if make is None else make(shown)
        self._tokenizer = tokenizer
        self.continues: bool = getattr(tokenizer, "writes_text", True)
        self._bytes: dict[int, bytes | None] = {}
        self._id_of: Callable[[str], int | None] = getattr(tokenizer, "id_of", lambda _text: None)
        self._name_of: Callable[[int], str | None] | None = getattr(tokenizer, "token_of", None)
        self._hidden: Collection[int] = ()
        if shown is not None:
            self._hidden = frozenset(getattr(tokenizer, "special_ids", ())) - {self._id_of(text) for text in shown}

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become U+FFFD."""
        return self._decode(list(tokens))

    def text_of(self, token: int) -> str:
        """Return the text of one token inside a text, hidden or not; U+FFFD for part of a character."""
        content = self.bytes_of(token)
        return self._decode([token]) if content is None else content.decode(errors="replace")

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token; None if they are unknown."""
        if token not in self._bytes:
            self._bytes[token] = self._tokenizer.bytes_of(token)
        return self._bytes[token]

    def shows(self, token: int) -> bool:
        """Return whether a token is part of the text: not hidden, and known."""
        return token not in self._hidden and (self._name_of is None or self._name_of(token) is not None)

    def joins(self, token: int) -> bool:
        """Return whether a token is a byte whose text depends on all of its neighbours that are bytes too.

        The tokenizers package decodes such a run as a whole: if any of it is not UTF-8, each byte becomes U+FFFD.
        """
        if not self._joins_bytes or self._name_of is None:
            return False
        name = self._name_of(token)
        return name is not None and len(name) == len("<0x00>") and name.startswith("<0x") and name.endswith(">")

    def replacements(self, num_bytes: int) -> int:
        """Return how many U+FFFD this many bytes of an incomplete character become."""
        return num_bytes if self._has_byte_tokens else min(num_bytes, 1)

    @cached_property
    def _joins_bytes(self) -> bool:
        letter, other = self._id_of("<0x41>"), self._id_of("<0xFF>")
        return letter is not None and other is not None and self._decode([letter, other]) == REPLACEMENT * 2

    @cached_property
    def _has_byte_tokens(self) -> bool:
        other = self._id_of("<0xFF>")
        return other is not None and self._decode([other]) == REPLACEMENT


def token_bytes(name: str | None, text: str) -> bytes | None:
    """Return the bytes of a token; None if the tokenizer's files do not give them.

    Args:
        name: The token as the files spell it: a byte as one of GPT-2's characters, as `<0xE2>` or as ByT5's character.
        text: The text that the token adds inside a text; U+FFFD, or nothing, for bytes that are not a whole character.
    """
    if name is None or REPLACEMENT in name or not (REPLACEMENT in text or not text):
        return text.encode()
    if found := _BYTE.fullmatch(name):
        return bytes.fromhex(found[1])
    if not text:
        return name.encode("latin-1") if len(name) == 1 and "\x80" <= name <= "\xff" else b""
    if all(character in _BYTE_OF for character in name):
        return bytes(_BYTE_OF[character] for character in name)
    return None


def _bytes_by_character() -> dict[str, int]:
    """Return GPT-2's byte of each character: printable ones stand for themselves, the others are numbered from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _bytes_by_character()
