"""Find a model directory's chat templates and end tokens in the files that transformers uses, without importing it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.checkpoint_config import TEXT_CONFIGS, read_json_object

_FIELD = "eos_token_id"


def end_ids_of(directory: Path, from_tokenizer: int | None, vocab_size: int) -> tuple[int, ...]:
    """Return the end token ids from `generation_config.json`, the tokenizer and `config.json`, without duplicates.

    Args:
        from_tokenizer: Id of the tokenizer's end token; None if it has none.

    Raises:
        ValueError: If a field contains anything other than ids in the vocabulary; the message names file and field.
    """
    from_generation = list(_named_in(directory / "generation_config.json", (), vocab_size))
    from_model = list(_named_in(directory / "config.json", TEXT_CONFIGS, vocab_size))
    own = [] if from_tokenizer is None else [from_tokenizer]
    return tuple(dict.fromkeys([*from_generation, *own, *from_model]))


def _named_in(path: Path, inner: tuple[str, ...], vocab_size: int) -> Iterator[int]:
    """Yield the end token ids in a JSON file, from its top level and from the nested objects named in `inner`."""
    if not path.exists():
        return
    fields = read_json_object(path)
    yield from _ids_in(fields, f"{path}: {_FIELD}", vocab_size)
    for name in inner:
        if isinstance(fields.get(name), dict):
            yield from _ids_in(fields[name], f"{path}: {name}.{_FIELD}", vocab_size)


def _ids_in(fields: dict[str, Any], location: str, vocab_size: int) -> list[int]:
    named = fields.get(_FIELD)
    found = named if isinstance(named, list) else [] if named is None else [named]
    for end_id in found:
        if type(end_id) is not int or not 0 <= end_id < vocab_size:
            raise ValueError(
                f"{location}={named!r:.100}, but must be a token id or a list of token ids between 0 and "
                f"{vocab_size - 1}, the last id of the model's vocabulary; correct the file"
            )
    return found


_FILE, _FOLDER, _OLD_FILE = "chat_template.jinja", "additional_chat_templates", "chat_template.json"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"


class ChatTemplates:
    """Chat templates of a model directory, by name: `tool_use` is for chats with tools, `default` for all others.

    Chats with tools use `default` if there is no `tool_use`.

    Args:
        directory: Model directory. Template files take precedence over `tokenizer_config.json`, which takes precedence
            over `chat_template.json`, an older format.
        settings: Contents of `tokenizer_config.json`.

    Raises:
        ValueError: If a file cannot be read; the message names it.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self._directory = directory
        self._sources = _in_files(directory) or _in_field(settings.get("chat_template")) or _in_old_file(directory)

    def source(self, *, has_tools: bool) -> str:
        """Return the template text for chats with or without tools; "" if there is none."""
        if has_tools and _WITH_TOOLS in self._sources:
            return self._sources[_WITH_TOOLS]
        return self._sources.get(_DEFAULT, "")

    def missing(self) -> str:
        """Return the error message for a chat request when there is no template."""
        if not self._sources:
            return f"{self._directory} has no chat template; give text instead of messages"
        names = ", ".join(map(repr, self._sources))
        return f"{self._directory} has no default chat template, only {names}; give text instead of messages"


def _in_files(directory: Path) -> dict[str, str]:
    named = {path.name.removesuffix(".jinja"): path for path in sorted((directory / _FOLDER).glob("*.jinja"))}
    if (directory / _FILE).exists():
        named = {_DEFAULT: directory / _FILE} | named
    return {name: _text_of(path) for name, path in named.items()}


def _in_field(found: Any) -> dict[str, str]:
    """Return the templates in a JSON field, by name; the field may hold one template, a list or an object."""
    if isinstance(found, list):
        found = {named.get("name"): named.get("template") for named in found if isinstance(named, Mapping)}
    if isinstance(found, Mapping):
        return {str(name): source for name, source in found.items() if isinstance(source, str)}
    return {_DEFAULT: found} if isinstance(found, str) and found else {}


def _in_old_file(directory: Path) -> dict[str, str]:
    path = directory / _OLD_FILE
    return _in_field(read_json_object(path).get("chat_template")) if path.exists() else {}


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
