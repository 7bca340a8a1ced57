"""Short list: the tokens from which drafts are chosen, so that a draft reads only some rows of the output layer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..kernels.one_token import can_multiply_one_token, multiply_one_token
from ..kernels.sampling.greedy_draws import greedy_tokens
from ..policy.requests import RunningRequest

_LEAST_VOCABULARY = 65_536
_SHARE = 4
_FIRST_COUNT, _MOST_COUNT = 1 << 14, 1 << 20
"""Tokens counted before the list is chosen for the first time, and most tokens before it is chosen again."""


class ListedTokens:
    """The ids of a short list: first the lowest ids, then the tokens that are most frequent in the text of requests.

    The lowest ids are the most frequent tokens of a byte-pair encoding. The list is chosen when a request begins.
    All ranks of a model have the same list if they count the same requests.

    Attributes:
        ids: Sorted ids of the listed tokens.
    """

    def __init__(self, vocab_size: int, size: int) -> None:
        self.ids = np.arange(size)
        self._is_listed = np.arange(vocab_size) < size
        self._counts = np.zeros(vocab_size, np.int64)
        self._num_counted, self._due = 0, _FIRST_COUNT
        self._lengths: dict[int, int] = {}  # number of counted tokens by request id

    @classmethod
    def of(cls, vocab_size: int) -> "ListedTokens | None":
        """Return a list of a quarter of the vocabulary; None if the vocabulary is small."""
        return cls(vocab_size, vocab_size // _SHARE) if vocab_size >= _LEAST_VOCABULARY else None

    def num_unlisted(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens are not in the list."""
        return len(tokens) - int(self._is_listed[[*tokens]].sum())

    def count(self, requests: Sequence[RunningRequest]) -> bool:
        """Count the new tokens of these requests; return True if the list is chosen again, as a request begins."""
        if not requests:
            return False
        starts = [self._lengths.get(request.request_id, 0) for request in requests]
        texts = [request.tokens(start, request.length) for request, start in zip(requests, starts, strict=True)]
        tokens = np.concatenate(texts, dtype=np.int64, casting="unsafe")  # unsafe, because an empty list has no dtype
        np.add.at(self._counts, tokens, 1)
        self._num_counted += len(tokens)
        self._lengths |= {request.request_id: request.length for request in requests}
        is_chosen = 0 in starts and self._num_counted >= self._due
        if is_chosen:
            self._choose()
        return is_chosen

    def forget(self, request_id: int) -> None:
        """Drop the number of counted tokens of a request; the counts stay."""
        self._lengths.pop(request_id, None)

    def _choose(self) -> None:
        """Choose the most frequent tokens, the lowest ids first among equals, and give older counts half the weight."""
        rank, size = self._counts * len(self._counts) - np.arange(len(self._counts)), len(self.ids)
        self.ids = np.sort(np.argpartition(rank, -size)[-size:])
        self._is_listed[:] = False
        self._is_listed[self.ids] = True
        self._counts //= 2
        self._num_counted, self._due = 0, min(2 * self._due, _MOST_COUNT)


class ShortList:
    """The tokens that requests use most, and a contiguous copy of their rows of the output layer.

    The rows are replaced in place, so CUDA graphs may read them. The list affects drafts only: verification uses the
    whole vocabulary.

    Args:
        model: The last pipeline stage of a MambaModel. Its tensor-parallel ranks each have some tokens of the list, and
            must call all methods together, about the same requests.
        tokens: The listed tokens, or their number.

    Attributes:
        tokens: The listed tokens.
    """

    def __init__(self, model: Any, tokens: ListedTokens | int) -> None:
        self._model = model
        self._group = getattr(model.output_layer, "tp_group", None)
        self._num_ranks = 1 if self._group is None else dist.get_world_size(self._group)
        self._rank = 0 if self._group is None else dist.get_rank(self._group)
        self.tokens = ListedTokens(model.vocab_size, tokens) if isinstance(tokens, int) else tokens
        weight = self._weight
        self._ids = torch.from_numpy(self.tokens.ids).to(weight.device)
        self._rows = weight.new_empty(len(self._ids_of(self._rank)), weight.shape[1])
        self.copy_rows()

    @classmethod
    def of(cls, model: Any) -> "ShortList | None":
        """Return a list of a quarter of the model's vocabulary; None if the vocabulary is small."""
        tokens = ListedTokens.of(int(model.vocab_size))
        return None if tokens is None else cls(model, tokens)

    def __len__(self) -> int:
        return len(self._ids)

    def most_likely(self, hidden_states: Tensor) -> Tensor:
        """Return the token of the list with the largest logit for each row of [n, hidden], as [n] int64."""
        is_one = can_multiply_one_token(hidden_states, self._rows)
        logits = (multiply_one_token if is_one else F.linear)(hidden_states, self._rows)
        index = greedy_tokens(logits)
        ids = self._ids_of(self._rank)[index]
        if self._num_ranks == 1:
            return ids
        best = torch.stack((logits.gather(1, index[:, None])[:, 0].double(), ids.double()))
        of_ranks = best.new_empty(self._num_ranks, *best.shape)
        dist.all_gather_into_tensor(of_ranks.flatten(0, 1), best, group=self._group)  # Gloo stacks no tensors
        chosen = of_ranks[:, 0].argmax(0)
        return of_ranks[:, 1].gather(0, chosen[None])[0].long()

    def count(self, requests: Sequence[RunningRequest]) -> None:
        """Count the new tokens of these requests; see `ListedTokens.count`."""
        if self.tokens.count(requests):
            self._ids.copy_(torch.from_numpy(self.tokens.ids))
            self.copy_rows()

    def copy_rows(self) -> None:
        """Copy the rows of the list from the output layer, whose weights may have changed."""
        weight = self._weight
        if self._num_ranks == 1:
            torch.index_select(weight, 0, self._ids, out=self._rows)
            return
        for rank in range(self._num_ranks):
            index = self._ids_of(rank) - self._rank * len(weight)
            is_here = (index >= 0) & (index < len(weight))
            rows = torch.where(is_here[:, None], weight[index.clamp(0, len(weight) - 1)], 0)
            dist.all_reduce(rows, group=self._group)  # exact, because the rows of other ranks are 0
            if rank == self._rank:
                self._rows.copy_(rows)

    def _ids_of(self, rank: int) -> Tensor:
        """Return the tokens of the list whose rows are on a tensor-parallel rank."""
        return self._ids.tensor_split(self._num_ranks)[rank]

    @property
    def _weight(self) -> Tensor:
        """This rank's part of the weight of the output layer, [vocab / ranks, hidden]."""
        is_shared = self._model.share_embeddings_and_output_weights
        weight = self._model.shared_embedding_or_output_weight() if is_shared else self._model.output_layer.weight
        found: Tensor = weight.detach()
        return found
