"""A backend without an engine; the test controls its requests and deliveries."""

import asyncio
import itertools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from megatron_mamba_cache.grammars.compiler import Grammars
from megatron_mamba_cache.policy.request_settings import RequestSpec
from megatron_mamba_cache.server.backend import BackendState, Progress, Ticket


class ScriptedBackend:
    """A `Backend` whose requests make progress only when `deliver` is called.

    Attributes:
        asked: All requests submitted so far.
        running: Progress callbacks of the requests that have neither ended nor been cancelled.
    """

    max_sequence_length = 4096

    def __init__(self, state: BackendState | None = None, tokenizer: Any = None) -> None:
        self.grammars = Grammars(0 if tokenizer is None else tokenizer.vocab_size)
        self.grammars.read(tokenizer)
        self.state = state or BackendState(is_ready=True)
        self.asked: list[RequestSpec] = []
        self.running: dict[Ticket, Callable[[Progress], None]] = {}
        self.flushed: list[str | None] = []
        self._tickets = itertools.count()

    async def start(self) -> None:
        """Store the running event loop."""
        self._loop = asyncio.get_running_loop()

    def error_of(self, request: RequestSpec) -> str | None:
        """Check only the length of the request."""
        total = len(request.prompt) + request.max_tokens
        return None if total <= self.max_sequence_length else f"{total} tokens are more than max_sequence_length"

    def submit(self, request: RequestSpec, deliver: Callable[[Progress], None]) -> Ticket:
        """Store the request."""
        ticket = Ticket(next(self._tickets))
        self.asked.append(request)
        self.running[ticket] = deliver
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request."""
        self.running.pop(ticket, None)

    def fail_all(self, reason: str) -> None:
        """End every request with an error."""
        self._deliver(Progress(end="error", error=reason))

    async def flush(self, weights_version: str | None) -> None:
        """Record the flush."""
        self.flushed.append(weights_version)

    async def pause(self) -> None:
        """Report a pause."""
        self.state = replace(self.state, is_paused=True)

    async def resume(self) -> None:
        """Report no pause."""
        self.state = replace(self.state, is_paused=False)

    async def abort(self, tickets: Collection[Ticket]) -> None:
        """End the requests without further tokens."""
        for ticket in tickets:
            self.running.pop(ticket)(Progress(end="abort"))

    async def stop(self) -> None:
        """Do nothing."""

    def deliver(self, progress: Progress, times: int = 1) -> None:
        """Deliver the progress to every request from another thread, `times` times; wait until it is delivered."""

        async def hand_out() -> None:
            for _ in range(times):
                self._deliver(progress)

        asyncio.run_coroutine_threadsafe(hand_out(), self._loop).result(60)

    def _deliver(self, progress: Progress) -> None:
        for ticket, deliver in list(self.running.items()):
            if progress.end is not None:
                del self.running[ticket]
            deliver(progress)
