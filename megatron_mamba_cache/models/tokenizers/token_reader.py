"""Decode tokens to text, and look up the properties of single tokens that incremental decoding needs."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..checkpoints.checkpoint_config import read_json_object

_FIELD = re.compile(r"(image|img|video|vision|audio|sound)(_[a-z]+)*_token_(id|index)")
_NAMES = (
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
    "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>",
)  # fmt: skip
"""Names of Qwen's image, video and audio tokens, which text-only Qwen models have in their vocabularies too."""


def image_tokens_of(directory: Path, added: Mapping[str, int] = MappingProxyType({})) -> dict[int, str]:
    """Return the ids of tokens for images, video or sound, with the names that error messages use.

    These tokens are given in the `config.json` of a multimodal model, or are added tokens with a known name.

    Args:
        added: Text of each added token → its id.

    Raises:
        ValueError: If a field contains anything other than token ids; the message names the file and the field.
    """
    return dict(_named_in(directory / "config.json")) | {added[name]: name for name in _NAMES if name in added}


def image_error(tokenizer: Any, tokens: Sequence[int]) -> str | None:
    """Return the error message for a prompt with image, video or sound tokens; None if it has no such tokens."""
    others: Mapping[int, str] = getattr(tokenizer, "image_tokens", {})
    if not others or others.keys().isdisjoint(tokens):
        return None
    position = next(position for position, token in enumerate(tokens) if token in others)
    token = tokens[position]
    return (
        f"the prompt has token {token} ({others[token]}) at position {position}, which is for images, video or sound; "
        "this model reads text only, so leave it out"
    )


def _named_in(path: Path) -> Iterator[tuple[int, str]]:
    fields = read_json_object(path) if path.exists() else {}
    for name, value in fields.items():
        if _FIELD.fullmatch(name) and value is not None:
            numbers = value if isinstance(value, list) else [value]
            if not all(type(number) is int for number in numbers):
                raise ValueError(f"{path}: {name}={value!r:.100}, but must be a token id; correct the file")
            yield from ((number, name) for number in numbers)


REPLACEMENT = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenReader:
    """Decodes the tokens of any tokenizer to text.

    Args:
        tokenizer: Must have `detokenize` and `bytes_of`. A tokenizer with special tokens must also have `detokenizer`,
            `special_ids` and `id_of`, and one with named tokens `token_of`. If it decodes to a list of token ids
            rather than text, its `writes_text` is False.
        shown: Special tokens to include in the text; None for all.

    Attributes:
        continues: True if decoded texts can be concatenated; False for a tokenizer whose `writes_text` is False.
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
        """Decode tokens to text; bytes that are not UTF-8 become U+FFFD."""
        return self._decode(list(tokens))

    def text_of(self, token: int) -> str:
        """Return the text that a token adds in the middle of a text, even if hidden; U+FFFD for part of a character."""
        content = self.bytes_of(token)
        return self._decode([token]) if content is None else content.decode(errors="replace")

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token; None if they are unknown."""
        if token not in self._bytes:
            self._bytes[token] = self._tokenizer.bytes_of(token)
        return self._bytes[token]

    def shows(self, token: int) -> bool:
        """Return True if a token's text is included in decoded text: the token is known and not hidden."""
        return token not in self._hidden and (self._name_of is None or self._name_of(token) is not None)

    def joins(self, token: int) -> bool:
        """Return True if a token is a byte token whose text depends on adjacent byte tokens.

        The tokenizers package decodes consecutive byte tokens together. If their bytes are not valid UTF-8, each byte
        becomes U+FFFD.
        """
        if not self._joins_bytes or self._name_of is None:
            return False
        name = self._name_of(token)
        return name is not None and len(name) == len("<0x00>") and name.startswith("<0x") and name.endswith(">")

    def replacements(self, num_bytes: int) -> int:
        """Return the number of U+FFFD characters to which `num_bytes` bytes of an incomplete character decode."""
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
    """Return the bytes of a token; None if they cannot be determined from the tokenizer files.

    Args:
        name: The token's spelling in the files; a byte may be a GPT-2 byte character, `<0xE2>` or a ByT5 character.
        text: Text that the token adds in the middle of a text; U+FFFD or "" if its bytes are not whole characters.
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


_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + index): byte for index, byte in enumerate(_OTHERS)}
"""Character → byte in GPT-2's encoding. Printable bytes keep their characters; other bytes are numbered from 256."""
