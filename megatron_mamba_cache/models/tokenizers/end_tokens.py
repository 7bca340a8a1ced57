"""The tokens that end a text, as the files of a model directory name them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checkpoints.checkpoint_config import TEXT_CONFIGS
from ..checkpoints.json_file import read_json_object

_FIELD = "eos_token_id"


def end_ids_of(directory: Path, from_tokenizer: int | None, vocab_size: int) -> tuple[int, ...]:
    """Return all end tokens, each once: of `generation_config.json`, of the tokenizer, then of `config.json`.

    Args:
        from_tokenizer: The id of the tokenizer's own end token; None without one.

    Raises:
        ValueError: Naming the file and the field that holds anything but ids of the vocabulary.
    """
    from_generation = list(_named_in(directory / "generation_config.json", (), vocab_size))
    from_model = list(_named_in(directory / "config.json", TEXT_CONFIGS, vocab_size))
    own = [] if from_tokenizer is None else [from_tokenizer]
    return tuple(dict.fromkeys([*from_generation, *own, *from_model]))


def _named_in(path: Path, inner: tuple[str, ...], vocab_size: int) -> Iterator[int]:
    """Yield the end tokens of a file and of objects in it, such as the text part of a larger model's configuration."""
    if not path.exists():
        return
    fields = read_json_object(path)
    yield from _ids_in(fields, f"{path}: {_FIELD}", vocab_size)
    for name in inner:
        if isinstance(fields.get(name), dict):
            yield from _ids_in(fields[name], f"{path}: {name}.{_FIELD}", vocab_size)


def _ids_in(fields: dict[str, Any], place: str, vocab_size: int) -> list[int]:
    named = fields.get(_FIELD)
    found = named if isinstance(named, list) else [] if named is None else [named]
    for end_id in found:
        if type(end_id) is not int or not 0 <= end_id < vocab_size:
            raise ValueError(
                f"{place}={named!r:.100}, but must be a token id or a list of them, each from 0 to {vocab_size - 1}, "
                "the last id of the model's vocabulary; correct the file"
            )
    return found
