"""Stream the tensors of a Hugging Face checkpoint one at a time, from one file or many."""

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from .json_file import read_json_object
from .quantized_checkpoints import check_dtype

_INDEX = "model.safetensors.index.json"


class SafetensorsFiles:
    """The tensors of `model.safetensors`, or of the shards its index names; headers are read on construction.

    Attributes:
        names: Tensor name → its file.
        shapes: Tensor name → its shape.

    Raises:
        ValueError: Naming the file if one is missing, damaged or lacks a tensor that the index lists, and the tensor
            if it is in two files or quantized.
    """

    def __init__(self, directory: Path) -> None:
        index = _index(directory)
        files = sorted(set(index.values())) or ["model.safetensors"]
        self._files = [directory / name for name in files]
        self.names: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in self._files:
            self._read_header(path)
        for name, file in index.items():
            if self.names.get(name) != directory / file:
                raise ValueError(f"{directory / file} lacks tensor {name}, which {_INDEX} says it has")

    def tensors(self, wanted: Container[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the tensor, on the CPU, of each wanted name; none is held here."""
        for path in self._files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    if name in wanted:
                        yield name, file.get_tensor(name)

    def _read_header(self, path: Path) -> None:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name in self.names:
                    raise ValueError(f"{path} has tensor {name}, and {self.names[name]} has it too")
                header = file.get_slice(name)
                check_dtype(path, name, header.get_dtype())
                self.names[name], self.shapes[name] = path, tuple(header.get_shape())


def _index(directory: Path) -> dict[str, str]:
    """Return the file of each tensor; empty if there are no shards."""
    path = directory / _INDEX
    if not path.exists():
        return {}
    try:
        files = read_json_object(path).get("weight_map")
    except ValueError as error:
        raise ValueError(f"{path} is no index of safetensors shards: {error}") from error
    if not isinstance(files, dict):
        raise ValueError(f"{path} is no index of safetensors shards: its weight_map is {files!r}")
    for name, file in files.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise ValueError(f"{path} is no index of safetensors shards: {name} is in {file!r}, which is no file name")
    return files


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise ValueError(f"{path} is missing; fetch all files of the checkpoint")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or incomplete ({error}); fetch it again") from error
