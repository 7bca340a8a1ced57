"""The tokens of a vocabulary that are replaced by images, video or sound, or mark them: none of them is text."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..checkpoints.json_file import read_json_object

_FIELD = re.compile(r"(image|img|video|vision|audio|sound)(_[a-z]+)*_token_(id|index)")
_NAMES = (
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
    "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>",
)  # fmt: skip
"""Qwen's, in its vocabularies for text alone too."""


def image_tokens_of(directory: Path, added: Mapping[str, int] = MappingProxyType({})) -> dict[int, str]:
    """Return the tokens that are not text, with the name that errors give them.

    They are those that a larger model's `config.json` names, and added tokens with a known name.

    Args:
        added: The ids of added tokens, by their texts.

    Raises:
        ValueError: Naming the file and the field that holds anything but token ids.
    """
    return dict(_named_in(directory / "config.json")) | {added[name]: name for name in _NAMES if name in added}


def image_fault(tokenizer: Any, tokens: Sequence[int]) -> str | None:
    """Return why a prompt cannot be read as text; None if it can."""
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
