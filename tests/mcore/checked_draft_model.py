"""A draft model whose bookkeeping is checked after every call."""

from collections.abc import Sequence
from typing import Any

from megatron_mamba_cache import CacheConfig
from megatron_mamba_cache.metrics import CacheCounters
from megatron_mamba_cache.models.drafting.draft_model import DraftModelDrafter
from megatron_mamba_cache.speculation.drafter import Draft, DraftRequest
from tests.mcore.engine_runs import Hybrid, cache_config


class CheckedDraftModel(DraftModelDrafter):
    """A draft model that checks integrity after every call, failed ones included.

    With `num_cuda_graphs`, and where graphs can be captured, its forwards are replayed unless settings say otherwise.
    """

    num_cuda_graphs = 0

    @classmethod
    def start(cls, subject: Hybrid, config: CacheConfig | None = None, **settings: Any) -> "CheckedDraftModel":
        """Build a drafter around a tiny model; without a config, from `cache_config`'s settings."""
        settings = {"num_speculative_tokens": 1, "num_cuda_graphs": cls.num_cuda_graphs} | settings
        return cls(subject.model, config or cache_config(subject.sizes, **settings))

    def draft_seconds(self, num_requests: int, num_drafts: int) -> float:
        """Return almost no time: a tiny model drafts here for an equally small one, which would not pay."""
        return 1e-9

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one draft for each request."""
        try:
            return super().propose(requests)
        finally:
            self.check_integrity()

    def forget(self, request_id: int) -> None:
        """Return the state held for a request."""
        super().forget(request_id)
        self.check_integrity()

    @property
    def context(self) -> Any:
        """The draft model's inference context."""
        return self._context

    @property
    def counters(self) -> CacheCounters:
        """Counters of the draft model."""
        return self._counters

    def assert_nothing_held(self) -> None:
        """Assert that no request is known and no block or slot is in use."""
        assert not self.context.running_requests and not self._held._held and not self._held._waits_since
        snapshot = self.snapshot()
        assert snapshot.state_slots["live"] == snapshot.state_slots["draft"] == snapshot.state_slots["reserved"] == 0
        assert snapshot.kv_blocks["in_use"] == 0
