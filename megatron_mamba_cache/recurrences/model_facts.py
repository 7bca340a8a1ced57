"""What decides what a model computes with its weights: the settings that its modules were built with.

A checkpoint's configuration may change what the same weights compute: the activation, limits of time steps, the base of
rotary positions, multipliers, the rule of a router. All of it is somewhere in the modules, or in Megatron's settings.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

_PACKAGE = __name__.partition(".")[0]
_NO_FACTS = ("training", "max_sequence_length", "first_expert", "_copy", "exchange")
_OF_RANKS = ("rank", "group", "local_expert")
_Fact = tuple[str, str]


def facts_of(model: nn.Module) -> list[_Fact]:
    """Return names and values of everything simple that the modules hold, in order; the same in every process.

    Simple are numbers, texts, dtypes, functions by name, tensors that are no weights, and tuples, dataclasses and
    objects of this package that consist of those. What says which rank this is stays out.
    """
    found = [("config", text) for text in _fields_of(model.config)]
    for path, module in model.named_modules():
        found += [(f"{path}.{name}", text) for name, text in _attributes_of(module)]
        for name in sorted(module._non_persistent_buffers_set):
            found.append((f"{path}.{name}", _bits_of(module._buffers[name])))
    return found


def _attributes_of(owner: Any) -> Iterator[_Fact]:
    for name, value in sorted(vars(owner).items()):
        if value is None or name in _NO_FACTS or any(part in name for part in _OF_RANKS):
            continue
        if type(value).__module__.startswith(_PACKAGE) and not isinstance(value, nn.Module) and not _is_simple(value):
            yield from ((f"{name}.{inner}", text) for inner, text in _attributes_of(value))
        elif isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            yield name, _bits_of(value)
        elif _is_simple(value):
            yield name, _text_of(value)


def _fields_of(config: Any) -> Iterator[str]:
    for field in fields(config):
        value = getattr(config, field.name)
        if "rank" not in field.name and _is_simple(value):
            yield f"{field.name}={_text_of(value)}"


def _is_simple(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_simple, value))
    if is_dataclass(value) and not isinstance(value, type):
        return all(_is_simple(getattr(value, field.name)) for field in fields(value))
    return value is None or isinstance(value, int | float | str | Enum | torch.dtype) or hasattr(value, "__qualname__")


def _text_of(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text_of, value))})"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__qualname__}{_text_of([getattr(value, field.name) for field in fields(value)])}"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)


def _bits_of(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(octets.numpy().tobytes()).hexdigest()}"
