"""A tokenizer whose tokens are the bytes of UTF-8 text."""

from collections.abc import Callable, Collection, Sequence
from typing import Any


class ByteTokenizer:
    """Text to bytes and back; token ids 0 to 255, no special tokens.

    Args:
        vocab_size: The model's; ids from 256 up mean nothing and print as U+FFFD.

    Attributes:
        longest_token: Most characters of a token.
    """

    eod = -1
    bos = None
    longest_token = 1

    def __init__(self, vocab_size: int = 256) -> None:
        if vocab_size < 256:
            raise ValueError(f"vocab_size is {vocab_size}; a byte tokenizer needs at least 256")
        self.vocab_size = vocab_size

    def tokenize(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the bytes of the text; there are no special tokens to add."""
        return list(text.encode())

    def tokenize_after_tokens(self, _tokens: Sequence[int], text: str) -> list[int]:
        """Return the bytes of a text that continues after other tokens."""
        return self.tokenize(text)

    def tokenize_after_text(self, _before: str, text: str) -> list[int]:
        """Return the bytes of a text that follows another."""
        return self.tokenize(text)

    def detokenize(self, tokens: list[int], **_: Any) -> str:
        """Return the text of the bytes; invalid UTF-8 prints as U+FFFD."""
        return b"".join(bytes([t]) if 0 <= t < 256 else b"\xff" for t in tokens).decode(errors="replace")

    def detokenizer(self, _shown: Collection[str] | None) -> Callable[[list[int]], str]:
        """Return `detokenize`: no token is special."""
        return self.detokenize

    def bytes_of(self, token: int) -> bytes | None:
        """Return the byte of a token; None for an id that means nothing."""
        return bytes([token]) if 0 <= token < 256 else None
