"""The same requests with and without the cache: same tokens, less computed."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from .results import RequestRecord, RunResult


@dataclass(frozen=True, slots=True)
class Difference:
    """The first request whose outputs differ, and where."""

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
    """Return the first difference between the generated tokens of two runs of the same lines; None if there is none."""
    for ours, theirs in zip(cached.records, uncached.records, strict=True):
        if ours.generated_tokens != theirs.generated_tokens:
            return _difference(ours, theirs)
    return None


def comparison_lines(cached: RunResult, uncached: RunResult) -> Iterator[str]:
    """Yield a small table of what the cache saved."""
    rows = (
        ("", "with cache", "without"),
        ("prompt tokens computed", str(cached.computed_tokens), str(uncached.computed_tokens)),
        (
            "mean time to first token",
            f"{cached.mean_time_to_first_token_s:.3f} s",
            f"{uncached.mean_time_to_first_token_s:.3f} s",
        ),
        ("whole run", f"{cached.seconds:.2f} s", f"{uncached.seconds:.2f} s"),
    )
    for name, ours, theirs in rows:
        yield f"{name:<24}  {ours:>10}  {theirs:>10}"


def _difference(ours: RequestRecord, theirs: RequestRecord) -> Difference:
    pairs = enumerate(zip_longest(ours.generated_tokens, theirs.generated_tokens))
    position, (cached, uncached) = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
    return Difference(ours.request_id, position, cached, uncached)
