"""Tokenizer for tests of grammars, with bytes, special tokens, and pieces of text that cross JSON token boundaries."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

END, THINK, THINK_END = 256, 257, 258
_SPECIAL = {END: "<|end|>", THINK: "<think>", THINK_END: "</think>"}
_PIECES = (
    '{"', '":', '": ', '",', '"}', '"]', '["', "[[", "]]", "}}", "},", "], ", ", ", ": ", ',"', '":"', '": "', '", "',
    "true", "false", "null", "tr", "ue", "al", "10", "99", "-1", "00", ".5", "0.", "e1", "\n  ", "\n", "  ", "id",
    "name", "kind", "items", "größe", "größ", "日", "日本", "\\", '\\"', "yes", "no", "abc", "bb", "</", "think", ">\n",
    "<tool_call>", "</tool_call>", "arguments", "parameters", "function", "=", "\\n", "end\n", "end", "-A", "x-", "-x",
    "12-", "2024-",
)  # fmt: skip


class PieceTokenizer:
    """Tokenizer whose ids are 256 bytes, then special tokens, then pieces of text; further ids have no text."""

    bos = None
    eod = END
    longest_token = 12

    def __init__(self, vocab_size: int = 352) -> None:
        self.vocab_size = vocab_size
        self._bytes = {token: bytes([token]) for token in range(256)}
        self._bytes |= {259 + index: piece.encode() for index, piece in enumerate(_PIECES)}
        self._longest_first = sorted(self._bytes, key=lambda token: -len(self._bytes[token]))

    @property
    def special_ids(self) -> Collection[int]:
        """Ids of the special tokens."""
        return _SPECIAL.keys()

    def id_of(self, text: str) -> int | None:
        """Return the id of a special token."""
        return next((token for token, spelled in _SPECIAL.items() if spelled == text), None)

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token."""
        special = _SPECIAL.get(token)
        return special.encode() if special is not None else self._bytes.get(token)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, by greedy longest match."""
        found, rest = [], text.encode()
        while rest:
            token = next(token for token in self._longest_first if rest.startswith(self._bytes[token]))
            found.append(token)
            rest = rest[len(self._bytes[token]) :]
        return found

    def detokenize(self, tokens: Sequence[int], skip_special_tokens: bool = True, **_: Any) -> str:
        """Return the text of tokens."""
        known = [token for token in tokens if not (skip_special_tokens and token in _SPECIAL)]
        return b"".join(self.bytes_of(token) or b"" for token in known).decode(errors="replace")

    def detokenizer(self, shown: Collection[str] | None) -> Callable[[list[int]], str]:
        """Return a `detokenize` function that keeps these special tokens in the text; None keeps all."""

        def detokenize(tokens: list[int]) -> str:
            kept = [t for t in tokens if t not in _SPECIAL or shown is None or _SPECIAL[t] in shown]
            return self.detokenize(kept, skip_special_tokens=False)

        return detokenize
