"""The gate in front of every route: who may pass, whether the server is ready, and how much may come in."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .backend import BackendState
from .errors import ApiError, unavailable
from .limits import ServerLimits
from .replies import CLIENT_CLOSED_REQUEST, error_response
from .tenants import ApiKeys

_HEALTH = "/health"
_ADMIN_PATHS = ("/admin", "/metrics", "/dashboard")
_SERVED_PATHS = ("/v1", "/admin")


class ClientLeftError(Exception):
    """The client has left before its request was whole."""


@dataclass(slots=True)
class Bodies:
    """The bytes of requests that are not answered yet."""

    limits: ServerLimits
    num_bytes: int = 0

    def add(self, count: int, size: int) -> None:
        """Count `count` bytes more of a body that has `size` then.

        Raises:
            ApiError: 413 or 429, if that is too much; nothing has changed then.
        """
        if size > self.limits.max_body_bytes:
            raise ApiError(413, f"the body is larger than {self.limits.max_body_bytes} bytes", "body_too_large")
        if self.num_bytes + count > self.limits.max_buffered_bytes:
            raise ApiError(
                429, "too many bytes of requests are waiting; try again later", "rate_limit_exceeded", retry_after_s=1
            )
        self.num_bytes += count


class AccessControl:
    """ASGI middleware: API key first, then readiness, then the whole body within its limits.

    Args:
        state: Of the backend, now.
        is_draining: Whether the server takes nothing new.
        on_status: Told of each response's status.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        limits: ServerLimits,
        state: Callable[[], BackendState],
        is_draining: Callable[[], bool],
        on_status: Callable[[int], None],
    ) -> None:
        self._app = app
        self._keys = keys
        self._limits = limits
        self._state = state
        self._is_draining = is_draining
        self._on_status = on_status
        self._bodies = Bodies(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._on_status(message["status"])
            await send(message)

        try:
            self._admit(scope)
        except ApiError as error:
            await error_response(error)(scope, receive, counting_send)
            return
        body = bytearray()
        counted = 0
        try:
            counted = await self._read(scope, receive, body)
            await self._app(scope, _replayed(bytes(body), receive), counting_send)
        except ClientLeftError:
            self._on_status(CLIENT_CLOSED_REQUEST)
        except ApiError as error:
            await error_response(error)(scope, receive, counting_send)
        finally:
            self._bodies.num_bytes -= counted

    def _admit(self, scope: Scope) -> None:
        path = scope["path"]
        if path == _HEALTH:
            return
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        owner = self._keys.owner_of(header.decode("latin-1"))
        if owner is None:
            raise ApiError(
                401, "the API key is missing or not known: send Authorization: Bearer KEY", "invalid_api_key"
            )
        scope["owner"] = owner
        if _is_below(path, _ADMIN_PATHS) and not self._keys.may_administrate(owner):
            raise ApiError(403, "this API key may not administrate the server", "not_an_admin_key")
        if not _is_below(path, _SERVED_PATHS):
            return
        state = self._state()
        if state.failure is not None:
            raise unavailable(state.failure, "engine_failed", retry_after_s=30)
        if not state.is_ready:
            raise unavailable("the server is warming up", "not_ready")
        if self._is_draining():
            raise unavailable("the server is shutting down", "shutting_down")

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> int:
        """Read the whole body and return the bytes that are counted for it.

        Raises:
            ApiError: 408, 413 or 429.
            ClientLeftError: If the client disconnects.
        """
        told = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        if told.isdigit() and int(told[:20]) > self._limits.max_body_bytes:
            self._bodies.add(0, int(told[:20]))
        counted = 0
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeftError
                    part = message.get("body", b"")
                    self._bodies.add(len(part), len(body) + len(part))
                    counted += len(part)
                    body += part
                    more = message.get("more_body", False)
        except BaseException as error:
            self._bodies.num_bytes -= counted
            if isinstance(error, TimeoutError):
                seconds = self._limits.body_timeout_s
                raise ApiError(408, f"the body has not arrived within {seconds:g} s", "body_timeout") from None
            raise
        return counted


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once, and then what comes."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def _is_below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)
