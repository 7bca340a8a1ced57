"""Host tensors of one value a row, in the order Megatron's own code slices them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..policy.requests import RunningRequest


class RowTables:
    """Rows that sit the step out come first, then the step's rows: decoding, then prefilling.

    All CPU tensors of [max_requests]: the cache keeps rows on the host.
    """

    def __init__(self, max_requests: int, metadata_types: Sequence[tuple[str, torch.dtype, bool]]) -> None:
        self.request_ids = torch.full((max_requests,), -1, dtype=torch.int64)
        self.query_lengths = torch.zeros(max_requests, dtype=torch.int32)
        self.metadata: dict[str, Tensor] = {
            label: torch.zeros(max_requests, dtype=dtype) for label, dtype, _ in metadata_types
        }

    def fill(self, rows: Sequence[RunningRequest]) -> None:
        """Write the values of `rows`."""
        self._write(self.request_ids, [row.request_id for row in rows])
        self._write(self.query_lengths, [row.scheduled for row in rows])
        for column, tensor in enumerate(self.metadata.values()):
            self._write(tensor, [row.spec.metadata[column] for row in rows])

    @staticmethod
    def _write(tensor: Tensor, values: list[Any]) -> None:
        tensor[: len(values)] = torch.tensor(values, dtype=tensor.dtype)
