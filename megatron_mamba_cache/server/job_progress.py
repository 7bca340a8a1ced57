"""A job's progress: unread tokens, token counts and times."""

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

from ..policy.request_settings import RequestSpec
from .backend import Progress

_HOUR_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptUsage:
    """Prompt token counts; each prompt counts once, however many choices it has."""

    cached_tokens: int  # number of prompt tokens that needed no prefill
    cached_tokens_from_host: int  # number of cached tokens restored from host memory
    cached_tokens_from_disk: int  # number of cached tokens restored from disk
    written_tokens: int  # number of prompt tokens added to the cache
    hour_tokens: int  # number of written tokens before a breakpoint whose `ttl` is at least an hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage(PromptUsage):
    """Token counts for an HTTP request."""

    prompt_tokens: int
    completion_tokens: int
    draft_tokens: int  # number of verified draft tokens, over all choices
    accepted_tokens: int  # number of accepted draft tokens, over all choices
    reasoning_tokens: int  # number of completion tokens parsed as reasoning

    @property
    def by_tier(self) -> dict[str, int]:
        """Numbers of cached tokens restored from host memory and disk; added to the API's usage objects."""
        return {
            "cached_tokens_from_host": self.cached_tokens_from_host,
            "cached_tokens_from_disk": self.cached_tokens_from_disk,
        }

    def body(self) -> dict[str, Any]:
        """Return OpenAI's usage object, extended with `draft_tokens` and the fields of `by_tier`."""
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
    """Return the counts for one request's prompt; tokens that are prefilled again after a preemption count once."""
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
    """Interface for recording token latencies, in seconds; this base class ignores them."""

    def note_queued(self, seconds: float) -> None:
        """Record the time between a request's arrival and a reply's first step."""

    def note_first_token(self, seconds: float) -> None:
        """Record the time between a job's submission and its first token."""

    def note_gap(self, seconds: float, num_tokens: int) -> None:
        """Record `num_tokens` new tokens of a reply, `seconds` after the reply's previous tokens."""


class JobTimes:
    """Times of a job's events on the monotonic clock, in seconds; each is None before its event.

    Args:
        recorder: Receives token latencies when the engine reports the tokens, before the client reads them.

    Attributes:
        started: Time after tokenization, just before submission to the engine.
        queue_seconds: Duration from the request's arrival to the first step of the first reply to produce tokens.
    """

    def __init__(self, arrived: float, recorder: TokenTimes) -> None:
        self.arrived = arrived
        self.started = time.monotonic()
        self.queue_seconds: float | None = None
        self.first_token: float | None = None
        self.ended: float | None = None
        self._recorder = recorder
        self._grew: dict[int, float] = {}  # time of the latest tokens, by choice index

    def note_tokens(self, choice: int, progress: Progress) -> None:
        """Record the latency of tokens that the engine has just reported."""
        now = time.monotonic()
        if choice in self._grew:
            self._recorder.note_gap(now - self._grew[choice], len(progress.tokens))
        else:
            queued = max(now - self.arrived - progress.running_s, 0.0)
            self._recorder.note_queued(queued)
            if self.queue_seconds is None:
                self.queue_seconds = queued
        self._grew[choice] = now
        if self.first_token is None:
            self.first_token = now
            self._recorder.note_first_token(now - self.started)


class Mail:
    """Asynchronous queue of `Progress` entries; merges the unread entries of each choice."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Progress]] = {}
        self._has_some = asyncio.Event()

    def put(self, index: int, progress: Progress) -> None:
        """Add the progress that a choice made in one step."""
        self._waiting.setdefault(index, []).append(progress)
        self._has_some.set()

    async def take(self) -> tuple[int, Progress]:
        """Wait for an entry; return the index of the choice with the oldest unread entry, and its entries merged."""
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
