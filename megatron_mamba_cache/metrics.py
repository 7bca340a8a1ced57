"""Metrics of the cache: counters that only increase, and a snapshot of the counters and the memory in use."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from typing import Any


@dataclass(slots=True)
class CacheCounters:
    """Counters of a cache since its creation, from which metrics and reports are derived."""

    requests_admitted: int = 0
    prompt_tokens_matched: int = 0  # prompt tokens with cached KV, with or without a state
    prompt_tokens_skipped: int = 0  # prompt tokens that needed no prefill because a request started from a cached state
    prefill_tokens_computed: int = 0  # processed prompt tokens, including repeated prefills after an eviction
    decode_tokens_computed: int = 0  # including drafts
    decode_rows: int = 0  # number of decode requests, summed over steps
    draft_tokens: int = 0
    accepted_tokens: int = 0  # number of draft tokens that were accepted
    unlisted_tokens: int = 0  # draft tokens rejected for a token that is not in the drafter's short list
    drafting_failures: int = 0  # number of steps without drafts because the drafter raised
    drafts_at: list[int] = field(default_factory=list)  # number of draft tokens at each position after the base token
    accepted_at: list[int] = field(default_factory=list)  # number of accepted draft tokens at each position
    requests_without_hit: dict[str, int] = field(
        default_factory=dict
    )  # first admissions without a cache hit, by reason
    states_reserved: int = 0
    states_published: int = 0
    decode_states_published: int = 0
    states_restored: int = 0
    states_skipped_no_room: int = 0
    admissions_deferred: int = 0  # number of times a request waited a step for another request's prefix
    requests_paused: int = 0
    requests_evicted: int = 0
    prompt_tokens_from_host: int = 0  # skipped prompt tokens whose state was restored from the host
    states_written_to_host: int = 0
    states_restored_from_host: int = 0
    states_not_written_no_room: int = 0
    host_writes_failed: int = 0  # number of writes to the host that failed or were cancelled
    host_restores_failed: int = 0  # number of restores from the host that failed or were cancelled
    prompt_tokens_from_disk: int = 0  # skipped prompt tokens whose state was restored from disk
    states_written_to_disk: int = 0
    states_read_from_disk: int = 0
    disk_writes_failed: int = 0
    disk_reads_failed: int = 0
    states_evicted: int = 0  # evictions before the last suspend that freed the memory; a snapshot adds later ones
    kv_blocks_evicted: int = 0  # same convention as `states_evicted`
    steps: int = 0
    graph_steps: int = 0  # number of steps that replayed a CUDA graph
    steps_aborted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Fraction of the draft tokens that were accepted; 0 without drafts."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_at(self) -> list[float]:
        """Fraction of the draft tokens accepted at each position after the base token.

        A draft token is accepted only if all earlier drafts in the step are accepted.
        """
        return [accepted / drafts for drafts, accepted in zip(self.drafts_at, self.accepted_at, strict=True)]

    @property
    def tokens_per_decode_row(self) -> float:
        """Average number of tokens that a decode step adds to a request; 0 without decode steps."""
        return (self.decode_rows + self.accepted_tokens) / self.decode_rows if self.decode_rows else 0.0

    def count_drafts(self, num_drafts: int, num_accepted: int, num_rows: int = 1) -> None:
        """Count a decode step of `num_rows` requests that have the same numbers of draft and accepted draft tokens."""
        self.decode_rows += num_rows
        self.draft_tokens += num_drafts * num_rows
        self.accepted_tokens += num_accepted * num_rows
        for index in range(num_drafts):
            if index == len(self.drafts_at):
                self.drafts_at.append(0)
                self.accepted_at.append(0)
            self.drafts_at[index] += num_rows
            self.accepted_at[index] += num_rows * (index < num_accepted)

    def count_without_hit(self, reason: str | None) -> None:
        """Count a request without a cache hit under a reason; do nothing if `reason` is None."""
        if reason is not None:
            self.requests_without_hit[reason] = self.requests_without_hit.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """Snapshot of a cache's counters, of the use of its slots, blocks and tiers, and of kernels and CUDA graphs."""

    counters: CacheCounters
    state_slots: dict[str, int] = field(default_factory=dict)  # by owner
    kv_blocks: dict[str, int] = field(default_factory=dict)  # by kind
    cache_bytes: dict[str, int] = field(default_factory=dict)  # bytes in this rank's KV and state memory, by use
    host_bytes: dict[str, int] = field(default_factory=dict)  # bytes in this rank's part of the host tier, by use
    disk_bytes: dict[str, int] = field(default_factory=dict)  # bytes in this rank's part of the disk tier, by use
    tier_copies: dict[str, int] = field(default_factory=dict)  # number of copies in flight, by destination tier
    num_compiled_kernels: int = 0  # number of kernels compiled or loaded from Triton's disk cache
    compile_seconds: float = 0.0  # time spent on them
    num_graphs: int = 0  # number of step shapes captured as CUDA graphs
    capture_seconds: float = 0.0  # time spent on them
    graph_bytes: int = 0  # bytes of device memory used by CUDA graphs

    @staticmethod
    def summed(snapshots: Sequence["CacheSnapshot"]) -> "CacheSnapshot":
        """Return a snapshot in which each value is the sum over the given snapshots, e.g. of several replicas."""
        each = [one.as_dict() for one in snapshots]
        return CacheSnapshot.of_dict({name: _sum([values[name] for values in each]) for name in each[0]})

    @staticmethod
    def of_dict(values: dict[str, Any]) -> "CacheSnapshot":
        """Create a snapshot from a dict that `as_dict` returned."""
        names = {entry.name for entry in fields(CacheCounters)}
        counters = {name: value for name, value in values.items() if name in names}
        return CacheSnapshot(CacheCounters(**counters), **{n: v for n, v in values.items() if n not in names})

    def as_dict(self) -> dict[str, object]:
        """Return the snapshot, including the counters, as one flat dict of JSON-serializable values."""
        values = asdict(self)
        counters: dict[str, object] = values.pop("counters")
        return counters | values


def _sum(values: Sequence[Any]) -> Any:
    """Add values of one type: numbers, lists element by element, or dicts key by key."""
    if isinstance(values[0], list):
        return [sum(index) for index in zip_longest(*values, fillvalue=0)]
    if isinstance(values[0], dict):
        total: Counter[str] = Counter()
        for value in values:
            total.update(value)
        return dict(total)
    return sum(values)
