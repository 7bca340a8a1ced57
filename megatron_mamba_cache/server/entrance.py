"""The outermost layer of the application: every request gets an id, is counted, and is logged when it ends."""

import time
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .access_log import AccessLog
from .errors import is_of_anthropic
from .exchange import Exchange
from .responses import CLIENT_CLOSED_REQUEST

_PROBES = frozenset({"/health", "/ping", "/metrics", "/dashboard/history"})  # polled every few seconds
_KEY_REFUSED = (401, 403)
_NOT_SERVED = ("refused", "failed", "left by clients", "cut off")


class Entrance:
    """ASGI middleware around everything else; stores the exchange as `scope["exchange"]`.

    Probes are neither counted nor logged, unless their key is refused.
    """

    def __init__(self, app: ASGIApp, log: AccessLog) -> None:
        self._app = app
        self._log = log
        self._open: dict[int, Exchange] = {}
        self._counts: Counter[str] = Counter()
        self._began = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = scope["exchange"] = Exchange.of_scope(scope)

        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                names = [b"x-request-id"] + [b"request-id"] * is_of_anthropic(exchange.path)
                headers = [(name, exchange.request_id.encode()) for name in names]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        self._open[id(exchange)] = exchange
        try:
            await self._app(scope, receive, noting_send)
        finally:
            del self._open[id(exchange)]
            self._end(exchange)

    def cut_off(self) -> None:
        """Mark all open requests as cut off by the server's end."""
        for exchange in self._open.values():
            exchange.is_cut_off = True

    @property
    def num_open(self) -> int:
        """Number of requests without a complete response, excluding probes."""
        return sum(exchange.path not in _PROBES for exchange in self._open.values())

    def summary(self) -> str:
        """Return the server's uptime and the outcomes of its requests."""
        others = ", ".join(f"{self._counts[kind]} {kind}" for kind in _NOT_SERVED)
        seconds = time.monotonic() - self._began
        return f"stopped after {seconds:.1f} s: {self._counts['served']} requests served, {others}"

    def _end(self, exchange: Exchange) -> None:
        exchange.ended = time.monotonic()
        exchange.status = exchange.status or CLIENT_CLOSED_REQUEST
        if exchange.path in _PROBES and exchange.status not in _KEY_REFUSED:
            return
        self._counts[_kind(exchange)] += 1
        self._log.note(exchange)


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
    return "served" if exchange.error is None else "failed"
