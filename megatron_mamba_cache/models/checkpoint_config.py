"""Read a Hugging Face `config.json`, with errors that name the field."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_REQUIRED = object()


class CheckpointConfig:
    """The fields of a `config.json`; a missing or unsupported one is a `ValueError` that names it."""

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        self._fields = fields
        self._source = source

    @staticmethod
    def read(directory: Path) -> "CheckpointConfig":
        """Read `config.json` of a directory."""
        path = directory / "config.json"
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}; give a Hugging Face model directory") from error
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{path} holds no JSON object")
        return CheckpointConfig(fields, str(path))

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a field, or the default where it is absent or null."""
        value = self._fields.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.error(f"{name!r} is missing")
        return default

    def number_pair(self, name: str, default: tuple[float, float]) -> tuple[float, float]:
        """Return a pair of floats; transformers writes infinity as {"__float__": "Infinity"}."""
        low, high = (self._float(value) for value in self.get(name, default))
        return low, high

    def require(self, name: str, allowed: Any, default: Any) -> None:
        """Raise `ValueError` unless a field has the one value that is supported."""
        self.one_of(name, (allowed,), default)

    def one_of(self, name: str, allowed: Iterable[Any], default: Any = _REQUIRED) -> Any:
        """Return a field that must have one of the values that are supported."""
        value, allowed = self.get(name, default), tuple(allowed)
        if value not in allowed:
            raise self.error(f"{name}={value!r} is not supported, only {', '.join(map(repr, allowed))}")
        return value

    def each_of(self, name: str, known: Mapping[str, str]) -> list[str]:
        """Return what the entries of a list stand for; every one must be known."""
        entries = self.get(name)
        if unknown := sorted(set(entries) - known.keys()):
            raise self.error(f"{name} has unknown entries {unknown}; known are {sorted(known)}")
        return [known[entry] for entry in entries]

    def error(self, text: str) -> ValueError:
        """Return an error that names the file."""
        return ValueError(f"{self._source}: {text}")

    @staticmethod
    def _float(value: Any) -> float:
        return float(value["__float__"]) if isinstance(value, dict) else math.inf if value == "inf" else float(value)
