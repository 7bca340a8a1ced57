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
    """Fixed-shape all-gather and reduce-scatter between expert-parallel ranks, shared by all layers."""

    def __init__(self, ranks: dist.ProcessGroup) -> None:
        self._ranks = ranks
        self._num_ranks = dist.get_world_size(ranks)
        self.rank = dist.get_rank(ranks)
        self._marked: tuple[StepBatch, Tensor] | None = None
        self._num_made = self._num_to_skip = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Context manager that counts the exchanges in its body. If the body raises, `resuming` uses the count."""
        self._num_made = 0
        yield
        self._num_made = 0

    @contextmanager
    def completed(self) -> Iterator[bool]:
        """Context manager like `resuming` whose exchanges complete those that failed, and are counted with them."""
        with self.resuming() as any_made:
            yield any_made
        self._num_made = 0

    @contextmanager
    def resuming(self) -> Iterator[bool]:
        """Context manager for a padding forward pass that skips the exchanges which the failed forward pass has made.

        It yields True if there are any. Skipped exchanges return zeros.
        """
        self._num_to_skip = self._num_made
        try:
            yield self._num_made > 0
        finally:
            self._num_to_skip = 0

    def gather(self, x: Tensor, num_exchanged: int) -> Tensor:
        """Return the tokens of all ranks, [ranks * num_exchanged, ...], from this rank's [tokens, ...].

        Args:
            num_exchanged: Number of tokens per rank, padding included; the same on all ranks. Padding is 0.
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
        """Return a mask of the gathered tokens, [ranks * num_exchanged] int32, 0 for padding; None without a mask."""
        if batch is None or batch.real_tokens is None:
            return None
        marked = self._marked
        if marked is not None and (marked[0] is batch or self._is_made()):
            found = marked[1]  # gathered in this step, or by the failed forward pass
        else:
            found = self.gather(batch.real_tokens, batch.num_exchanged)
        self._marked = batch, found
        return found

    def combine(self, partial: Tensor, num_tokens: int, addend: Tensor | None) -> Tensor:
        """Reduce-scatter the expert outputs; return those for this rank's tokens, [num_tokens, outputs].

        Args:
            partial: [ranks * num_exchanged, outputs]: outputs of this rank's experts for the tokens of all ranks.
            addend: [num_tokens, outputs] added to the result if given.
        """
        received = torch.empty_like(partial)
        if self._is_made():
            received.zero_()
        else:
            dist.all_to_all_single(received, partial, group=self._ranks)
            self._num_made += 1
        return sum_of_ranks(received.view(self._num_ranks, -1, partial.shape[1]), num_tokens, addend)

    def _is_made(self) -> bool:
        """Count the next exchange, and return whether the failed forward pass has already made it."""
        skips = self._num_to_skip > 0
        self._num_to_skip -= skips
        return skips


@lru_cache(maxsize=1)  # only one, because a process group keeps its threads while it is referenced
def exchange_among(ranks: dist.ProcessGroup) -> ExpertExchange:
    """Return the `ExpertExchange` of a process group, shared by all layers."""
    return ExpertExchange(ranks)
