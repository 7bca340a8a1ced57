"""Build modules whose tensors have shapes and dtypes, but no memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TRANSFERS = (Tensor.to, Tensor.cuda, Tensor.cpu)


@contextmanager
def without_memory() -> Iterator[None]:
    """Let the block make tensors on the meta device, whatever device it asks for."""
    with torch.device("meta"), _OnMeta():
        yield


class _OnMeta(TorchFunctionMode):
    """Takes the meta device in the place of one that is named, and moves no tensor to another."""

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
