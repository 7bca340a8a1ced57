"""Metrics of the cache: counters that only grow, and a snapshot of the memory in use."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from typing import Any


@dataclass(slots=True)
class CacheCounters:
    """Counts since the start; token counts are of prompt tokens unless they say otherwise."""

    requests_admitted: int = 0
    prompt_tokens_matched: int = 0  # KV known, state or not
    prompt_tokens_skipped: int = 0  # not computed, because a state was restored
    prefill_tokens_computed: int = 0  # including re-prefill after an eviction
    decode_tokens_computed: int = 0  # including drafts
    decode_rows: int = 0  # summed over all decode steps
    draft_tokens: int = 0
    accepted_tokens: int = 0  # drafts that were kept
    drafting_failures: int = 0  # steps that ran without drafts because the drafter raised
    drafts_at: list[int] = field(default_factory=list)  # draft tokens by position after the base token
    accepted_at: list[int] = field(default_factory=list)  # accepted ones likewise
    requests_without_hit: dict[str, int] = field(default_factory=dict)  # by reason, at first admissions
    states_reserved: int = 0
    states_published: int = 0
    decode_states_published: int = 0
    states_restored: int = 0
    states_skipped_no_room: int = 0
    admissions_deferred: int = 0  # steps a request waited for a prefix that another request was computing
    requests_paused: int = 0
    requests_evicted: int = 0
    prompt_tokens_from_host: int = 0  # of those skipped: they came back from the host for the request
    states_written_to_host: int = 0
    states_restored_from_host: int = 0
    states_not_written_no_room: int = 0
    host_writes_failed: int = 0  # or no longer of use when they ended
    host_restores_failed: int = 0  # likewise
    prompt_tokens_from_disk: int = 0  # likewise from the disk
    states_written_to_disk: int = 0
    states_read_from_disk: int = 0
    disk_writes_failed: int = 0
    disk_reads_failed: int = 0
    states_evicted: int = 0  # from memory dropped by a suspend; a snapshot adds those from current memory
    kv_blocks_evicted: int = 0  # likewise
    steps: int = 0
    graph_steps: int = 0  # of them, those that replayed a CUDA graph
    steps_aborted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafts that were accepted; 0 if nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_at(self) -> list[float]:
        """Acceptance rate at each position after the base token; a draft is accepted only if all before it are."""
        return [accepted / drafts for drafts, accepted in zip(self.drafts_at, self.accepted_at, strict=True)]

    @property
    def tokens_per_decode_row(self) -> float:
        """Average tokens that a decode step kept per request; 1 without drafts, 0 if nothing decoded."""
        return (self.decode_rows + self.accepted_tokens) / self.decode_rows if self.decode_rows else 0.0

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count a decode step of one request."""
        self.decode_rows += 1
        self.draft_tokens += num_drafts
        self.accepted_tokens += num_accepted
        for index in range(num_drafts):
            if index == len(self.drafts_at):
                self.drafts_at.append(0)
                self.accepted_at.append(0)
            self.drafts_at[index] += 1
            self.accepted_at[index] += index < num_accepted

    def count_without_hit(self, reason: str | None) -> None:
        """Count a request that skipped none of its prompt; None counts nothing."""
        if reason is not None:
            self.requests_without_hit[reason] = self.requests_without_hit.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """A snapshot of the cache: the counters so far and the use of every slot and block."""

    counters: CacheCounters
    state_slots: dict[str, int] = field(default_factory=dict)  # by owner
    kv_blocks: dict[str, int] = field(default_factory=dict)  # by kind
    cache_bytes: dict[str, int] = field(default_factory=dict)  # of this rank's memory for both, by use
    host_bytes: dict[str, int] = field(default_factory=dict)  # of this rank's part of the host tier, by use
    disk_bytes: dict[str, int] = field(default_factory=dict)  # of this rank's part of the disk tier, by use
    tier_copies: dict[str, int] = field(default_factory=dict)  # under way, by the tier that they bring something to
    num_compiled_kernels: int = 0  # by Triton in this process, for any purpose; those from its disk cache count
    compile_seconds: float = 0.0  # time spent on them
    num_graphs: int = 0  # step shapes captured as CUDA graphs
    capture_seconds: float = 0.0  # time spent on them
    graph_bytes: int = 0  # device memory that they hold

    @staticmethod
    def summed(snapshots: Sequence["CacheSnapshot"]) -> "CacheSnapshot":
        """Return the sum of several models' snapshots."""
        each = [one.as_dict() for one in snapshots]
        return CacheSnapshot.of_dict({name: _sum([values[name] for values in each]) for name in each[0]})

    @staticmethod
    def of_dict(values: dict[str, Any]) -> "CacheSnapshot":
        """Return the snapshot that `as_dict` returned as a dict."""
        names = {entry.name for entry in fields(CacheCounters)}
        counters = {name: value for name, value in values.items() if name in names}
        return CacheSnapshot(CacheCounters(**counters), **{n: v for n, v in values.items() if n not in names})

    def as_dict(self) -> dict[str, object]:
        """Return plain JSON types."""
        values = asdict(self)
        counters: dict[str, object] = values.pop("counters")
        return counters | values


def _sum(values: Sequence[Any]) -> Any:
    """Add numbers, lists element by element, or dicts key by key."""
    if isinstance(values[0], list):
        return [sum(index) for index in zip_longest(*values, fillvalue=0)]
    if isinstance(values[0], dict):
        total: Counter[str] = Counter()
        for value in values:
            total.update(value)
        return dict(total)
    return sum(values)
