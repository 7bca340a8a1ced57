"""What the cache did so far: counters that only grow, and a snapshot of what is in use."""

from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class CacheCounters:
    """Counts since the start; token counts are prompt tokens unless they say otherwise."""

    requests_admitted: int = 0
    prompt_tokens_matched: int = 0  # KV known, state or not
    prompt_tokens_skipped: int = 0  # not computed, because a state was restored
    prefill_tokens_computed: int = 0  # re-prefill after an eviction included
    decode_tokens_computed: int = 0
    states_reserved: int = 0
    states_published: int = 0
    states_restored: int = 0
    states_skipped_no_room: int = 0
    admissions_deferred: int = 0  # steps a request waited for a prefix that another was computing
    requests_paused: int = 0
    requests_evicted: int = 0
    states_evicted: int = 0  # from memory that a suspend has dropped; a snapshot adds the present one's
    kv_blocks_evicted: int = 0  # likewise
    steps: int = 0
    steps_aborted: int = 0


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """One look at the cache: the counters so far and what every slot and block is used for."""

    counters: CacheCounters
    state_slots: dict[str, int] = field(default_factory=dict)  # by owner
    kv_blocks: dict[str, int] = field(default_factory=dict)  # by kind

    def as_dict(self) -> dict[str, object]:
        """Return plain JSON types."""
        return {
            **asdict(self.counters),
            "state_slots": dict(self.state_slots),
            "kv_blocks": dict(self.kv_blocks),
        }
