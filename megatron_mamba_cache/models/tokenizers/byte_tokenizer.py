"""Tokenizer whose token ids are the bytes of UTF-8 text."""

from collections.abc import Callable, Collection, Sequence
from typing import Any


class ByteTokenizer:
    """Converts text to UTF-8 bytes and back, with token ids 0 to 255 and no special tokens.

    Args:
        vocab_size: Vocabulary size of the model. Ids from 256 up have no meaning and decode to U+FFFD.

    Attributes:
        longest_token: Length of the longest token in characters.
    """

    eod = -1
    bos = None
    longest_token = 1

    def __init__(self, vocab_size: int = 256) -> None:
        if vocab_size < 256:
            raise ValueError(f"vocab_size must be at least 256 for a byte tokenizer, found {vocab_size}")
        self.vocab_size = vocab_size

    def tokenize(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the UTF-8 bytes of a text; `add_special_tokens` has no effect."""
        return list(text.encode())

    def tokenize_after_tokens(self, _tokens: Sequence[int], text: str) -> list[int]:
        """Return the UTF-8 bytes of `text`; the tokens before it have no effect."""
        return self.tokenize(text)

    def tokenize_after_text(self, _before: str, text: str) -> list[int]:
        """Return the UTF-8 bytes of `text`; the text before it has no effect."""
        return self.tokenize(text)

    def detokenize(self, tokens: list[int], **_: Any) -> str:
        """Decode the bytes to text; invalid UTF-8 becomes U+FFFD."""
        return b"".join(bytes([t]) if 0 <= t < 256 else b"\xff" for t in tokens).decode(errors="replace")

    def detokenizer(self, _shown: Collection[str] | None) -> Callable[[list[int]], str]:
        """Return `detokenize`, because there are no special tokens to show or hide."""
        return self.detokenize

    def bytes_of(self, token: int) -> bytes | None:
        """Return the byte for a token id; None for an id from 256 up."""
        return bytes([token]) if 0 <= token < 256 else None
