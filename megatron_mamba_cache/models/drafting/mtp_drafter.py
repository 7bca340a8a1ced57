"""Drafter that generates draft tokens with the model's multi-token prediction (MTP) head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...config import CacheConfig
from ...kernels.attention.choice import choose_attention
from ...kernels.attention.interface import AttentionShape
from ...kernels.sampling.greedy_draws import greedy_tokens
from ...mcore.model_ranks import num_expert_ranks, ranks_of_process
from ...mcore.model_reading import model_shape_of
from ...mcore.mtp_head import MTPHead, MTPStep
from ...mcore.served_model import logits_of
from ...speculation.drafter import Draft, DraftRequest
from .mtp_chain import MTPBatch, MTPChain

_BLOCK_SIZE = 256
"""Tokens per KV block; any attention backend can read blocks of this size."""


def is_split() -> bool:
    """Return True if this process has only a part of the model, whose head cannot draft alone."""
    return max(ranks_of_process().num_ranks, num_expert_ranks()) > 1


@dataclass(slots=True)
class _Window:
    """A request's entries at positions [first, end), which are stored at the start of its row of blocks."""

    row: int
    first: int = 0
    end: int = 0

    def begin(self, request: DraftRequest, capacity: int) -> int:
        """Make room for the entries of the newest tokens; return the index of the first of them.

        Entries before a gap or beyond the capacity are dropped.
        """
        assert request.hidden_states is not None
        length, num_new = request.running.length, len(request.hidden_states)
        start = length - num_new
        if start != self.end or length - self.first + request.num_tokens > capacity:
            self.first = start
        self.end = length
        return start - self.first


class MTPDrafter:
    """Drafter that generates the most likely tokens with an MTP head, which is applied again for each further token.

    The head has its own keys and values, of the newest tokens of each reply: the hidden states of a prompt are not
    known here. Positions count from the first of them; rotary embeddings depend on differences of positions only. After
    each step, one forward pass writes the entries of its verified tokens and yields the first draft token; a further
    pass over all requests yields each further token.

    Args:
        model: The engine's model.
        config: The engine's settings.
        window: Maximum number of entries per request.

    Raises:
        ValueError: If the model is split over several ranks.
    """

    def __init__(self, model: Any, head: MTPHead, config: CacheConfig, window: int = 512) -> None:
        if is_split():
            raise ValueError("drafts with an MTP head need a model on a single rank; use another drafter")
        shape = model_shape_of(model)
        self._model = model
        self._chain = MTPChain(model, head)
        self._num_blocks = -(-window // _BLOCK_SIZE)
        rows = config.max_requests
        self._kv_cache = head.new_kv_cache(rows * self._num_blocks, _BLOCK_SIZE)
        self._attention = choose_attention(
            config.attention_backend if config.kv_cache_dtype == "auto" else "auto",
            AttentionShape(
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.kv_channels,
                block_size=_BLOCK_SIZE,
                scale=shape.softmax_scale,
                dtype=shape.params_dtype,
                device=self._kv_cache.device,
                num_blocks=rows * self._num_blocks,
            ),
        )
        self._windows: dict[int, _Window] = {}
        self._free_rows = list(range(rows))

    @property
    def hidden_size(self) -> int:
        """Size of the model's hidden states."""
        return int(self._model.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, including padding."""
        return int(self._model.vocab_size)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request, in order; empty without a hidden state or room for the request."""
        served = [request for request in requests if self._has_room(request)]
        try:
            drafts = self._draft(served) if served else {}
        except BaseException:
            for request in served:
                self.forget(request.running.request_id)
            raise
        return [drafts.get(request.running.request_id, Draft()) for request in requests]

    def forget(self, request_id: int) -> None:
        """Drop a request's entries; ignore an unknown request."""
        window = self._windows.pop(request_id, None)
        if window is not None:
            self._free_rows.append(window.row)

    def _has_room(self, request: DraftRequest) -> bool:
        if request.hidden_states is None:
            return False
        request_id = request.running.request_id
        if request_id not in self._windows and self._free_rows:
            self._windows[request_id] = _Window(self._free_rows.pop())
        return request_id in self._windows

    def _draft(self, requests: Sequence[DraftRequest]) -> dict[int, Draft]:
        windows = [self._windows[request.running.request_id] for request in requests]
        starts = [window.begin(request, self._capacity) for window, request in zip(windows, requests, strict=True)]
        ends = [window.end - window.first for window in windows]
        rows = np.array([window.row for window in windows], np.int32)
        verified = self._step(rows, starts, [end - start for start, end in zip(starts, ends, strict=True)])
        states = torch.cat([request.hidden_states for request in requests if request.hidden_states is not None])
        outputs = self._chain.entries(_newest_tokens(requests).to(states.device), states, verified)
        last = outputs[verified.batch.attention.cu_query[1:].long() - 1]
        first = greedy_tokens(logits_of(self._model, last))
        others = self._chain.draft(
            first,
            last,
            max(request.num_tokens for request in requests) - 1,
            lambda number: self._step(rows, [end + number for end in ends], [1] * len(rows)),
        )
        drafts = torch.cat((first[:, None], others), dim=1).tolist()  # the only host sync
        return {
            request.running.request_id: Draft(tuple(tokens[: request.num_tokens]))
            for request, tokens in zip(requests, drafts, strict=True)
        }

    def _step(self, rows: npt.NDArray[np.int32], starts: Sequence[int], lengths: Sequence[int]) -> MTPStep:
        """Return a step of consecutive entries of each request, which start at these indices of its window."""
        table = (rows[:, None] * self._num_blocks + np.arange(self._num_blocks)).astype(np.int32)
        batch = MTPBatch.of(starts, lengths, table, _BLOCK_SIZE, self._kv_cache.device)
        return MTPStep(batch, self._kv_cache, self._attention.plan(batch.attention), self._capacity)

    @property
    def _capacity(self) -> int:
        return self._num_blocks * _BLOCK_SIZE


def _newest_tokens(requests: Sequence[DraftRequest]) -> Tensor:
    """Return the packed tokens, int64 on the host, that were sampled from the requests' hidden states."""
    found: list[int] = []
    for request in requests:
        length = request.running.length
        assert request.hidden_states is not None
        found += map(int, request.running.tokens(length - len(request.hidden_states), length))
    return torch.tensor(found, dtype=torch.int64)
