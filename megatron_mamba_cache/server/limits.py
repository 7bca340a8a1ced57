"""A server's limits, and admission control for its queue."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .errors import ApiError

_MOST_RETRY_AFTER_S = 60
_REMEMBERED_ENDS = 64


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits on a server's queues, bodies, times and memory; raises `ValueError` if a limit is out of range."""

    max_running: int = 16  # maximum number of requests that run concurrently
    max_queued: int = 1024  # maximum number of queued requests; each choice of each prompt counts as one
    max_choices: int = 1024  # maximum number of prompts times n in one HTTP request
    max_body_bytes: int = 4 * 2**20  # maximum size of one request body
    max_buffered_bytes: int = 64 * 2**20  # memory for the bodies of unanswered requests; divided equally among API keys
    body_timeout_s: float = 30.0  # maximum time to receive a request's head, and then its body
    send_timeout_s: float = 30.0  # maximum time for a client to read 256 KiB or all of the pending output
    drain_s: float = 25.0  # time for accepted requests to finish after SIGTERM
    transcript_bytes: int = 16 * 2**20  # memory per API key for the token ids of earlier prompts and replies
    response_bytes: int = 16 * 2**20  # memory per API key for stored responses

    def __post_init__(self) -> None:
        for name, least in (("max_running", 1), ("max_choices", 1), ("max_body_bytes", 1024), ("max_queued", 0)):
            self._require(name, getattr(self, name) >= least, f"at least {least}")
        self._require("max_buffered_bytes", self.max_buffered_bytes >= self.max_body_bytes, "at least max_body_bytes")
        for name in ("transcript_bytes", "response_bytes"):
            self._require(name, getattr(self, name) >= 0, "0 (off) or more")
        for name in ("body_timeout_s", "send_timeout_s", "drain_s"):
            self._require(name, 0 < getattr(self, name) < math.inf, "a positive number of seconds")

    def _require(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {allowed}")


class QueueGate:
    """Admission control: counts running and queued requests, and refuses requests beyond the limit."""

    def __init__(self, limits: ServerLimits, clock: Callable[[], float]) -> None:
        self._most = limits.max_running + limits.max_queued
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_REMEMBERED_ENDS)
        self.num_inside = 0
        self.num_refused = 0

    def enter(self, count: int) -> "QueuePermits":
        """Admit `count` requests and return their permits.

        Raises:
            ApiError: 429 if there is currently no room for `count` more requests, 400 if `count` exceeds the limit.
        """
        if count > self._most:
            raise ApiError(
                400,
                f"the request has {count} choices (prompts times n), but at most {self._most} may run or be queued; "
                "send fewer choices, or raise --max-queued-requests",
                param="n",
            )
        if self.num_inside + count > self._most:
            self.num_refused += 1
            raise ApiError(
                429,
                f"{self.num_inside} requests are running or queued, and the limit is {self._most}; try again later",
                code="rate_limit_exceeded",
                retry_after_s=self.retry_after_s(),
            )
        self.num_inside += count
        return QueuePermits(self, count)

    def leave(self) -> None:
        """Count one admitted request as ended."""
        self.num_inside -= 1
        self._ends.append(self._clock())

    def retry_after_s(self) -> int:
        """Return the estimated time until a tenth of the admitted requests have ended, in seconds."""
        if len(self._ends) < 2 or self._clock() <= self._ends[0]:
            return 1
        rate = len(self._ends) / (self._clock() - self._ends[0])
        return max(1, min(math.ceil(self.num_inside / 10 / rate), _MOST_RETRY_AFTER_S))


class QueuePermits:
    """Queue permits for one HTTP request; a context manager that releases the remaining permits on exit."""

    def __init__(self, gate: QueueGate, count: int) -> None:
        self._gate = gate
        self._count = count

    def leave(self) -> None:
        """Release one permit."""
        self._count -= 1
        self._gate.leave()

    def __enter__(self) -> "QueuePermits":
        return self

    def __exit__(self, *_error: object) -> None:
        while self._count:
            self.leave()
