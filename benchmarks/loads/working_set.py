"""Working set of a cache: the entries that were used again later."""

from dataclasses import dataclass, field
from itertools import accumulate

from loads.served_load import Observer

from megatron_mamba_cache.policy.identifiers import BlockId
from megatron_mamba_cache.policy.prefix_cache import PrefixCache
from megatron_mamba_cache.policy.requests import RunningRequest


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Peak numbers over time: blocks held by requests, and blocks and states that were used again later."""

    running_blocks: int
    cached_blocks: int
    cached_states: int


@dataclass(slots=True)
class _Span:
    first: int
    last: int


@dataclass(slots=True)
class WorkingSetObserver(Observer):
    """Observer that computes the working set of a cache that evicts nothing, so that each block id means one block."""

    _now: int = 0
    _running: int = 0
    _blocks: dict[BlockId, _Span] = field(default_factory=dict)
    _states: dict[BlockId, _Span] = field(default_factory=dict)

    def admitted(self, request: RunningRequest) -> None:
        """Record which blocks and which state the request uses."""
        for block in request.block_ids[: request.num_shared_blocks]:
            self._use(self._blocks, block)
        if request.source_block is not None:
            self._use(self._states, request.source_block)

    def released(self, request: RunningRequest) -> None:
        """Record which blocks the request held."""
        for block in request.block_ids:
            self._use(self._blocks, block)

    def stepped(self, cache: PrefixCache) -> None:
        """Record which states are new."""
        self._now += 1
        self._running = max(self._running, cache.kv.num_referenced)
        for block in cache.slots.cached_blocks():
            self._states.setdefault(block, _Span(self._now, self._now))

    def working_set(self) -> WorkingSet:
        """Return the peak sizes so far."""
        return WorkingSet(self._running, _most_at_once(self._blocks), _most_at_once(self._states))

    def _use(self, spans: dict[BlockId, _Span], block: BlockId) -> None:
        spans.setdefault(block, _Span(self._now, self._now)).last = self._now


def _most_at_once(spans: dict[BlockId, _Span]) -> int:
    used_again = [span for span in spans.values() if span.last > span.first]
    changes = sorted([(span.first, 1) for span in used_again] + [(span.last, -1) for span in used_again])
    return max(accumulate(change for _, change in changes), default=0)
