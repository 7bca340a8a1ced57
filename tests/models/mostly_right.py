"""An MTP drafter whose drafts are mostly right on purpose."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_mamba_cache.models.drafting.mtp_drafter import MTPDrafter
from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest


class MostlyRight(MTPDrafter):
    """Runs the head, then replaces most of its drafts by tokens of known replies; its passes seem to take no time."""

    def __init__(self, *arguments: Any, replies: Mapping[int, Sequence[int]], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._replies = replies

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        return 1e-6 * num_drafts

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [
            self._replaced(request, draft) for request, draft in zip(requests, super().propose(requests), strict=True)
        ]

    def _replaced(self, request: DraftRequest, draft: Draft) -> Draft:
        running = request.running
        start = running.length - len(running.spec.prompt)
        reply = self._replies[running.request_id][start : start + request.num_tokens]
        return Draft(tuple(reply)) if reply and start % 5 else draft
