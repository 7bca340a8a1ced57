"""uvicorn connections that detect disconnects promptly and close when a client stalls."""

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
    """uvicorn HTTP protocol that keeps reading while it sends a response, and thereby detects disconnects.

    Without this class, uvicorn stops reading if more bytes follow a request, and then does not notice a disconnect.
    This class also closes the connection if the client

    - sends more than 64 KiB of further requests before the current response is complete,
    - reads neither 256 KiB nor all of the pending output within `send_timeout_s`,
    - sends nothing after it connects, or takes longer than `body_timeout_s` to send the head of a request.

    When a connection closes, its open request ends as if the client had disconnected. The application finds a
    request's connection in `scope["state"]["connection"]`.

    Attributes:
        is_broken: True if the connection closed before a response was sent completely.
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
        """Start the keep-alive timeout on connect, so that it also covers the wait for the first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that asyncio calls `pause_writing` for any unread output
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers and report a disconnect to the open request."""
        self._head_timer.stop()
        self._read_timer.stop()
        self.is_broken |= exc is not None or self._is_responding
        self._settle_deliveries()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Mark the connection as broken if the client closes it while a response is in progress."""
        self.is_broken |= self._is_responding

    def abort(self) -> None:
        """Close the connection immediately and drop unread output."""
        self.is_broken = True
        self.transport.abort()

    def delivery(self) -> "asyncio.Future[bool]":
        """Return a future that is True once all output is in the kernel's buffer, False if the connection breaks."""
        future: asyncio.Future[bool] = self.loop.create_future()
        self._deliveries.append(future)
        is_written = not self.transport.is_closing() and not self.transport.get_write_buffer_size()
        if is_written or self.is_broken:
            self._settle_deliveries()  # if the transport is closing, `connection_lost` sets the result
        return future

    def handle_events(self) -> None:
        """Handle received HTTP events as uvicorn does, then resume reading."""
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
        """Start the timer that limits how slowly the client may read the pending output."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Stop the timer, because the client has read the pending output."""
        super().resume_writing()
        self._read_timer.stop()
        self._settle_deliveries()

    @property
    def _is_responding(self) -> bool:
        """True while the response to a request is incomplete."""
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
    """Timer that calls a function after a delay, unless it is stopped or restarted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        """True after `start`, until `stop`."""
        return self._handle is not None

    def start(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` after `seconds`; cancel any pending call."""
        self.stop()
        self._handle = self._loop.call_later(seconds, act)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
