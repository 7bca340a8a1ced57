"""A job's progress: what its reader has not read yet, and how long tokens take."""

import asyncio
import time
from dataclasses import replace

from .backend import Progress


class TokenTimes:
    """Records how long the tokens of replies take, in seconds; this class drops them."""

    def note_queued(self, seconds: float) -> None:
        """Record a reply's wait, from its request's arrival to the first step that ran it."""

    def note_first_token(self, seconds: float) -> None:
        """Record a job's wait for its first token, from its submission to the engine."""

    def note_gap(self, seconds: float, num_tokens: int) -> None:
        """Record that a reply grew by `num_tokens`, `seconds` after it last did."""


class JobTimes:
    """Times of a job's events, in seconds of the monotonic clock; None until they happen.

    Args:
        hears: Notified of tokens when the engine reports them, whether or not their client reads them.

    Attributes:
        started: When its prompts were read, just before they go to the engine.
        queue_seconds: Wait of its first reply to begin, from its arrival to the first step that ran it.
    """

    def __init__(self, arrived: float, hears: TokenTimes) -> None:
        self.arrived = arrived
        self.started = time.monotonic()
        self.queue_seconds: float | None = None
        self.first_token: float | None = None
        self.ended: float | None = None
        self._hears = hears
        self._grew: dict[int, float] = {}  # by choice

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
    """A queue that merges the waiting progress of each choice, so that a slow reader catches up at once."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Progress]] = {}
        self._has_some = asyncio.Event()

    def put(self, index: int, progress: Progress) -> None:
        """Add a step's progress of a choice."""
        self._waiting.setdefault(index, []).append(progress)
        self._has_some.set()

    async def take(self) -> tuple[int, Progress]:
        """Return the choice that has waited longest, and all of its waiting progress."""
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
