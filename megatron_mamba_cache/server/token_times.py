"""When a job's tokens come: how long it was queued, to its first token, and from each token to the next."""

import time
from typing import Protocol

from .backend import Progress


class TokenTimes(Protocol):
    """Hears how long the tokens of replies take, in seconds."""

    def note_queued(self, seconds: float) -> None:
        """Note how long a reply waited, from its request's arrival to the first step that ran it."""

    def note_first_token(self, seconds: float) -> None:
        """Note how long a job waited for its first token, from the moment that the engine had it."""

    def note_gap(self, seconds: float, num_tokens: int) -> None:
        """Note that a reply grew by so many tokens so many seconds after it last did."""


class NoTokenTimes:
    """Hears nothing; see `TokenTimes`."""

    def note_queued(self, seconds: float) -> None:
        """Do nothing."""

    def note_first_token(self, seconds: float) -> None:
        """Do nothing."""

    def note_gap(self, seconds: float, num_tokens: int) -> None:
        """Do nothing."""


class JobTimes:
    """When things happened to a job, in seconds of the monotonic clock; None: not yet.

    Args:
        arrived: At the gate.
        hears: Told of the tokens as the engine tells of them, whether their client reads them or not.

    Attributes:
        started: Its prompts were read, and the engine is given them.
    """

    def __init__(self, arrived: float, hears: TokenTimes) -> None:
        self.arrived = arrived
        self.started = time.monotonic()
        self.first_token: float | None = None
        self.ended: float | None = None
        self._hears = hears
        self._grew: dict[int, float] = {}  # by choice

    def note_tokens(self, choice: int, progress: Progress) -> None:
        """Note the tokens that the engine has just told of."""
        now = time.monotonic()
        if choice in self._grew:
            self._hears.note_gap(now - self._grew[choice], len(progress.tokens))
        else:
            self._hears.note_queued(max(now - self.arrived - progress.running_s, 0.0))
        self._grew[choice] = now
        if self.first_token is None:
            self.first_token = now
            self._hears.note_first_token(now - self.started)
