"""A client's connection: uvicorn's, but its end is always noticed, and it is not kept for one that does nothing."""

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
    """uvicorn's protocol, which stops reading when bytes follow a request, and then cannot see that the client leaves.

    This one reads on. It closes the connection of a client that

    - sends more than 64 KiB ahead of a reply,
    - takes less than 256 KiB, and less than all there is, of what is sent to it in `send_timeout_s`,
    - sends nothing at first, or takes longer than `body_timeout_s` for the head of a request.

    An open request of a connection that closes ends as if its client had left.
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
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._head_timer = _Timer(self.loop)
        self._read_timer = _Timer(self.loop)
        self._unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first byte as long as between two requests."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that whatever stays unread is noticed
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the open request."""
        self._head_timer.stop()
        self._read_timer.stop()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle what has come, and read on."""
        super().handle_events()
        num_ahead = len(self.conn.trailing_data[0])
        if self.conn.their_state is not h11.IDLE:
            self._head_timer.stop()
        elif num_ahead and not self._head_timer.is_running:
            self._head_timer.start(self._limits.body_timeout_s, self.transport.abort)
        if self.conn.their_state is h11.DONE and num_ahead:
            if num_ahead > _MOST_AHEAD:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def pause_writing(self) -> None:
        """Note that the client does not read as fast as it is sent to."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Note that the client has read."""
        super().resume_writing()
        self._read_timer.stop()

    def _watch_reader(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._read_timer.start(self._limits.send_timeout_s, self._check_reader)

    def _check_reader(self) -> None:
        if self._unread - self.transport.get_write_buffer_size() < _LEAST_READ:
            self.transport.abort()
        else:
            self._watch_reader()


class _Timer:
    """Calls something later, unless it is stopped or started anew."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        """Whether the call is still to come."""
        return self._handle is not None

    def start(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` in so many seconds."""
        self.stop()
        self._handle = self._loop.call_later(seconds, act)

    def stop(self) -> None:
        """Call nothing."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
