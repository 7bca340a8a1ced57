"""A job's latencies: in the queue, to its first token, and from each token to the next."""

import time
from typing import Protocol

from .backend import Progress


class TokenTimes(Protocol):
    """Records how long the tokens of replies take, in seconds."""

    def note_queued(self, seconds: float) -> None:
        """Record a reply's wait, from its request's arrival to the first step that ran it."""

    def note_first_token(self, seconds: float) -> None:
        """Record a job's wait for its first token, from its submission to the engine."""

    def note_gap(self, seconds: float, num_tokens: int) -> None:
        """Record that a reply grew by `num_tokens`, `seconds` after it last did."""


class NoTokenTimes:
    """Records nothing; see `TokenTimes`."""

    def note_queued(self, seconds: float) -> None:
        """Do nothing."""

    def note_first_token(self, seconds: float) -> None:
        """Do nothing."""

    def note_gap(self, seconds: float, num_tokens: int) -> None:
        """Do nothing."""


class JobTimes:
    """Times of a job's events, in seconds of the monotonic clock; None until they happen.

    Args:
        arrived: When it reached the gate.
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
