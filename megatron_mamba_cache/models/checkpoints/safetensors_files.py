"""Stream the tensors of a Hugging Face checkpoint one at a time, from one file or many."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from .json_file import read_json_object

_INDEX = "model.safetensors.index.json"


class SafetensorsFiles:
    """The tensors of `model.safetensors`, or of the shards its index names; headers are read on construction.

    Attributes:
        names: Tensor name → its file.
        shapes: Tensor name → its shape.
        types: Tensor name → its type, as safetensors names it.

    Raises:
        ValueError: Naming the file if one is missing, damaged or lacks a tensor that the index lists, and the tensor
            if it is in two files.
    """

    def __init__(self, directory: Path) -> None:
        index = _index(directory)
        files = sorted(set(index.values())) or ["model.safetensors"]
        self._files = [directory / name for name in files]
        self.names: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.types: dict[str, str] = {}
        for path in self._files:
            self._read_header(path)
        for name, file in index.items():
            if self.names.get(name) != directory / file:
                raise ValueError(f"{directory / file} lacks tensor {name}, which {_INDEX} says it has")

    def tensors(self, wanted: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield each wanted name, file by file, with its tensors on the CPU.

        None of its file is held here, but of other files, what is needed next to this one is.

        Args:
            wanted: Tensor name → names of all tensors to read with it, itself among them.
        """
        for path in self._files:
            here = {name: parts for name, parts in wanted.items() if self.names[name] == path}
            # Read first, so that no more than one file is mapped into memory at a time.
            elsewhere = self._copied({part for parts in here.values() for part in parts if self.names[part] != path})
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    if name in here:
                        yield (
                            name,
                            {
                                part: elsewhere.pop(part) if part in elsewhere else file.get_tensor(part)
                                for part in here[name]
                            },
                        )

    def _copied(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return copies of tensors, which do not keep their files open."""
        found: dict[str, Tensor] = {}
        for path in sorted({self.names[name] for name in names}):
            with _opened(path) as file:
                found |= {name: file.get_tensor(name).clone() for name in names if self.names[name] == path}
        return found

    def _read_header(self, path: Path) -> None:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name in self.names:
                    raise ValueError(f"{path} has tensor {name}, and {self.names[name]} has it too")
                header = file.get_slice(name)
                self.names[name], self.types[name] = path, header.get_dtype()
                self.shapes[name] = tuple(header.get_shape())


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
