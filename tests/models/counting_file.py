"""A checkpoint file that counts the tensors in memory."""

import weakref
from typing import Any

import torch


class CountingFile:
    """An open safetensors file that records, at each read, how many tensors from all files are in memory."""

    def __init__(self, file: Any, alive: weakref.WeakSet, counts: list[int]) -> None:
        self._file = file
        self._alive = alive
        self._counts = counts

    def __enter__(self) -> "CountingFile":
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return self._file.keys()

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(name)

    def get_tensor(self, name: str) -> torch.Tensor:
        self._counts.append(len(self._alive))
        tensor = self._file.get_tensor(name)
        self._alive.add(tensor)
        return tensor
