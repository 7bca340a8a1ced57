"""A random MTP head of a model's sizes, whose drafts are replaced by drafts of a known accuracy."""

from collections.abc import Sequence
from typing import Any

import torch
from loads.random_checkpoint import STD, described
from loads.recorded_drafts import ChanceDrafter

from megatron_mamba_cache.mcore.mtp_head import MTPHead
from megatron_mamba_cache.models.drafting.mtp_drafter import MTPDrafter
from megatron_mamba_cache.models.mtp_head import build_mtp_head, head_architecture
from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest


class KnownHeadDrafter(MTPDrafter):
    """Computes all drafts with the head, then proposes those of `known` instead."""

    def __init__(self, model: Any, head: MTPHead, known: ChanceDrafter) -> None:
        super().__init__(model, head)
        self._known = known

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the drafts of `known`, after those of the head are on the host."""
        super().propose(requests)
        return self._known.propose(requests)


@torch.no_grad()
def random_head(fields: dict[str, Any], dtype: torch.dtype) -> MTPHead:
    """Return a head with an attention layer and an MLP or MoE layer, for the model of these configuration fields."""
    _, architecture = described(fields)
    head = build_mtp_head(head_architecture(architecture, "*E" if "E" in architecture.pattern else "*-"), dtype)
    for name, parameter in head.named_parameters():
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, STD)
    return head
