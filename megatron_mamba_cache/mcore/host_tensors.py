"""Convert between the rows of a step and the small CPU tensors of Megatron's interfaces."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..policy.requests import RunningRequest


def ints(values: Tensor | Sequence[int]) -> list[int]:
    """Return a tensor or a sequence of numbers as a list."""
    return values.tolist() if isinstance(values, Tensor) else [int(value) for value in values]


def ids_of(rows: Sequence[RunningRequest]) -> Tensor | None:
    """Return the request ids of rows, [rows] int64; None if there are none."""
    return torch.tensor([row.request_id for row in rows], dtype=torch.int64) if rows else None
