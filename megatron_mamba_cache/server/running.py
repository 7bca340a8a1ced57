"""The server's process, which drains on SIGTERM and ends with status 0."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Generator
from functools import partial

import uvicorn

from .app import Server
from .connection import Connection
from .exchange import write_line

logger = logging.getLogger(__name__)

# Longer than clients keep idle connections, so that none is closed while a request is on its way.
KEEP_ALIVE_S = 75
_BACKSTOP_S = 1.0
_READY_INTERVAL_S = 0.05


class DrainingServer(uvicorn.Server):
    """uvicorn, except that SIGTERM and SIGINT let accepted requests finish.

    After the first signal, new requests are refused with 503, on old and new connections, until the accepted ones have
    ended. Those not done `drain_s` later, or at a second signal, end with an error.

    Args:
        on_listening: Called once connections and signals are handled.
        on_ready: Called after that, once requests are accepted.
        log_level: Lowest level of uvicorn's own messages.
    """

    def __init__(
        self,
        server: Server,
        on_listening: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
        log_level: str = "warning",
    ) -> None:
        config = uvicorn.Config(
            server.app,
            http=partial(Connection, limits=server.settings.limits),  # type: ignore[arg-type]
            log_level=log_level,
            access_log=False,
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=None,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        super().__init__(config)
        self._served = server
        self._on_listening = on_listening
        self._on_ready = on_ready
        self._watch: asyncio.Task[None] | None = None
        self._drain: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle signals in the event loop while the block runs, if this is the main thread."""
        loop = asyncio.get_running_loop()
        handled = []
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                loop.add_signal_handler(number, self.drain)
                handled.append(number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, as uvicorn does, then call `on_listening`, and `on_ready` when the engines are."""
        await super().startup(sockets)
        self._on_listening()
        self._watch = asyncio.get_running_loop().create_task(self._tell_when_ready())

    def drain(self) -> None:
        """Refuse new requests and stop once the accepted ones end; a second call ends them at once."""
        if self._drain is None:
            self._served.drain()
            if num_open := self._served.app.num_open:
                seconds = self._served.settings.limits.drain_s
                write_line(f"stopping: {num_open} requests may continue for {seconds:g} s")
            self._drain = asyncio.get_running_loop().create_task(self._end_in_time())
        else:
            self._served.end("the server was stopped")
            asyncio.get_running_loop().call_later(_BACKSTOP_S, self._abort_connections)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the connections as uvicorn does, without the rest of the drain time."""
        try:
            await super().shutdown(sockets)
        finally:
            for task in (self._watch, self._drain):
                if task is not None:
                    task.cancel()

    async def _tell_when_ready(self) -> None:
        while not self._served.backend.state.is_ready:
            await asyncio.sleep(_READY_INTERVAL_S)
        self._on_ready()

    async def _end_in_time(self) -> None:
        """Wait for the accepted requests, then let uvicorn stop; until then it accepts connections."""
        seconds = self._served.settings.limits.drain_s
        try:
            await asyncio.wait_for(self._served.app.open_requests_end(), seconds)
        except TimeoutError:
            logger.warning("requests that are unfinished %g s after the signal end with an error", seconds)
            self._served.end(f"the server was stopped, and the request was unfinished {seconds:g} s later")
        self.should_exit = True
        await asyncio.sleep(_BACKSTOP_S)
        self._abort_connections()

    def _abort_connections(self) -> None:
        """Close the connections of clients that do not read their responses."""
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Connection)
            connection.abort()
