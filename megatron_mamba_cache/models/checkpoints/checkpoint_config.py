"""Read a Hugging Face `config.json`, with errors that name the file, the field and its value."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object that a file holds.

    Raises:
        ValueError: Naming the file, if it cannot be read or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return found


_REQUIRED: Any = object()
MOST_EXPERTS = 2**13
"""Far above any model's: each has names of its own in a checkpoint."""
MOST_LAYERS = 2**13
"""Likewise."""
_MOST = 2**24  # far above any model's sizes; a larger one would fail as an allocation that names no field
_LEAST_NUMBER, _MOST_NUMBER = 1e-30, 1e30  # beyond, float32 has no inverse of it, or a float none at all
_LONGEST_SHOWN = 200

TEXT_CONFIGS = ("text_config", "llm_config")
"""Where the configuration of a larger model has that of its language model."""


class CheckpointConfig:
    """The fields of a `config.json`; a missing, ill-typed or unsupported one is a `ValueError` that names it.

    A null field counts as absent. Numbers must be finite, and positive except for factors; a bool is not a number.

    Args:
        source: The file that errors name.
        prefix: Prefix of field names in errors, for an object inside the file.
        other_names: Other name of a field → its usual name. Errors have the name that the file has.
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
        """Read the `config.json` of a directory."""
        path = directory / "config.json"
        if not path.exists():
            raise ValueError(f"cannot read {path}: No such file or directory; give a Hugging Face model directory")
        return CheckpointConfig(read_json_object(path), str(path))

    def naming(self, other_names: Mapping[str, str]) -> "CheckpointConfig":
        """Return the same fields, read under these other names too."""
        return CheckpointConfig(self._fields, self._source, self._prefix, other_names)

    def has(self, name: str) -> bool:
        """Return True if a field is present and not null."""
        return self._fields.get(self._name(name)) is not None

    def equals(self, name: str, value: Any, default: Any) -> bool:
        """Return True if a field, or its default if it is absent, equals `value`."""
        return bool(self._get(name, default) == value)

    def integer(self, name: str, default: int = _REQUIRED, least: int = 1, most: int = _MOST) -> int:
        """Return a field that is an integer of at least `least` and of plausible size."""
        value = self._get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(name, value, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, default: float = _REQUIRED) -> float:
        """Return a field that is a positive number of plausible size."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not _LEAST_NUMBER <= value <= _MOST_NUMBER:
            raise self._wrong(name, value, f"a positive number from {_LEAST_NUMBER} to {_MOST_NUMBER}")
        return float(value)

    def factor(self, name: str, default: float = _REQUIRED) -> float:
        """Return a field that is a number other than 0, of plausible size."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not _LEAST_NUMBER <= abs(value) <= _MOST_NUMBER:
            raise self._wrong(name, value, f"a number other than 0, of {_LEAST_NUMBER} to {_MOST_NUMBER}")
        return float(value)

    def share(self, name: str, default: float = _REQUIRED) -> float:
        """Return a field that is a number from 0 to 1."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not 0 <= value <= 1:
            raise self._wrong(name, value, "a number from 0 to 1")
        return float(value)

    def flag(self, name: str, default: bool = _REQUIRED) -> bool:
        """Return a field that is true or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str = _REQUIRED, most: int = _MOST) -> str:
        """Return a field that is a non-empty string of at most so many characters."""
        value = self._get(name, default)
        if not isinstance(value, str) or not value:
            raise self._wrong(name, value, "a text")
        if len(value) > most:
            raise self.error(f"{self._label(name)} has {len(value)} characters, but must have at most {most}")
        return value

    def section(self, *names: str) -> "CheckpointConfig":
        """Return the object in the first of these fields that is present; an empty one if none is."""
        for name in filter(self.has, names):
            value = self._get(name, {})
            if not isinstance(value, dict):
                raise self._wrong(name, value, "an object")
            return CheckpointConfig(value, self._source, f"{self._label(name)}.")
        return CheckpointConfig({}, self._source, f"{self._label(names[0])}.")

    def sections(self) -> "list[CheckpointConfig]":
        """Return all fields, each of which must be an object."""
        return [self.section(name) for name in self._fields]

    def pair(self, name: str) -> tuple[int, int]:
        """Return a field that is a list of two positive integers."""
        value = self._get(name, _REQUIRED)
        if not isinstance(value, list) or len(value) != 2 or any(type(each) is not int or each < 1 for each in value):
            raise self._wrong(name, value, "a list of two positive integers")
        return value[0], value[1]

    def require_empty(self, name: str) -> None:
        """Raise `ValueError` if a field is an object with fields."""
        if self.section(name)._fields:
            raise self.error(f"{self.shown(name, self._get(name, None))} is not supported")

    def indices(self, name: str, end: int) -> list[int]:
        """Return a list of integers from 0 to `end`, exclusive."""
        value = self._get(name, [])
        if not isinstance(value, list) or any(type(index) is not int or not 0 <= index < end for index in value):
            raise self._wrong(name, value, f"a list of integers from 0 to {end - 1}")
        return value

    def limits(self, name: str) -> tuple[float, float]:
        """Return a pair of numbers, by default 0 and infinity; infinity may be "inf" or {"__float__": "Infinity"}."""
        value = self._get(name, [0.0, math.inf])
        pair = [_number(entry) for entry in value] if isinstance(value, list) else []
        low, high = pair if len(pair) == 2 else (math.nan, math.nan)
        if not 0 <= low <= high or low > _MOST_NUMBER or _MOST_NUMBER < high < math.inf:
            raise self._wrong(name, value, "a pair of ascending numbers from 0 on")
        return low, high

    def require(self, name: str, allowed: Any, default: Any) -> None:
        """Raise `ValueError` unless a field has the one supported value."""
        self.one_of(name, (allowed,), default)

    def one_of(self, name: str, allowed: Iterable[Any], default: Any = _REQUIRED) -> Any:
        """Return a field that must have one of the supported values."""
        value, allowed = self._get(name, default), tuple(allowed)
        is_plain = value is None or isinstance(value, str | int | float)  # comparing a tensor gives a tensor
        if not is_plain or value not in allowed:
            raise self.error(f"{self.shown(name, value)} is not supported, only {', '.join(map(repr, allowed))}")
        return value

    def holds_list(self, name: str) -> bool:
        """Return True if a field is a list."""
        return isinstance(self._get(name, None), list)

    def each_of(self, name: str, known: Mapping[str, str]) -> list[str]:
        """Return what `known` has for each entry of a list; it must not be empty, and every entry must be known."""
        entries = self._get(name, _REQUIRED)
        if not isinstance(entries, list) or not entries or not all(isinstance(entry, str) for entry in entries):
            raise self._wrong(name, entries, f"a list of {sorted(known)}")
        if len(entries) > MOST_LAYERS:
            raise self.error(f"{self._label(name)} has {len(entries)} entries, but must have at most {MOST_LAYERS}")
        if unknown := sorted(set(entries) - known.keys()):
            raise self.error(f"{self._label(name)} has unknown entries {_short(unknown)}; known are {sorted(known)}")
        return [known[entry] for entry in entries]

    def error(self, text: str) -> ValueError:
        """Return an error that names the file."""
        return ValueError(f"{self._source}: {text}")

    def _get(self, name: str, default: Any) -> Any:
        value = self._fields.get(self._name(name))
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.error(f"{self._prefix + name!r} is missing")
        return default

    def _name(self, usual: str) -> str:
        """Return the name that a field has in the file."""
        other = self._other_names.get(usual)
        return usual if other is None or self._fields.get(other) is None else other

    def _label(self, usual: str) -> str:
        return f"{self._prefix}{self._name(usual)}"

    def _wrong(self, name: str, value: Any, needed: str) -> ValueError:
        return self.error(f"{self.shown(name, value)}, but must be {needed}")

    def shown(self, name: str, value: Any) -> str:
        """Return a field with a value, as errors show it."""
        return f"{self._label(name)}={_short(value)}"


def _short(value: Any) -> str:
    """Return a value in one line of bounded length."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _number(entry: Any) -> float:
    """Return a number as transformers writes it; NaN for anything else."""
    if isinstance(entry, dict):
        entry = entry.get("__float__")
    if entry in ("inf", "Infinity"):
        return math.inf
    is_number = type(entry) is float or (type(entry) is int and abs(entry) <= _MOST_NUMBER)
    return float(entry) if is_number else math.nan
