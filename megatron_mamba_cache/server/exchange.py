"""Records of HTTP requests and responses, and the access log."""

import json
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from starlette.datastructures import Headers
from starlette.types import Scope

from .errors import ApiError

CLIENT_CLOSED_REQUEST = 499

_PROBES = frozenset({"/health", "/ping", "/metrics", "/dashboard/history"})  # polled every few seconds
_KEY_REFUSED = (401, 403)
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

AccessLogFormat = Literal["text", "json", "off"]
Write = Callable[[str], object]


@dataclass(slots=True)
class Exchange:
    """Record of one HTTP request and its response, for logs, metrics and traces."""

    request_id: str  # the client's id or a random id
    method: str
    path: str  # percent-encoded as received; without the query string
    arrived: float = field(default_factory=time.monotonic)  # monotonic clock, in seconds
    key_name: str = ""  # name of the API key; "" before it is known, or if no key is needed
    status: int = 0  # response status; 499 if the client disconnected before the last byte; 0 before the response
    prompt_tokens: int | None = None  # token counts are None for requests without generation
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    first_token: float | None = None
    queue_seconds: float | None = None  # seconds in the queue, until the first reply's first step
    finish_reasons: tuple[str, ...] = ()
    ended: float | None = None
    error: str | None = None  # code (if it has none, type) of the error sent to the client
    is_cut_off: bool = False  # True if the server's shutdown interrupted the response
    headers: Sequence[tuple[bytes, bytes]] = ()

    @staticmethod
    def of_scope(scope: Scope) -> "Exchange":
        """Create the exchange for an HTTP request that has just arrived."""
        path = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogatepass")
        found = Exchange(_request_id(scope), scope["method"], _printable(path.partition(b"?")[0]))
        found.headers = scope["headers"]
        return found

    @property
    def is_probe(self) -> bool:
        """True for health checks and monitoring requests, which are not logged, unless their API key is refused."""
        return self.path in _PROBES and self.status not in _KEY_REFUSED

    @property
    def has_failed(self) -> bool:
        """True if the response started with a success status but ended with an error."""
        return self.status < 400 and self.error is not None

    def seconds_to(self, event: float | None) -> float | None:
        """Return the seconds from arrival to the monotonic time `event`; None if `event` is None."""
        return None if event is None else round(event - self.arrived, 4)

    def note_undelivered(self) -> None:
        """Set the status of an incompletely delivered response: 499 unless the server's shutdown is the cause."""
        self.status = (self.status or 503) if self.is_cut_off else CLIENT_CLOSED_REQUEST

    def note_error(self, error: ApiError) -> None:
        """Record an error sent as the response or within its stream."""
        self.error = error.code or error.type


def exchange_of(scope: Scope) -> Exchange:
    """Return the exchange in an ASGI scope; if the scope has none, return a new exchange."""
    found = scope.get("exchange")
    return found if isinstance(found, Exchange) else Exchange.of_scope(scope)


def write_line(line: str) -> None:
    """Print a line to stdout; ignore I/O errors such as a closed pipe."""
    with suppress(OSError, ValueError):
        print(line, flush=True)


class AccessLog:
    """Access log with one line per request; calls `write` with each line, without a newline."""

    def __init__(
        self,
        form: AccessLogFormat = "off",
        write: Write = write_line,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._line: Callable[[dict[str, Any]], str] | None = {"text": _text, "json": _json, "off": None}[form]
        self._write = write
        self._now = now

    def note(self, exchange: Exchange) -> None:
        """Log a request that has ended."""
        if self._line is not None:
            self._write(self._line(_fields(exchange, self._now())))


def _fields(exchange: Exchange, now: datetime) -> dict[str, Any]:
    """Return the fields of a log line, by JSON name."""
    return {
        "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "request_id": exchange.request_id,
        "key": exchange.key_name or None,
        "method": exchange.method,
        "path": exchange.path,
        "status": exchange.status,
        "prompt_tokens": exchange.prompt_tokens,
        "cached_tokens": exchange.cached_tokens,
        "completion_tokens": exchange.completion_tokens,
        "first_token_seconds": exchange.seconds_to(exchange.first_token),
        "seconds": exchange.seconds_to(exchange.ended),
        "error": exchange.error,
    }


def _json(fields: dict[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"))


def _text(fields: dict[str, Any]) -> str:
    head = f"{fields['time']} {fields['method']} {fields['path']} {fields['status']}"
    names = {
        "key": "key",
        "prompt_tokens": "prompt",
        "cached_tokens": "cached",
        "completion_tokens": "completion",
        "first_token_seconds": "first_token_s",
        "seconds": "seconds",
        "error": "error",
        "request_id": "id",
    }
    given = [f"{short}={fields[name]}" for name, short in names.items() if fields[name] is not None]
    return " ".join([head, *given])


def _request_id(scope: Scope) -> str:
    """Return the client's `X-Request-Id` if it is safe to print in headers and logs, otherwise a random id."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex


def _printable(path: bytes) -> str:
    """Return a path as printable ASCII; percent-encode spaces and all bytes that are not printable ASCII."""
    return "".join(chr(byte) if 0x21 <= byte <= 0x7E else f"%{byte:02X}" for byte in path)
