"""ASGI middleware for every route: CORS, API keys, readiness and body limits."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .backend import BackendState
from .bodies import Bodies, ClientLeftError
from .connection import Connection
from .errors import ApiError, engine_failed, is_of_anthropic, unavailable, unexpected
from .exchange import CLIENT_CLOSED_REQUEST, AccessLog, Exchange, exchange_of
from .responses import error_response
from .tenants import ApiKeys

_NOT_SERVED = ("refused", "failed", "left by clients", "cut off")


class Entrance:
    """Outermost ASGI middleware; records each request as an `Exchange` in `scope["exchange"]`.

    A request ends when the last byte of its response is in the kernel's send buffer, or when the client disconnects.
    `on_end` is then called with the exchange, for health probes too.
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
        """Mark all open requests as interrupted by the server's shutdown."""
        for exchange in self._open.values():
            exchange.is_cut_off = True

    @property
    def num_open(self) -> int:
        """Number of open requests, excluding probes."""
        return sum(not exchange.is_probe for exchange in self._open.values())

    async def open_requests_end(self) -> None:
        """Wait until all currently open requests have ended; ignore probes and requests that arrive later."""
        waiting = [exchange for exchange in self._open.values() if not exchange.is_probe]
        while any(exchange.ended is None for exchange in waiting):
            self._some_ended.clear()
            await self._some_ended.wait()

    def summary(self) -> str:
        """Return a log message with the server's uptime and the number of requests with each outcome."""
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
    """Sends the response to one request; records its status and any delivery failure in the request's `Exchange`.

    `connection` is None if the application runs in a server other than `DrainingServer`. Each complete response
    then counts as delivered.
    """

    def __init__(self, exchange: Exchange, connection: Connection | None, send: Send) -> None:
        self._exchange = exchange
        self._connection = connection
        self._send = send
        self._is_complete = False
        self._delivery: asyncio.Future[bool] | None = None

    async def send(self, message: Message) -> None:
        """Send an ASGI message; if it starts the response, add headers with the request's id."""
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
        """Wait until the response is delivered; if it is incomplete or undelivered, record that in the exchange."""
        if self._is_complete and (self._delivery is None or await self._delivery):
            return
        if self._connection is None or self._connection.is_broken:
            self._exchange.note_undelivered()
        else:  # the application raised an error before the response was complete
            self._exchange.note_error(unexpected())
            self._exchange.status = 500


def _kind(exchange: Exchange) -> str:
    """Return the outcome of a request, such as "served" or "refused", for the counts in `Entrance.summary`."""
    if exchange.is_cut_off:
        return "cut off"
    if exchange.status == CLIENT_CLOSED_REQUEST:
        return "left by clients"
    if exchange.status >= 500 and exchange.status != 503:
        return "failed"
    if exchange.status >= 400:
        return "refused"
    return "failed" if exchange.has_failed else "served"


_OPEN_PATHS = ("/health", "/ping")
"""Paths that need no API key."""
_ADMIN_PATHS = ("/admin", "/metrics", "/dashboard")
"""Paths that need an administrator's key. Any API key gives access to all other paths."""
_SERVED_PATHS = ("/v1", "/admin", "/tokenize", "/detokenize", "/tokenizer_info")
"""Paths that return 503 unless the server is ready. Their request bodies have a size limit."""
_METHODS = ("GET", "POST")
_EXPOSED = ("X-Request-Id", "Request-Id", "Retry-After")


class AccessControl:
    """ASGI middleware that checks the API key, reads the body, and returns 503 unless the server is ready."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        bodies: Bodies,
        state: Callable[[], BackendState],
        is_draining: Callable[[], bool],
    ) -> None:
        self._app = app
        self._keys = keys
        self._bodies = bodies
        self._state = state
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a permitted request to the application; send an error response to any other request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        try:
            if scope["path"] not in _OPEN_PATHS:
                self._admit(scope)
            if scope["method"] == "POST" and _is_below(scope["path"], _SERVED_PATHS):
                async with self._bodies.whole(scope["owner"], scope, receive) as body:
                    await self._app(scope, _replayed(body, receive), send)
            else:
                await self._app(scope, receive, send)
        except ClientLeftError:
            pass  # the client has disconnected
        except ApiError as error:
            exchange_of(scope).note_error(error)
            await error_response(error, scope)(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        path, headers = scope["path"], Headers(scope=scope)
        header = headers.get("authorization", "")
        if not header and (key := headers.get("x-api-key")):
            header = f"Bearer {key}"  # Anthropic's clients send the key in X-Api-Key
        owner = self._keys.owner_of(header)
        if owner is None:
            raise ApiError(401, "the API key is missing or unknown; send Authorization: Bearer KEY", "invalid_api_key")
        scope["owner"] = owner
        exchange_of(scope).key_name = self._keys.name_of(owner)
        if is_for_admins(path) and not self._keys.may_administrate(owner):
            raise ApiError(403, "this path needs an administrator's API key", "not_an_admin_key")
        origin = headers.get("origin")
        if is_for_admins(path) and origin and urlsplit(origin).netloc != headers.get("host", ""):
            raise ApiError(
                403, f"pages from other origins may not use this path; the Origin header is {origin}", "foreign_origin"
            )
        if not _is_below(path, _SERVED_PATHS):
            return
        state = self._state()
        if state.failure is not None:
            raise engine_failed(state.failure)
        if not state.is_ready:
            raise unavailable("the server is warming up", "not_ready")
        if self._is_draining():
            raise unavailable("the server is shutting down", "shutting_down")


class CrossOrigin:
    """ASGI middleware for CORS; runs before the API key check because preflight requests carry no key.

    Pages from other origins can never use admin paths. `origins` has entries like "https://chat.example"; the entry
    "*" allows every origin.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._closed = app
        self._open: ASGIApp = app
        if origins:
            self._open = CORSMiddleware(
                app, allow_origins=list(origins), allow_methods=_METHODS, allow_headers=["*"], expose_headers=_EXPOSED
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_closed = scope["type"] != "http" or is_for_admins(scope["path"])
        await (self._closed if is_closed else self._open)(scope, receive, send)


def is_for_admins(path: str) -> bool:
    """Return True if a path requires an administrator's API key."""
    return _is_below(path, _ADMIN_PATHS)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` that first returns the whole body, then calls the original `receive`."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def _is_below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)
