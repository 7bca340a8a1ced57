"""Synthetic tokenizer for benchmarks of grammars, with a vocabulary as large as that of a real model."""

import random

_FIRST = ('{"', '":', '": "', '", "', '"}', '"]', "[", "{", "}", "],", "},", ", ", ": ", "true", "false", "null", "\n")
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


class MadeUpTokenizer:
    """Tokenizer whose vocabulary has single bytes, pieces of JSON, and random words with and without a leading space.

    The last token id is the end-of-text token.
    """

    bos = None

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        pieces = {bytes([value]): None for value in range(256)} | {piece.encode(): None for piece in _FIRST}
        while len(pieces) < vocab_size - 1:
            word = "".join(rng.choices(_LETTERS, k=rng.randint(2, 9)))
            pieces[(rng.choice(("", " ")) + word).encode()] = None
        self._pieces = list(pieces)
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token; None for the end-of-text token."""
        return self._pieces[token] if token < self.eod else None

    def tokenize(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of `text` as token ids."""
        return list(text.encode())
