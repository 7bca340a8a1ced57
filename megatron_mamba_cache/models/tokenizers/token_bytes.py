"""The bytes of a token, even if its text is not a whole character."""

import re

REPLACEMENT = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


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
