"""Read the metadata of a Megatron checkpoint without importing or running code that its pickles name.

Only classes that torch or Megatron considers safe are instantiated. Placeholder objects replace all other classes.
"""

import pickle
import struct
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

COMMON_FILE = "common.pt"

UNPICKLING_ERRORS = (
    *(OSError, RuntimeError, EOFError, MemoryError, pickle.UnpicklingError, struct.error),
    *(ValueError, LookupError, AttributeError, TypeError, AssertionError, ArithmeticError),
)
"""Errors that unpickling damaged bytes may raise."""
_NUMPY_TYPES = [type(numpy.dtype(code)) for code in numpy.typecodes["All"]]  # for arrays in a stored RNG state


@dataclass(frozen=True, slots=True)
class CommonState:
    """The parts of `common.pt` that are needed to load weights.

    Args:
        arguments: Arguments of the training run, by name; None if none are stored. A value whose type torch does not
            allow, such as an enum, is replaced by a placeholder that is not equal to any other value.
        splits_experts: True if each expert's tensors have their own names; False if one tensor stacks all experts.
    """

    arguments: Mapping[str, Any] | None
    splits_experts: bool


class NoCommonState(TorchCommonLoadStrategy):
    """Loading strategy that skips `common.pt`; Megatron would fail if the file had a class that is not allowed."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """Return an empty dict instead of the contents of `common.pt`."""
        return {}


def read_common_state(directory: Path) -> CommonState:
    """Read `common.pt` from a checkpoint directory; raise `ValueError`, naming the file, if it is damaged."""
    path = directory / COMMON_FILE
    try:
        names = get_unsafe_globals_in_checkpoint(str(path))
        # Each name needs its own stand-in class, because torch keeps the allowed classes in a set.
        stand_ins = [(type(name.rpartition(".")[2], (_StandIn,), {"__module__": __name__}), name) for name in names]
        with safe_globals([*stand_ins, *_NUMPY_TYPES]):  # type: ignore[list-item]
            state = torch.load(path, map_location="cpu", weights_only=True)
    except UNPICKLING_ERRORS as error:
        raise ValueError(
            f"{directory} does not hold the weights of a model: {path} cannot be read: {_reason(error)}"
        ) from error
    state = state if isinstance(state, dict) else {}
    content = state.get("content_metadata")
    return CommonState(
        arguments=_arguments(state.get("args")),
        splits_experts=isinstance(content, dict) and content.get("singleton_local_shards") is True,
    )


def _arguments(found: Any) -> dict[str, Any] | None:
    if isinstance(found, dict):
        return found
    return dict(vars(found)) if isinstance(found, Namespace | _StandIn) else None


def _reason(error: BaseException) -> str:
    """Return the line of an error message that gives the reason, without the advice that torch adds."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("Check the")]
    return lines[-1] if lines else repr(error)


class _StandIn:
    """Placeholder for an object whose class is not imported; accepts any arguments and keeps the attributes."""

    def __new__(cls, *_: Any) -> "_StandIn":
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


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
    """Check that a checkpoint's tensor index is safe to unpickle: it may refer only to what torch itself writes.

    Raises:
        ValueError: If the file cannot be read or refers to anything else; the message names it.
    """
    path = directory / INDEX_FILE
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            _KnownNamesOnly(file).load()
    except UNPICKLING_ERRORS as error:
        raise ValueError(f"{directory} does not hold the weights of a model: {path} cannot be read: {error}") from error


def _enum_member(enum: Any, name: str) -> Enum:
    if not (isinstance(enum, type) and issubclass(enum, Enum)):
        raise pickle.UnpicklingError("a tensor index must not refer to an attribute of anything but an enum")
    return enum[name]


class _KnownNamesOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.2 writes members of enums
            return _enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (is_dtype or (module, name) in _KNOWN_NAMES or (module in _KNOWN_MODULES and "." not in name)):
            raise pickle.UnpicklingError(f"a tensor index must not refer to {module}.{name}")
        return super().find_class(module, name)
