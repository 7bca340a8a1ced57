"""The outermost layer of the application: every request gets an id, is counted, and is logged when it ends."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .connection import Connection
from .errors import is_of_anthropic, unexpected
from .exchange import CLIENT_CLOSED_REQUEST, AccessLog, Exchange

_NOT_SERVED = ("refused", "failed", "left by clients", "cut off")


class Entrance:
    """ASGI middleware around everything else; stores the exchange as `scope["exchange"]`.

    A request ends when the client's socket has the last byte of its response, or when the client has left.

    Args:
        on_end: Called with each exchange that has ended, probes included.
    """

    def __init__(self, app: ASGIApp, log: AccessLog, on_end: Callable[[Exchange], None]) -> None:
        self._app = app
        self._log = log
        self._on_end = on_end
        self._open: dict[int, Exchange] = {}
        self._some_ended = asyncio.Event()
        self._counts: Counter[str] = Counter()
        self._began = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = scope["exchange"] = Exchange.of_scope(scope)
        response = _Response(exchange, scope.get("state", {}).get("connection"), send)
        self._open[id(exchange)] = exchange
        try:
            await self._app(scope, receive, response.send)
        finally:
            await response.end()
            self._end(exchange)

    def cut_off(self) -> None:
        """Mark all open requests as cut off by the server's end."""
        for exchange in self._open.values():
            exchange.is_cut_off = True

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended, excluding probes."""
        return sum(not exchange.is_probe for exchange in self._open.values())

    async def open_requests_end(self) -> None:
        """Wait until the requests that are open now have ended, excluding probes; later ones do not count."""
        waiting = [exchange for exchange in self._open.values() if not exchange.is_probe]
        while any(exchange.ended is None for exchange in waiting):
            self._some_ended.clear()
            await self._some_ended.wait()

    def summary(self) -> str:
        """Return the server's uptime and the outcomes of its requests."""
        others = ", ".join(f"{self._counts[kind]} {kind}" for kind in _NOT_SERVED)
        seconds = time.monotonic() - self._began
        return f"stopped after {seconds:.1f} s: {self._counts['served']} requests served, {others}"

    def _end(self, exchange: Exchange) -> None:
        exchange.ended = time.monotonic()
        del self._open[id(exchange)]
        self._some_ended.set()
        self._on_end(exchange)
        if not exchange.is_probe:
            self._counts[_kind(exchange)] += 1
            self._log.note(exchange)


class _Response:
    """A response on its way to the client; keeps its exchange's status true.

    Args:
        connection: Where it is sent; None outside of our server, where each complete response counts as delivered.
    """

    def __init__(self, exchange: Exchange, connection: Connection | None, send: Send) -> None:
        self._exchange = exchange
        self._connection = connection
        self._send = send
        self._is_complete = False
        self._delivery: asyncio.Future[bool] | None = None

    async def send(self, message: Message) -> None:
        """Send a message of the response, its headers with the request's id."""
        exchange = self._exchange
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            names = [b"x-request-id"] + [b"request-id"] * is_of_anthropic(exchange.path)
            headers = [(name, exchange.request_id.encode()) for name in names]
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_complete = True
            if self._connection is not None:
                self._delivery = self._connection.delivery()

    async def end(self) -> None:
        """Wait until the last byte is sent, once the application is done; else change the status."""
        if self._is_complete and (self._delivery is None or await self._delivery):
            return
        if self._connection is None or self._connection.is_broken:
            self._exchange.note_undelivered()
        else:  # the application failed
            self._exchange.note_error(unexpected())
            self._exchange.status = 500


def _kind(exchange: Exchange) -> str:
    """Return a request's outcome, as the summary names it."""
    if exchange.is_cut_off:
        return "cut off"
    if exchange.status == CLIENT_CLOSED_REQUEST:
        return "left by clients"
    if exchange.status >= 500 and exchange.status != 503:
        return "failed"
    if exchange.status >= 400:
        return "refused"
    return "failed" if exchange.has_failed else "served"
