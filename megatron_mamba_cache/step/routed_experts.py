"""Routed experts of every token, which are kept in KV blocks next to the token's keys and values.

The router writes them within the step. They depend on the same tokens as keys and values, so a prefix hit, a copy
between tiers and a rejected draft treat both alike. They are copied to the host only when a request ends.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from ..kernels.experts.routing_rule import RouteRecord
from ..policy.requests import RunningRequest
from ..recurrences.layout import route_table
from ..recurrences.model_shape import EXPERTS, HybridModelShape
from .batch import StepBatch
from .buffers import HostCopy

_BLOCKS_AT_ONCE = 64
"""Number of blocks that are gathered at a time, so that a long request needs little device memory."""


class NoRoutes:
    """Interface to the recorded experts; this base class records none."""

    def record(self, batch: StepBatch, layer_number: int) -> RouteRecord | None:
        """Return the memory for the experts of a step's tokens in an MoE layer, numbered from 1; None: not recorded."""
        return None

    def keep(self, requests: Iterable[RunningRequest]) -> None:
        """Begin to copy the experts of requests that ended to the host, before their blocks are released."""


class RouteTable(NoRoutes):
    """Routed experts in all KV blocks of a device memory, whose KV buffer has space for them."""

    def __init__(self, kv_buffer: Tensor, shape: HybridModelShape) -> None:
        self._layer_types = shape.layer_types
        self._table = route_table(kv_buffer, shape.num_expert_layers, shape.experts_per_token)

    @override
    def record(self, batch: StepBatch, layer_number: int) -> RouteRecord:
        layer = self._layer_types[: layer_number - 1].count(EXPERTS)
        return RouteRecord(self._table[:, :, layer], batch.token_blocks, batch.token_offsets)

    @override
    @torch.inference_mode()
    def keep(self, requests: Iterable[RunningRequest]) -> None:
        for request in requests:
            if request.spec.returns_routes is not False:
                request.keep_routes(self._copied(request))

    def _copied(self, request: RunningRequest) -> "RoutedExperts":
        block_size, num_known = self._table.shape[1], request.computed
        blocks = torch.tensor(request.block_ids[: -(-num_known // block_size)], dtype=torch.int64)
        parts = blocks.to(self._table.device, non_blocking=True).split(_BLOCKS_AT_ONCE)
        copies = [HostCopy(self._table.index_select(0, part)) for part in parts]
        return RoutedExperts(copies, num_known, (request.length, *self._table.shape[2:]))


class RoutedExperts:
    """Routed experts of one request while they are copied to the host.

    Args:
        copies: [blocks, block size, MoE layers, experts per token] each, of the request's blocks in order.
        num_known: Number of computed tokens.
        shape: (tokens, MoE layers, experts per token).
    """

    def __init__(self, copies: list[HostCopy], num_known: int, shape: tuple[int, ...]) -> None:
        self._copies = copies
        self._num_known = num_known
        self._found = np.full(shape, -1, np.int16)

    def array(self) -> npt.NDArray[np.int16]:
        """Wait for the copy; return the experts, [tokens, MoE layers, experts per token].

        They are -1 for tokens that were not computed, such as the last generated token.
        """
        copies, self._copies = self._copies, []  # their pinned memory is freed
        first = 0
        for copy in copies:
            part = copy.arrived().flatten(0, 1).numpy()[: self._num_known - first]
            self._found[first : first + len(part)] = part
            first += len(part)
        return self._found
