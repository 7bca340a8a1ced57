"""Read a Hugging Face `config.json`, with errors that name the file, the field and its value."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object stored in a file.

    Raises:
        ValueError: If the file cannot be read or is not a JSON object; the message names it.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not contain a JSON object")
    return found


_REQUIRED: Any = object()
MOST_EXPERTS = 2**13
"""Upper limit on the number of experts, far above that of any model; each expert has several tensor names."""
MOST_LAYERS = 2**13
"""Upper limit on the number of layers, far above that of any model."""
_MOST = 2**24  # far above the dimensions of any model; an allocation of this size would fail without naming the field
_LEAST_NUMBER, _MOST_NUMBER = 1e-30, 1e30  # outside this range, the number or its inverse may overflow
_LONGEST_SHOWN = 200

TEXT_CONFIGS = ("text_config", "llm_config")
"""Fields that may hold the configuration of the language model inside a multimodal model."""


class CheckpointConfig:
    """Typed access to the fields of a `config.json`; raises `ValueError` that names the file and the field.

    A null field counts as absent. An absent field has the value `default`; without a default, it is an error. A bool
    is not accepted as a number.

    Args:
        source: The file that error messages name.
        prefix: Prefix for field names in error messages, such as "text_config." for a nested object.
        other_names: Alternative field name → usual name. Error messages use the name that is in the file.
    """

    def __init__(
        self, fields: Mapping[str, Any], source: str, prefix: str = "", other_names: Mapping[str, str] | None = None
    ) -> None:
        self._fields = fields
        self._source = source
        self._prefix = prefix
        self._other_names = {usual: other for other, usual in (other_names or {}).items()}

    @staticmethod
    def read(directory: Path) -> "CheckpointConfig":
        """Read `config.json` from a model directory."""
        path = directory / "config.json"
        if not path.exists():
            raise ValueError(f"cannot read {path}: No such file or directory; give a Hugging Face model directory")
        return CheckpointConfig(read_json_object(path), str(path))

    def naming(self, other_names: Mapping[str, str]) -> "CheckpointConfig":
        """Return a copy that accepts these alternative field names in addition to the usual names."""
        return CheckpointConfig(self._fields, self._source, self._prefix, other_names)

    def has(self, name: str) -> bool:
        """Return True if a field is present and not null."""
        return self._fields.get(self._name(name)) is not None

    def equals(self, name: str, value: Any, default: Any) -> bool:
        """Return True if the value of a field equals `value`."""
        return bool(self._get(name, default) == value)

    def integer(self, name: str, default: int = _REQUIRED, least: int = 1, most: int = _MOST) -> int:
        """Return the value of an integer field, which must be between `least` and `most`."""
        value = self._get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(name, value, f"an integer between {least} and {most}")
        return value

    def number(self, name: str, default: float = _REQUIRED) -> float:
        """Return the value of a field that must be a positive number, neither extremely small nor extremely large."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not _LEAST_NUMBER <= value <= _MOST_NUMBER:
            raise self._wrong(name, value, f"a number between {_LEAST_NUMBER} and {_MOST_NUMBER}")
        return float(value)

    def factor(self, name: str, default: float = _REQUIRED) -> float:
        """Return the value of a field that must be a nonzero number, neither extremely small nor extremely large."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not _LEAST_NUMBER <= abs(value) <= _MOST_NUMBER:
            raise self._wrong(name, value, f"a number of magnitude between {_LEAST_NUMBER} and {_MOST_NUMBER}")
        return float(value)

    def share(self, name: str, default: float = _REQUIRED) -> float:
        """Return the value of a field that must be a number between 0 and 1."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise self._wrong(name, value, "a number between 0 and 1")
        return float(value)

    def flag(self, name: str, default: bool = _REQUIRED) -> bool:
        """Return the value of a Boolean field."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str = _REQUIRED, most: int = _MOST) -> str:
        """Return the value of a field that must be a non-empty string of at most `most` characters."""
        value = self._get(name, default)
        if not isinstance(value, str) or not value:
            raise self._wrong(name, value, "a non-empty string")
        if len(value) > most:
            raise self.error(f"{self._label(name)} has {len(value)} characters, but must have at most {most}")
        return value

    def section(self, *names: str) -> "CheckpointConfig":
        """Return the first named field that is present, which must be an object; an empty object if none is present."""
        for name in filter(self.has, names):
            value = self._get(name, {})
            if not isinstance(value, dict):
                raise self._wrong(name, value, "an object")
            return CheckpointConfig(value, self._source, f"{self._label(name)}.")
        return CheckpointConfig({}, self._source, f"{self._label(names[0])}.")

    def sections(self) -> "list[CheckpointConfig]":
        """Return the values of all fields; each must be an object."""
        return [self.section(name) for name in self._fields]

    def pair(self, name: str) -> tuple[int, int]:
        """Return the value of a field that must be a list of two positive integers."""
        value = self._get(name, _REQUIRED)
        if not isinstance(value, list) or len(value) != 2 or any(type(each) is not int or each < 1 for each in value):
            raise self._wrong(name, value, "a list of two positive integers")
        return value[0], value[1]

    def require_empty(self, name: str) -> None:
        """Raise `ValueError` if a field is present and not an empty object."""
        if self.section(name)._fields:
            raise self.error(f"{self.shown(name, self._get(name, None))} is not supported")

    def indices(self, name: str, end: int) -> list[int]:
        """Return the value of a field that must be a list of integers in [0, `end`)."""
        value = self._get(name, [])
        if not isinstance(value, list) or any(type(index) is not int or not 0 <= index < end for index in value):
            raise self._wrong(name, value, f"a list of integers between 0 and {end - 1}")
        return value

    def limits(self, name: str) -> tuple[float, float]:
        """Return the lower and upper limit in a field, or (0, inf) if it is absent.

        Infinity may be stored as "inf", "Infinity" or {"__float__": "Infinity"}.
        """
        value = self._get(name, [0.0, math.inf])
        pair = [_number(entry) for entry in value] if isinstance(value, list) else []
        low, high = pair if len(pair) == 2 else (math.nan, math.nan)
        if not 0 <= low <= high or low > _MOST_NUMBER or _MOST_NUMBER < high < math.inf:
            raise self._wrong(name, value, "a pair of ascending non-negative numbers")
        return low, high

    def require(self, name: str, allowed: Any, default: Any) -> None:
        """Raise `ValueError` unless a field has the value `allowed`, the only supported one."""
        self.one_of(name, (allowed,), default)

    def one_of(self, name: str, allowed: Iterable[Any], default: Any = _REQUIRED) -> Any:
        """Return the value of a field; raise `ValueError` unless it is one of the values in `allowed`."""
        value, allowed = self._get(name, default), tuple(allowed)
        is_plain = value is None or isinstance(value, str | int | float)  # comparing a tensor would not give a bool
        if not is_plain or value not in allowed:
            supported = f"{', '.join(map(repr, allowed))} {'is' if len(allowed) == 1 else 'are'}"
            raise self.error(f"{self.shown(name, value)} is not supported, only {supported}")
        return value

    def holds_list(self, name: str) -> bool:
        """Return True if a field is a list."""
        return isinstance(self._get(name, None), list)

    def each_of(self, name: str, known: Mapping[str, str]) -> list[str]:
        """Return `known[entry]` for each entry of a list field, which must not be empty."""
        entries = self._get(name, _REQUIRED)
        if not isinstance(entries, list) or not entries or not all(isinstance(entry, str) for entry in entries):
            raise self._wrong(name, entries, f"a non-empty list with values from {sorted(known)}")
        if len(entries) > MOST_LAYERS:
            raise self.error(f"{self._label(name)} has {len(entries)} entries, but must have at most {MOST_LAYERS}")
        if unknown := sorted(set(entries) - known.keys()):
            raise self.error(
                f"{self._label(name)} has unknown entries {_short(unknown)}; known entries are {sorted(known)}"
            )
        return [known[entry] for entry in entries]

    def error(self, text: str) -> ValueError:
        """Return a `ValueError` with this text, prefixed with the name of the file."""
        return ValueError(f"{self._source}: {text}")

    def _get(self, name: str, default: Any) -> Any:
        value = self._fields.get(self._name(name))
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.error(f"{self._prefix + name!r} is missing")
        return default

    def _name(self, usual: str) -> str:
        """Return the name that the file uses for a field: the alternative name if present, else the usual name."""
        other = self._other_names.get(usual)
        return usual if other is None or self._fields.get(other) is None else other

    def _label(self, usual: str) -> str:
        return f"{self._prefix}{self._name(usual)}"

    def _wrong(self, name: str, value: Any, needed: str) -> ValueError:
        return self.error(f"{self.shown(name, value)}, but must be {needed}")

    def shown(self, name: str, value: Any) -> str:
        """Return "field=value" for error messages, with the field name that the file uses."""
        return f"{self._label(name)}={_short(value)}"


def _short(value: Any) -> str:
    """Return a value as text, shortened to at most one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _number(entry: Any) -> float:
    """Parse a number in any form that transformers writes; return NaN for anything else."""
    if isinstance(entry, dict):
        entry = entry.get("__float__")
    if entry in ("inf", "Infinity"):
        return math.inf
    is_number = type(entry) is float or (type(entry) is int and abs(entry) <= _MOST_NUMBER)
    return float(entry) if is_number else math.nan
