"""Allocate the weights of a model: not at all, or only those that are not replaced by quantized ones."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..mcore.linear import frozen
from .architecture import HybridArchitecture

Model = TypeVar("Model", bound=torch.nn.Module)

ReplaceWeights = Callable[[torch.nn.Module, torch.device], None]
"""Function of a model and its device that replaces parameters, e.g. by quantized ones."""

_TRANSFERS = (Tensor.to, Tensor.cuda, Tensor.cpu)


@contextmanager
def without_memory() -> Iterator[None]:
    """Context manager that creates all tensors on the meta device, even if another device is requested."""
    with torch.device("meta"), _OnMeta():
        yield


class _OnMeta(TorchFunctionMode):
    """Function mode that replaces any requested device by the meta device and ignores transfers between devices."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in _TRANSFERS:
            dtype = next((value for value in (*args[1:], *named.values()) if isinstance(value, torch.dtype)), None)
            return args[0] if dtype is None else args[0].type(dtype)
        if named.get("device") is not None:
            named["device"] = "meta"
        return func(*args, **named)


class _MatricesOnMeta(TorchFunctionMode):
    """Mode in which `torch.empty` creates tensors of two and more dimensions on the meta device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.empty and (len(args) > 1 or (args and not isinstance(args[0], int) and len(args[0]) > 1)):
            named["device"] = "meta"
        return func(*args, **named)


def _give_memory(model: torch.nn.Module, device: torch.device) -> None:
    """Replace parameters and buffers on the meta device by uninitialized ones on `device`."""
    replaced: dict[int, Tensor] = {}
    for module in model.modules():
        for owned in (module._parameters, module._buffers):
            for name, tensor in owned.items():
                if tensor is None or tensor.device.type != "meta":
                    continue
                if id(tensor) not in replaced:
                    values = torch.empty_like(tensor, device=device)
                    if isinstance(tensor, torch.nn.Parameter):
                        values = frozen(values, like=tensor).requires_grad_(tensor.requires_grad)
                    replaced[id(tensor)] = values
                owned[name] = replaced[id(tensor)]  # type: ignore[assignment]


_SIZES_SHOWN = 4


@contextmanager
def largest_sizes_named(fields: Mapping[str, Any]) -> Iterator[None]:
    """Context manager that turns torch's allocation errors into a `MemoryError` with the model's largest dimensions.

    Args:
        fields: Fields of an architecture, by name; nested fields are included, and each integer is a dimension.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error):
            raise
        sizes = sorted(_sizes("", fields), key=lambda size: size[1], reverse=True)
        largest = ", ".join(f"{name}={size}" for name, size in sizes[:_SIZES_SHOWN])
        raise MemoryError(f"the model's weights do not fit in memory; its largest dimensions are {largest}") from error


def _sizes(prefix: str, fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _sizes(f"{prefix}{name}.", value)
        elif type(value) is int:
            yield f"{prefix}{name}", value


def allocated(
    architecture: HybridArchitecture, build: Callable[[], Model], replace_weights: ReplaceWeights | None
) -> Model:
    """Return the module that `build` returns, on the current device and in eval mode; raise as `build_hybrid_model`.

    Args:
        replace_weights: As in `build_hybrid_model`.
    """
    with largest_sizes_named(asdict(architecture)):
        with nullcontext() if replace_weights is None else _MatricesOnMeta():
            model = build()
        if replace_weights is not None:
            device = torch.empty(0, device=torch.cuda.current_device()).device
            replace_weights(model, device)
            _give_memory(model, device)
        return model.to(torch.cuda.current_device()).eval()
