"""Exchange tokens between expert-parallel ranks: all-gather tokens, then reduce-scatter expert outputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..kernels.experts.weighted_sum import sum_of_ranks
from .batch import StepBatch


class ExpertExchange:
    """Exchanges of all layers between expert-parallel ranks: collectives of fixed shape, for CUDA graphs."""

    def __init__(self, ranks: dist.ProcessGroup) -> None:
        self._ranks = ranks
        self._num_ranks = dist.get_world_size(ranks)
        self._marked: tuple[StepBatch, Tensor] | None = None
        self._num_made = self._num_to_skip = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Context manager: count the exchanges of the forward pass in its body; keep the count if the body raises."""
        self._num_made = 0
        yield
        self._num_made = 0

    @contextmanager
    def resuming(self) -> Iterator[bool]:
        """Context manager: skip the exchanges that a failed forward pass has made; yield whether there are any."""
        self._num_to_skip = self._num_made
        try:
            yield self._num_made > 0
        finally:
            self._num_to_skip = 0

    def gather(self, x: Tensor, num_exchanged: int) -> Tensor:
        """Return the tokens of all ranks, [ranks * num_exchanged, ...], from this rank's [tokens, ...].

        Args:
            num_exchanged: Padded number of tokens per rank, the same on all ranks; padding is 0.
        """
        if len(x) < num_exchanged:
            x = F.pad(x, (0,) * (2 * x.dim() - 1) + (num_exchanged - len(x),))
        everyone = x.new_empty(self._num_ranks * num_exchanged, *x.shape[1:])
        if self._is_made():
            return everyone.zero_()
        dist.all_gather_into_tensor(everyone, x.contiguous(), group=self._ranks)
        self._num_made += 1
        return everyone

    def real_tokens(self, batch: StepBatch | None) -> Tensor | None:
        """Return which of the gathered tokens are real, [ranks * num_exchanged] int32; None if all are."""
        if batch is None or batch.real_tokens is None:
            return None
        marked = self._marked
        if marked is not None and (marked[0] is batch or self._is_made()):
            found = marked[1]  # includes the marks of other ranks that a failed forward pass received
        else:
            found = self.gather(batch.real_tokens, batch.num_exchanged)
        self._marked = batch, found
        return found

    def combine(self, partial: Tensor, num_tokens: int, addend: Tensor | None) -> Tensor:
        """Return the sum over ranks for this rank's tokens, [tokens, outputs], plus the addend of the same shape.

        Args:
            partial: [ranks * num_exchanged, outputs]: contributions of this rank's experts to the tokens of each rank.
        """
        received = torch.empty_like(partial)
        if self._is_made():
            received.zero_()
        else:
            dist.all_to_all_single(received, partial, group=self._ranks)
            self._num_made += 1
        return sum_of_ranks(received.view(self._num_ranks, -1, partial.shape[1]), num_tokens, addend)

    def _is_made(self) -> bool:
        """Return whether the failed forward pass has already made the next exchange, and count it."""
        skips = self._num_to_skip > 0
        self._num_to_skip -= skips
        return skips


@lru_cache(maxsize=1)  # a process group keeps its threads while it is referenced
def exchange_among(ranks: dist.ProcessGroup) -> ExpertExchange:
    """Return the `ExpertExchange` of a process group, shared by all layers."""
    return ExpertExchange(ranks)
