"""Read request bodies, with a size limit for each body and a total limit for each API key."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from .errors import ApiError, unavailable
from .limits import ServerLimits


class ClientLeftError(Exception):
    """Error raised when the client disconnects before its request body is complete."""


class Bodies:
    """Reader of request bodies that limits their memory; a body uses memory until its request is answered.

    Each owner may use an equal share of `max_buffered_bytes`, but at least `max_body_bytes`.
    """

    def __init__(self, limits: ServerLimits, num_owners: int) -> None:
        self._limits = limits
        self._share = max(limits.max_buffered_bytes // num_owners, limits.max_body_bytes)
        self._num_bytes: Counter[str] = Counter()
        self._arriving: set[asyncio.Timeout] = set()
        self._is_draining = False

    def num_bytes(self, owner: str) -> int:
        """Return the number of body bytes in an owner's unanswered requests."""
        return self._num_bytes[owner]

    def stop(self) -> None:
        """Refuse bodies that are still incomplete, and all later bodies."""
        self._is_draining = True
        for timeout in self._arriving:
            if not timeout.expired():
                timeout.reschedule(0)

    @asynccontextmanager
    async def whole(self, owner: str, scope: Scope, receive: Receive) -> AsyncIterator[bytes]:
        """Context manager that reads a request's body; the bytes count against the owner until the context exits.

        Raises:
            ApiError: 408 if the body takes too long, 413 if it is too large, 415 if it is compressed, 429 if the
                owner's share is full, 503 if the server begins to drain before the body is complete.
            ClientLeftError: If the client disconnects.
        """
        headers = Headers(scope=scope)
        coding = headers.get("content-encoding", "")
        if coding.lower() not in ("", "identity"):
            sentence = f"the body must not be compressed, but its Content-Encoding is {coding}"
            raise ApiError(415, sentence, "unsupported_encoding")
        declared = headers.get("content-length", "")
        self._check_size(int(declared[:20]) if declared.isascii() and declared.isdigit() else 0)
        body = bytearray()
        try:
            await self._read(owner, receive, body)
            yield bytes(body)
        finally:
            self._num_bytes[owner] -= len(body)

    async def _read(self, owner: str, receive: Receive, body: bytearray) -> None:
        seconds = self._limits.body_timeout_s
        try:
            async with asyncio.timeout(0 if self._is_draining else seconds) as timeout:
                self._arriving.add(timeout)
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeftError
                    self._add(owner, body, message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            if self._is_draining:
                raise unavailable("the server is shutting down", "shutting_down") from None
            raise ApiError(408, f"the body did not arrive within {seconds:g} s", "body_timeout") from None
        finally:
            self._arriving.discard(timeout)

    def _add(self, owner: str, body: bytearray, part: bytes) -> None:
        self._check_size(len(body) + len(part))
        if self._num_bytes[owner] + len(part) > self._share:
            raise ApiError(
                429,
                f"this API key has {self._num_bytes[owner]} bytes in pending requests, and the limit is {self._share}; "
                "try again later",
                "rate_limit_exceeded",
                retry_after_s=1,
            )
        self._num_bytes[owner] += len(part)
        body += part

    def _check_size(self, size: int) -> None:
        if size > self._limits.max_body_bytes:
            raise ApiError(413, f"the body exceeds the limit of {self._limits.max_body_bytes} bytes", "body_too_large")
