"""State of each request next to Megatron's record; a part outlives the request for a while."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron.core.inference.inference_request import DynamicInferenceRequestRecord, Status

from ..policy.requests import Candidate, RunningRequest

_REMEMBERED_REQUESTS = 65_536


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Drafts of one request that steps verified, and how many of them were kept."""

    drafted: int = 0
    accepted: int = 0

    def plus(self, other: "DraftCounts") -> "DraftCounts":
        """Return the sum of both."""
        return DraftCounts(self.drafted + other.drafted, self.accepted + other.accepted)


@dataclass(frozen=True, slots=True)
class TierTokens:
    """Cached tokens of one request that came back for it from below the device."""

    from_host: int = 0
    from_disk: int = 0


@dataclass(slots=True)
class RequestState:
    """State of a request next to Megatron's record."""

    candidate: Candidate  # which waits, or waits again after an interruption
    cached_tokens: int | None = None  # prompt tokens skipped at its first admission
    tiers: TierTokens = TierTokens()  # of these
    draft_counts: DraftCounts = DraftCounts()  # over its whole life, evictions included
    admitted_at: float | None = None  # seconds of the monotonic clock, at its first admission; decides nothing
    running: RunningRequest | None = None  # the newest one, which may have left
    num_written_before: int = 0  # prompt tokens that earlier admissions wrote to the cache

    def admit(self, running: RunningRequest) -> None:
        """Note an admission; only the first one's cached tokens count."""
        if self.cached_tokens is None:
            self.cached_tokens = running.computed
            self.tiers = TierTokens(running.from_host, running.from_disk)
            self.admitted_at = time.monotonic()
        self.num_written_before = self.num_written
        self.running = running

    @property
    def age(self) -> int | None:
        """Order of its first admission; None before that."""
        return None if self.running is None else self.running.age

    @property
    def num_written(self) -> int:
        """Tokens of its prompt that were newly written to the cache."""
        return self.num_written_before + (0 if self.running is None else self.running.num_written)


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Counts of a request, also kept for a while after it has left."""

    cached_tokens: int = 0
    tiers: TierTokens = TierTokens()
    num_written: int = 0
    drafts: DraftCounts = DraftCounts()
    admitted_at: float | None = None

    @property
    def running_seconds(self) -> float:
        """Seconds since the first admission; 0 before that."""
        return 0.0 if self.admitted_at is None else time.monotonic() - self.admitted_at

    def as_mapping(self) -> dict[str, Any]:
        """Return the counts under the names that replies have for them."""
        return {
            "cached_tokens": self.cached_tokens,
            "cached_tokens_from_host": self.tiers.from_host,
            "cached_tokens_from_disk": self.tiers.from_disk,
            "written_tokens": self.num_written,
            "running_s": self.running_seconds,
            "draft_tokens": self.drafts.drafted,
            "accepted_tokens": self.drafts.accepted,
        }


class RequestStates(dict[int, RequestState]):
    """The states by request id."""

    def __init__(self) -> None:
        super().__init__()
        self._left: dict[int, RequestCounts] = {}  # oldest first

    def leave(self, request_id: int) -> None:
        """Keep only the counts of a request; nothing happens if it has left already."""
        if request_id not in self:
            return
        self._left[request_id] = self.counts_of(request_id)
        del self[request_id]
        while len(self._left) > _REMEMBERED_REQUESTS:
            del self._left[next(iter(self._left))]

    def counts_of(self, request_id: int) -> RequestCounts:
        """Return the counts of a request so far; zeros if it is forgotten."""
        state = self.get(request_id)
        if state is None:
            return self._left.get(request_id, RequestCounts())
        return RequestCounts(
            state.cached_tokens or 0, state.tiers, state.num_written, state.draft_counts, state.admitted_at
        )


def begin_next_part(record: DynamicInferenceRequestRecord) -> None:
    """Begin another part of the record of an interrupted request, unless the newest part has no token.

    The part only collects what is generated from here on: what runs is made from its spec.
    """
    if record[-1].generated_tokens:
        record.checkpoint()
        record[-1].status = Status.ACTIVE_AND_GENERATING_TOKENS
        # The record's first request has the prompt's log-probs.
        without_prompt = {"return_prompt_top_n_logprobs": False, "skip_prompt_log_probs": True}
        record[-1].sampling_params.add_attributes(without_prompt)
    else:
        record[-1].prompt_log_probs = record[-1].generated_log_probs = None
        record[-1].prompt_top_n_logprobs = record[-1].generated_top_n_logprobs = None


def complete_parts(record: DynamicInferenceRequestRecord) -> None:
    """Give the newest part of an interrupted request the lists that merging it with the earlier ones needs."""
    newest = record[-1]
    newest.tpot = newest.tpot or []
    for name in ("prompt_log_probs", "generated_log_probs", "prompt_top_n_logprobs", "generated_top_n_logprobs"):
        if getattr(newest, name) is None and getattr(record[0], name) is not None:
            setattr(newest, name, [])


def tokens_after(count: int, parts: Iterable[Any], name: str = "generated_tokens") -> list[Any]:
    """Return the generated tokens of a request's parts, in order, without the first `count`.

    Args:
        parts: Megatron's requests of a record.
        name: Name of their list, which has an entry for each generated token. None counts as empty.
    """
    found: list[Any] = []
    for part in parts:
        entries = getattr(part, name) or []
        found += entries[count:]
        count = max(count - len(entries), 0)
    return found
