"""Run the server process; on SIGTERM, finish accepted requests and exit with status 0."""

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

# Clients keep idle connections open for less time, so they close first and never send a request to a closed one.
KEEP_ALIVE_S = 75
_BACKSTOP_S = 1.0
_READY_INTERVAL_S = 0.05


class DrainingServer(uvicorn.Server):
    """uvicorn server that lets accepted requests finish after SIGTERM or SIGINT.

    After the first signal, new requests get status 503 until all accepted requests have ended. Requests that are
    still unfinished after `drain_s`, or at a second signal, end with an error. Paused engines abort their requests.

    Args:
        on_listening: Called once the server accepts connections and handles signals.
        on_ready: Called once the engines are ready for requests, after `on_listening`.
        log_level: Minimum level for uvicorn's own log messages.
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
        """Context manager that handles SIGTERM and SIGINT in the event loop; does nothing outside the main thread."""
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
        """Start listening, then call `on_listening`; once the engines are ready, call `on_ready`."""
        await super().startup(sockets)
        self._on_listening()
        self._watch = asyncio.get_running_loop().create_task(self._tell_when_ready())

    def drain(self) -> None:
        """Refuse new requests and exit once accepted requests have ended; on a second call, end them with an error."""
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
        """Wait until all connections have closed, then cancel the drain timer."""
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
        """Wait until accepted requests have ended or `drain_s` has passed, then stop uvicorn."""
        seconds = self._served.settings.limits.drain_s
        try:
            await asyncio.wait_for(self._open_requests_end(), seconds)
        except TimeoutError:
            logger.warning("some requests are unfinished %g s after the signal; ending them with an error", seconds)
            self._served.end(f"the server was stopped, and the request was unfinished {seconds:g} s later")
        self.should_exit = True
        await asyncio.sleep(_BACKSTOP_S)
        self._abort_connections()

    async def _open_requests_end(self) -> None:
        """Abort the requests of paused engines, which can no longer be resumed; wait until all others have ended."""
        served = self._served
        if served.backend.state.is_paused:
            await served.backend.abort(served.rules.tickets_of(None))
        await served.app.open_requests_end()

    def _abort_connections(self) -> None:
        """Close all connections that are still open, because their clients do not read the responses."""
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Connection)
            connection.abort()
