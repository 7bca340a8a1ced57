"""A random MTP head of a model's sizes, whose drafts are replaced by drafts of a known accuracy."""

from collections.abc import Sequence
from typing import Any

import torch
from loads.random_checkpoint import STD, described
from loads.recorded_drafts import ChanceDrafter
from torch import Tensor

from megatron_mamba_cache.kernels.sampling.draft_passes import DraftRows
from megatron_mamba_cache.mcore.mtp_chain import MTPChain
from megatron_mamba_cache.mcore.mtp_head import MTPHead
from megatron_mamba_cache.models.drafting.mtp_drafter import MTPDrafter
from megatron_mamba_cache.models.drafting.mtp_passes import MTPPasses
from megatron_mamba_cache.models.mtp_head import build_mtp_head, head_architecture
from megatron_mamba_cache.policy.requests import RunningRequest
from megatron_mamba_cache.step.memory import CacheMemory
from megatron_mamba_cache.step.overlapped_step import CapturedStep


class KnownPasses(MTPPasses):
    """Passes whose drafts are replaced by known tokens on the device, also in CUDA graphs.

    Attributes:
        known: Knows the replies.
    """

    def __init__(self, chain: MTPChain, memory: CacheMemory, max_drafts: int) -> None:
        super().__init__(chain, memory, max_drafts)
        self.known: ChanceDrafter | None = None
        self._order: list[int] = []
        num_rows, num_positions = len(self._hidden), self._longest + max_drafts + 1
        self._table = torch.full((num_rows, num_positions), -1, device=self._hidden.device)  # -1: the head's draft

    def draft(self, requests: Sequence[RunningRequest], lengths: Sequence[int], *arguments: Any) -> Tensor:
        """Return the known tokens after the head's passes."""
        self._fill(requests)
        return super().draft(requests, lengths, *arguments)

    def follow(self, graph: CapturedStep, requests: Sequence[RunningRequest]) -> None:
        """Let the next step have the known tokens as drafts."""
        self._fill(requests)
        super().follow(graph, requests)

    def most_likely(self, hidden: Tensor, rows: DraftRows) -> Tensor:
        """Return the token that is known for the next position, otherwise the head's."""
        known = self._table[: len(hidden)].gather(1, rows.positions[:, None] + 1)[:, 0]
        return torch.where(known >= 0, known, super().most_likely(hidden, rows))

    def _fill(self, requests: Sequence[RunningRequest]) -> None:
        """Write the drafts of all positions of these requests, if the requests are not those of the last call."""
        order = [request.request_id for request in requests]
        if self.known is None or order == self._order:
            return
        self._order = order
        self._table.fill_(-1)
        for row, request in enumerate(requests):
            tokens = torch.tensor(self.known.whole_draft(request.request_id), dtype=torch.int64)
            start = request.first_generated
            self._table[row, start : start + len(tokens)] = tokens.to(self._table.device)


class KnownHeadDrafter(MTPDrafter):
    """Computes all drafts with the head, then drafts the tokens of `known` instead."""

    passes_type = KnownPasses

    def __init__(self, model: Any, head: MTPHead, known: ChanceDrafter) -> None:
        super().__init__(model, head)
        self._known = known

    def _passes_here(self) -> MTPPasses:
        passes = super()._passes_here()
        assert isinstance(passes, KnownPasses)
        passes.known = self._known
        return passes


@torch.no_grad()
def random_head(fields: dict[str, Any], dtype: torch.dtype) -> MTPHead:
    """Return a head with an attention layer and an MLP or MoE layer, for the model of these configuration fields."""
    _, architecture = described(fields)
    head = build_mtp_head(head_architecture(architecture, "*E" if "E" in architecture.pattern else "*-"), dtype)
    for name, parameter in head.named_parameters():
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, STD)
    return head
