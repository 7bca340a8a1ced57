"""An MTP drafter whose drafts are mostly right on purpose."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_mamba_cache.models.drafting.mtp_drafter import MTPDrafter
from megatron_mamba_cache.models.drafting.mtp_passes import MTPPasses
from megatron_mamba_cache.policy.requests import RunningRequest
from tests.mcore.mtp_drafters import KnownPasses


class MostlyRightPasses(KnownPasses):
    """Passes that know the replies, but leave every fifth token to the head."""

    def text_of(self, request: RunningRequest) -> Sequence[int]:
        reply = self.known[request.request_id]
        return [-1] * request.first_generated + [token if index % 5 else -1 for index, token in enumerate(reply)]


class MostlyRight(MTPDrafter):
    """Runs the head, then replaces most of its drafts by tokens of known replies; its passes seem to take no time."""

    passes_type = MostlyRightPasses

    def __init__(self, *arguments: Any, replies: Mapping[int, Sequence[int]], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._replies = replies

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        return 1e-6 * num_drafts

    def _passes_here(self) -> MTPPasses:
        passes = super()._passes_here()
        assert isinstance(passes, KnownPasses)
        passes.known = self._replies
        return passes
