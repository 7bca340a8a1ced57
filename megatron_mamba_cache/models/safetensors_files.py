"""Stream the tensors of a Hugging Face checkpoint, one at a time, whatever files they are spread over."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor


class SafetensorsFiles:
    """The tensors of `model.safetensors`, or of the shards its index names; headers are read on construction.

    Raises:
        ValueError: Naming the file, if one is missing, damaged, or lacks a tensor that the index says it has.
    """

    def __init__(self, directory: Path) -> None:
        self._files = [directory / name for name in _file_names(directory)]
        self.names: dict[str, Path] = {}
        for path in self._files:
            for name in _names_in(path):
                self.names[name] = path

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with its name, on the CPU; only one is held at a time."""
        for path in self._files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118  (no mapping)
                    yield name, file.get_tensor(name)


def _file_names(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors shards: {error!r}") from error


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
