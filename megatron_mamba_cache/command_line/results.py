"""Results of a run: one record per request, totals, a comparison of two runs, and the output file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path

from ..metrics import CacheSnapshot
from .flag_sources import UsageError
from .prompts import PromptLine

_TOTALS = (
    *("prompt_tokens", "cached_tokens", "cached_tokens_from_host", "cached_tokens_from_disk", "computed_tokens"),
    *("generated_tokens", "seconds", "tokens_per_second", "mean_time_to_first_token_s"),
)
_RATES = ("acceptance_rate", "acceptance_at", "tokens_per_decode_row")


@dataclass(slots=True)
class RequestRecord:
    """Record of one request: its tokens, its times, and its error if it failed."""

    request_id: int
    prompt_tokens: list[int]
    generated_tokens: list[int] = field(default_factory=list)
    text: str = ""
    cached_tokens: int = 0  # prompt tokens found in the cache when the request was first admitted
    cached_tokens_from_host: int = 0  # cached tokens that were restored from host memory
    cached_tokens_from_disk: int = 0  # cached tokens that were restored from disk
    draft_tokens: int = 0  # number of verified draft tokens
    accepted_tokens: int = 0  # number of accepted draft tokens
    time_to_first_token_s: float | None = None  # seconds from adding the request; None without any token
    latency_s: float = 0.0  # seconds from adding the request to its end
    routed_experts: str | None = None  # .npy file in base64, if routes are recorded
    error: str | None = None

    def as_dict(self) -> dict[str, object]:
        """Return the record as JSON types, without tier counts that are 0, and routes or an error that is None."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        optional = ("cached_tokens_from_host", "cached_tokens_from_disk", "routed_experts", "error")
        return {name: value for name, value in found.items() if name not in optional or value}


@dataclass(frozen=True, slots=True)
class RunResult:
    """Results of a run: the records ordered by request id, the final cache snapshot, and the duration in seconds."""

    records: list[RequestRecord]
    cache: CacheSnapshot
    seconds: float

    @property
    def completed(self) -> list[RequestRecord]:
        """Records of the requests that ran without an error."""
        return [record for record in self.records if record.error is None]

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens in all completed requests."""
        return sum(len(record.prompt_tokens) for record in self.completed)

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that completed requests found in the cache when they were first admitted."""
        return sum(record.cached_tokens for record in self.completed)

    @property
    def cached_tokens_from_host(self) -> int:
        """Number of cached tokens that were restored from host memory."""
        return sum(record.cached_tokens_from_host for record in self.completed)

    @property
    def cached_tokens_from_disk(self) -> int:
        """Number of cached tokens that were restored from disk."""
        return sum(record.cached_tokens_from_disk for record in self.completed)

    @property
    def computed_tokens(self) -> int:
        """Number of tokens processed in prefill; tokens of evicted requests count each time they are processed."""
        return self.cache.counters.prefill_tokens_computed

    @property
    def generated_tokens(self) -> int:
        """Number of tokens generated for all requests."""
        return sum(len(record.generated_tokens) for record in self.records)

    @property
    def tokens_per_second(self) -> float:
        """Number of generated tokens per second over the whole run."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_time_to_first_token_s(self) -> float:
        """Mean time to first token over the completed requests, in seconds; 0 if there are none."""
        times = [record.time_to_first_token_s or 0.0 for record in self.completed]
        return sum(times) / len(times) if times else 0.0

    def summary(self) -> dict[str, object]:
        """Return the totals of the run and the cache counters as JSON types, by name."""
        return {
            "requests": len(self.records),
            "failed_requests": len(self.records) - len(self.completed),
            **{name: getattr(self, name) for name in _TOTALS},
            **self.cache.as_dict(),
            **{name: getattr(self.cache.counters, name) for name in _RATES},
        }


def together(results: Sequence[RunResult]) -> RunResult:
    """Combine the results of concurrent replicas: merge the records, sum the counters, and take the longest time."""
    records = sorted((record for result in results for record in result.records), key=lambda record: record.request_id)
    cache = CacheSnapshot.summed([result.cache for result in results])
    return RunResult(records, cache, max(result.seconds for result in results))


@dataclass(frozen=True, slots=True)
class Difference:
    """First difference between the outputs of two runs: the request, the position, and the token in each run."""

    request_id: int
    position: int
    cached: int | None
    uncached: int | None

    def __str__(self) -> str:
        return (
            f"request {self.request_id} is the first that differs: generated token {self.position} is {self.cached} "
            f"with the cache and {self.uncached} without"
        )


def first_difference(cached: RunResult, uncached: RunResult) -> Difference | None:
    """Return the first difference between the generated tokens of two runs; None if they are equal."""
    for ours, theirs in zip(cached.records, uncached.records, strict=True):
        for position, (token, other) in enumerate(zip_longest(ours.generated_tokens, theirs.generated_tokens)):
            if token != other:
                return Difference(ours.request_id, position, token, other)
    return None


@dataclass(frozen=True, slots=True)
class LaterTurns:
    """Number of prompt tokens, and how many came from the cache, in all turns of sessions after the first turn."""

    prompt_tokens: int
    cached_tokens: int

    @staticmethod
    def of(lines: Sequence[PromptLine], records: Sequence[RequestRecord]) -> "LaterTurns":
        """Sum over the completed lines that follow another line of their session; `records` has one record per line."""
        seen: set[str | int] = set()
        prompt_tokens = cached_tokens = 0
        for line, record in zip(lines, records, strict=True):
            if line.session in seen and record.error is None:
                prompt_tokens += len(record.prompt_tokens)
                cached_tokens += record.cached_tokens
            if line.session is not None:
                seen.add(line.session)
        return LaterTurns(prompt_tokens, cached_tokens)

    def __str__(self) -> str:
        share = 100 * self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
        return (
            f"from the second turn of a session on: skipped {self.cached_tokens} of {self.prompt_tokens} prompt tokens "
            f"({share:.1f} %)"
        )

    def as_dict(self) -> dict[str, object]:
        """Return the counts as JSON types, under the key "later_turns"."""
        return {"later_turns": {"prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens}}


def check_writable(path: str) -> None:
    """Raise `UsageError` if a file cannot be written at this path."""
    target = Path(path)
    try:
        existed = target.exists()
        with target.open("ab"):
            pass
        if not existed:
            target.unlink()
    except OSError as error:
        raise UsageError(f"--output-path {path} cannot be written: {error.strerror or error}") from error


def write_output(path: str, result: RunResult, **more_summary: object) -> None:
    """Write the records, the summary and `more_summary` to a JSON file; raise `UsageError` if that fails."""
    document = {
        "requests": [record.as_dict() for record in result.records],
        "summary": {**result.summary(), **more_summary},
    }
    try:
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output-path {path} cannot be written: {error.strerror or error}") from error
