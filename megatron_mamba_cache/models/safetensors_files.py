"""Stream the tensors of a Hugging Face checkpoint, one at a time, whatever files they are spread over."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

_INDEX = "model.safetensors.index.json"


class SafetensorsFiles:
    """The tensors of `model.safetensors`, or of the shards its index names; headers are read on construction.

    Raises:
        ValueError: Naming the file, if one is missing, damaged, or lacks a tensor that the index says it has.
    """

    def __init__(self, directory: Path) -> None:
        index = _index(directory)
        files = sorted(set(index.values())) or ["model.safetensors"]
        self._files = [directory / name for name in files]
        self.names: dict[str, Path] = {name: path for path in self._files for name in _names_in(path)}
        for name, file in index.items():
            if self.names.get(name) != directory / file:
                raise ValueError(f"{directory / file} lacks tensor {name}, which {_INDEX} says it has")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with its name, on the CPU; none is held here."""
        for path in self._files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118  (no mapping)
                    yield name, file.get_tensor(name)


def _index(directory: Path) -> dict[str, str]:
    """Return the file of each tensor; nothing where there are no shards."""
    path = directory / _INDEX
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no index of safetensors shards: {error!r}") from error


def _names_in(path: Path) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise ValueError(f"{path} is missing; fetch all files of the checkpoint")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or incomplete ({error}); fetch it again") from error
