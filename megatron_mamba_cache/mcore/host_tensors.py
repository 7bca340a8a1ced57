"""Between the rows of a step, what the device found of them, and the small CPU tensors of Megatron's interfaces."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..policy.requests import RunningRequest


class Reading:
    """A tensor on its way to the host, as it is at this place of the stream; the device may overwrite it behind."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", copy=True, non_blocking=True)  # into pinned memory
        self._arrival = torch.cuda.Event() if tensor.is_cuda else None
        if self._arrival is not None:
            self._arrival.record()

    def wait(self) -> list[list[int]]:
        """Wait for it, and return its lines."""
        if self._arrival is not None:
            self._arrival.synchronize()
        lines: list[list[int]] = self._copy.tolist()
        return lines


def ints(values: Tensor | Sequence[int]) -> list[int]:
    """Return a tensor or a sequence of numbers as a list."""
    return values.tolist() if isinstance(values, Tensor) else [int(value) for value in values]


def ids_of(rows: Sequence[RunningRequest]) -> Tensor | None:
    """Return the request ids of rows, [rows] int64; None if there are none."""
    return torch.tensor([row.request_id for row in rows], dtype=torch.int64) if rows else None
