"""Check the index of a checkpoint's tensors, `.metadata`, before torch reads it and builds what it names."""

import pickle
from pathlib import Path
from typing import Any

import torch

from .common_state import UNPICKLING_ERRORS

INDEX_FILE = ".metadata"

_KNOWN_MODULES = {"torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"}
_KNOWN_NAMES = {
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("Path", "PurePath", "PosixPath", "PurePosixPath", "WindowsPath")),
}


def check_tensor_index(directory: Path) -> None:
    """Refuse an index that names anything that torch does not write into one; reading it would run what it names.

    Raises:
        ValueError: Naming the file, and the refused name or what is wrong with the file.
    """
    path = directory / INDEX_FILE
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            _KnownNamesOnly(file).load()
    except UNPICKLING_ERRORS as error:
        raise ValueError(f"{directory} does not hold the weights of a model: {path} cannot be read: {error}") from error


class _KnownNamesOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (is_dtype or (module, name) in _KNOWN_NAMES or (module in _KNOWN_MODULES and "." not in name)):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors does")
        return super().find_class(module, name)
