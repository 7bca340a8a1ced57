"""Progress of a job: unread tokens, token counts and times."""

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

from ..policy.request_settings import RequestSpec
from .backend import Progress

_HOUR_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptUsage:
    """Counts of prompt tokens, taken from the first choice of each prompt."""

    cached_tokens: int  # prompt tokens skipped
    cached_tokens_from_host: int  # number of cached tokens restored from host memory
    cached_tokens_from_disk: int  # number of cached tokens restored from disk
    written_tokens: int  # prompt tokens added to the cache
    hour_tokens: int  # number of written tokens before a breakpoint with a TTL of an hour or more


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage(PromptUsage):
    """Token counts for an HTTP request."""

    prompt_tokens: int
    completion_tokens: int
    draft_tokens: int  # draft tokens verified, over all choices
    accepted_tokens: int  # draft tokens accepted, over all choices
    reasoning_tokens: int  # completion tokens that were parsed as reasoning

    @property
    def by_tier(self) -> dict[str, int]:
        """Number of cached tokens restored from each tier; an extension of every API's usage object."""
        return {
            "cached_tokens_from_host": self.cached_tokens_from_host,
            "cached_tokens_from_disk": self.cached_tokens_from_disk,
        }

    def body(self) -> dict[str, Any]:
        """Return OpenAI's usage object, with `draft_tokens` and the tiers as extensions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cache_write_tokens": self.written_tokens,
                **self.by_tier,
            },
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.draft_tokens - self.accepted_tokens,
                "draft_tokens": self.draft_tokens,
            },
        }


def prompt_usage(spec: RequestSpec, latest: Progress) -> PromptUsage:
    """Return the counts for a request's prompt; a prompt that runs again counts once."""
    written = min(latest.written_tokens, spec.prompt_len - latest.cached_tokens)
    ends = [mark.position for mark in spec.breakpoints if mark.keep_s >= _HOUR_S]
    of_hour = max(max(ends, default=0) - latest.cached_tokens, 0)
    return PromptUsage(
        cached_tokens=latest.cached_tokens,
        cached_tokens_from_host=latest.cached_tokens_from_host,
        cached_tokens_from_disk=latest.cached_tokens_from_disk,
        written_tokens=written,
        hour_tokens=min(of_hour, written),
    )


class TokenTimes:
    """Receiver of token latencies, in seconds; this base class ignores them."""

    def note_queued(self, seconds: float) -> None:
        """Record how long a reply waited between its arrival and its first step."""

    def note_first_token(self, seconds: float) -> None:
        """Record the time between a job's submission and its first token."""

    def note_gap(self, seconds: float, num_tokens: int) -> None:
        """Record that a reply grew by `num_tokens`, `seconds` after its previous tokens."""


class JobTimes:
    """Times of a job's events on the monotonic clock, in seconds; None before the event.

    Args:
        hears: Notified when the engine reports tokens, even if the client has not read them yet.

    Attributes:
        started: Time just before the job is submitted to the engine, after its prompts were read.
        queue_seconds: Time between the request's arrival and the first step of its first reply.
    """

    def __init__(self, arrived: float, hears: TokenTimes) -> None:
        self.arrived = arrived
        self.started = time.monotonic()
        self.queue_seconds: float | None = None
        self.first_token: float | None = None
        self.ended: float | None = None
        self._hears = hears
        self._grew: dict[int, float] = {}  # time of the latest tokens, by choice

    def note_tokens(self, choice: int, progress: Progress) -> None:
        """Record the tokens that the engine has just reported."""
        now = time.monotonic()
        if choice in self._grew:
            self._hears.note_gap(now - self._grew[choice], len(progress.tokens))
        else:
            queued = max(now - self.arrived - progress.running_s, 0.0)
            self._hears.note_queued(queued)
            if self.queue_seconds is None:
                self.queue_seconds = queued
        self._grew[choice] = now
        if self.first_token is None:
            self.first_token = now
            self._hears.note_first_token(now - self.started)


class Mail:
    """A queue that merges the unread progress of each choice."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Progress]] = {}
        self._has_some = asyncio.Event()

    def put(self, index: int, progress: Progress) -> None:
        """Add the progress that a choice made in one step."""
        self._waiting.setdefault(index, []).append(progress)
        self._has_some.set()

    async def take(self) -> tuple[int, Progress]:
        """Wait for progress; return the choice with the oldest unread progress, and all of its progress merged."""
        await self._has_some.wait()
        index = next(iter(self._waiting))
        progress = _joined(self._waiting.pop(index))
        if not self._waiting:
            self._has_some.clear()
        return index, progress


def _joined(parts: list[Progress]) -> Progress:
    first, last = parts[0], parts[-1]
    return replace(
        last,
        tokens=tuple(token for part in parts for token in part.tokens),
        log_probs=tuple(value for part in parts for value in part.log_probs),
        alternatives=tuple(best for part in parts for best in part.alternatives),
        prompt_log_probs=first.prompt_log_probs,
        prompt_alternatives=first.prompt_alternatives,
        prompt_scores=first.prompt_scores,
    )
