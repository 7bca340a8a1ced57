"""A tokenizer of made-up pieces of text, for grammars over a vocabulary as large as a model's."""

import random

_FIRST = ('{"', '":', '": "', '", "', '"}', '"]', "[", "{", "}", "],", "},", ", ", ": ", "true", "false", "null", "\n")
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


class MadeUpTokenizer:
    """Bytes, pieces of JSON, then words of random letters with and without a space; the last id ends a text."""

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
        """Return the bytes of a token; None for the one that ends a text."""
        return self._pieces[token] if token < self.eod else None

    def tokenize(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())
