"""Client connections that notice every disconnect and drop stalled clients."""

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from .limits import ServerLimits

_MOST_AHEAD = 64 * 2**10
_LEAST_READ = 256 * 2**10


class Connection(H11Protocol):
    """uvicorn's protocol, except that it keeps reading while it replies.

    uvicorn stops reading when bytes follow a request, and then misses a disconnect. This class also closes the
    connection of a client that

    - sends more than 64 KiB ahead of a reply,
    - reads less than 256 KiB, and less than all, of the pending output in `send_timeout_s`,
    - sends nothing at first, or takes longer than `body_timeout_s` for the head of a request.

    When a connection closes, its open request ends as if the client had disconnected. A request's scope has its
    connection as `scope["state"]["connection"]`.

    Attributes:
        is_broken: True if it closed before the client had all of a response.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ServerLimits,
    ) -> None:
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)
        self._limits = limits
        self._head_timer = _Timer(self.loop)
        self._read_timer = _Timer(self.loop)
        self._unread = 0
        self._deliveries: list[asyncio.Future[bool]] = []
        self.is_broken = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Apply the keep-alive timeout to the first byte too."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that any unread output is noticed
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the open request."""
        self._head_timer.stop()
        self._read_timer.stop()
        self.is_broken |= exc is not None or self._is_responding
        self._settle_deliveries()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Note if a response was in progress: the client does not get the rest."""
        self.is_broken |= self._is_responding

    def abort(self) -> None:
        """Close the connection at once and drop unread output."""
        self.is_broken = True
        self.transport.abort()

    def delivery(self) -> "asyncio.Future[bool]":
        """Return a future: True once the kernel has all output, False if the connection breaks."""
        future: asyncio.Future[bool] = self.loop.create_future()
        self._deliveries.append(future)
        is_written = not self.transport.is_closing() and not self.transport.get_write_buffer_size()
        if is_written or self.is_broken:
            self._settle_deliveries()  # else `connection_lost` reports an error of the last write
        return future

    def handle_events(self) -> None:
        """Handle received events and keep reading."""
        super().handle_events()
        num_ahead = len(self.conn.trailing_data[0])
        if self.conn.their_state is not h11.IDLE:
            self._head_timer.stop()
        elif num_ahead and not self._head_timer.is_running:
            self._head_timer.start(self._limits.body_timeout_s, self.abort)
        if self.conn.their_state is h11.DONE and num_ahead:
            if num_ahead > _MOST_AHEAD:
                self.abort()
            else:
                self.flow.resume_reading()

    def pause_writing(self) -> None:
        """Start the timer of a client that reads more slowly than the server writes."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Stop the timer of a client that has caught up."""
        super().resume_writing()
        self._read_timer.stop()
        self._settle_deliveries()

    @property
    def _is_responding(self) -> bool:
        """True while a request has no complete response."""
        return self.cycle is not None and not self.cycle.response_complete

    def _settle_deliveries(self) -> None:
        for future in self._deliveries:
            if not future.cancelled():
                future.set_result(not self.is_broken)
        self._deliveries.clear()

    def _watch_reader(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._read_timer.start(self._limits.send_timeout_s, self._check_reader)

    def _check_reader(self) -> None:
        if self._unread - self.transport.get_write_buffer_size() < _LEAST_READ:
            self.abort()
        else:
            self._watch_reader()


class _Timer:
    """Calls a function after a delay, unless stopped or restarted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        """True when a call has been scheduled and not stopped."""
        return self._handle is not None

    def start(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` after `seconds`, instead of any pending call."""
        self.stop()
        self._handle = self._loop.call_later(seconds, act)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
